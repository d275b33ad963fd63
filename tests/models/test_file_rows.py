"""Rows of tensors that are read from their files, and blocks that are transposed."""

import errno
import mmap
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from entropic_jax.models import ModelError, host_memory
from entropic_jax.models.formats import file_rows
from entropic_jax.models.formats.file_rows import read_rows
from entropic_jax.models.host_memory import LARGE, NEW_MEMORY, aligned_empty, memory_advice, touch, transpose
from entropic_jax.models.tensor_names import Piece
from entropic_jax.models.weights import fill_blocks

HEADER = 1000  # bytes, so that rows begin inside a unit of direct reads
SHAPE = (300, 500)


@pytest.fixture
def numbers():
    return np.arange(np.prod(SHAPE), dtype=np.uint16).reshape(SHAPE)


@pytest.fixture
def file(tmp_path, numbers):
    path = tmp_path / "file"
    path.write_bytes(b"h" * HEADER + numbers.tobytes())
    return path


def mapped(file):
    return np.memmap(file, np.uint8, "r")[HEADER:].view(np.uint16).reshape(SHAPE)


@pytest.fixture
def opened(monkeypatch):
    """The flags of the files that are opened."""
    all_flags, original = [], os.open

    def record(path, flags, *rest):
        all_flags.append(flags)
        return original(path, flags, *rest)

    monkeypatch.setattr(os, "open", record)
    return all_flags


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("rows", [slice(0, 300), slice(7, 290), slice(230, 300)])
def test_rows_are_those_of_the_file(rows, cached, file, numbers, opened, monkeypatch):
    monkeypatch.setattr(file_rows, "is_cached", lambda *place: cached)
    part = read_rows(mapped(file)[rows], file)
    np.testing.assert_array_equal(part, numbers[rows])
    assert bool(opened[0] & file_rows.DIRECT) == (not cached and file_rows.DIRECT > 0)


def test_every_other_column_is_not_copied(file, numbers):
    part = mapped(file)[:, 3:400:2]
    assert read_rows(part, file) is part
    assert read_rows(numbers, file) is numbers


def test_small_parts_are_read_without_read_ahead(file, numbers, opened, monkeypatch):
    """Neither past the page cache nor with what follows them in the file."""
    advice = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: advice.append(arguments[1:]), raising=False)
    np.testing.assert_array_equal(read_rows(mapped(file)[3:5], file), numbers[3:5])
    assert opened == [os.O_RDONLY]
    if hasattr(os, "POSIX_FADV_RANDOM"):
        assert advice == [(HEADER + 3 * 1000, 2000, os.POSIX_FADV_RANDOM)]


def test_a_file_system_may_refuse_direct_reads(file, numbers, monkeypatch):
    original = os.open

    def refuse(path, flags, *rest):
        if file_rows.DIRECT and flags & file_rows.DIRECT:
            raise OSError(errno.EINVAL, "direct")
        return original(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(file_rows, "is_cached", lambda *place: False)
    np.testing.assert_array_equal(read_rows(mapped(file), file), numbers)


def test_a_file_that_shrinks_is_an_error(file, monkeypatch):
    array = mapped(file)
    monkeypatch.setattr(file_rows, "is_cached", lambda *place: False)
    os.truncate(file, HEADER + 100_000)
    with pytest.raises(ModelError, match="must not change while it is read"):
        read_rows(array, file)


@pytest.mark.skipif(file_rows.page_query() is None, reason="no mincore")
def test_pages_that_were_read_are_cached(file):
    array = mapped(file)
    assert array.sum() > 0
    begin = array.ctypes.data - HEADER
    assert file_rows.is_cached(begin, HEADER + array.nbytes)


PLACES = [(300, 320, 4), (531, 600, 4), (301, 320, 8), (64, 67, 0), (3, 8, 4), (70, 80, 2)]


@pytest.mark.parametrize("columns", [50, 2100])
@pytest.mark.parametrize("dtype", ["uint16", "uint8", "float32"])
@pytest.mark.parametrize(("rows", "length", "place"), PLACES)
def test_transposes(rows, length, place, dtype, columns):
    matrix = np.random.default_rng(0).integers(0, 255, (rows, columns)).astype(dtype)
    out = np.zeros((columns, length), dtype)
    transpose(matrix, out[:, place : place + rows])
    expected = np.zeros_like(out)
    expected[:, place : place + rows] = matrix.T
    np.testing.assert_array_equal(out, expected)


def resident(array: np.ndarray) -> np.ndarray:
    """Whether each page of an array is in memory."""
    begin = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    count = -(-(array.ctypes.data + array.nbytes - begin) // mmap.PAGESIZE)
    pages = np.zeros(count, np.uint8)
    assert file_rows.page_query()(begin, count * mmap.PAGESIZE, pages.ctypes.data) == 0
    return (pages & 1).astype(bool)


@pytest.mark.skipif(file_rows.page_query() is None, reason="no mincore")
@pytest.mark.parametrize("advice", ["as it is", "none", "refused"])
@pytest.mark.parametrize("size", [LARGE, NEW_MEMORY - 64, 2 * NEW_MEMORY + 12345])
def test_every_page_of_new_memory_is_touched(size, advice, monkeypatch):
    """Whether the system populates pages or the process writes to them, and nothing behind the array."""
    chosen = {"as it is": memory_advice(), "none": None, "refused": lambda *arguments: -1}[advice]
    monkeypatch.setattr(host_memory, "memory_advice", lambda: chosen)
    memory = aligned_empty((size + NEW_MEMORY,), np.dtype(np.uint8))
    with ThreadPoolExecutor(3) as threads:
        touch(memory[:size], threads)
    assert resident(memory[:size]).all()
    assert not resident(memory[size + 2 * mmap.PAGESIZE :]).any()


@pytest.mark.parametrize("size", [1, 5000, LARGE - 1])
def test_touching_small_arrays_writes_to_nothing_else(size):
    memory = aligned_empty((size + 64,), np.dtype(np.uint8))
    memory[:] = 1
    with ThreadPoolExecutor(3) as threads:
        touch(memory[:size], threads)
    assert (memory[size:] == 1).all()


def test_large_arrays_have_pages_of_the_system():
    """Those of NumPy are huge where the system has them."""
    large, small = (aligned_empty((size,), np.dtype(np.uint8)) for size in (LARGE, 100))
    assert large.ctypes.data % mmap.PAGESIZE == 0 and small.ctypes.data % host_memory.ALIGNMENT == 0
    assert isinstance(file_rows.mapping_of(large), mmap.mmap) and file_rows.mapping_of(small) is None


class Matrix(np.ndarray):
    """A tensor without a file."""

    def release(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("transposed", [False, True])
def test_nothing_is_written_before_the_memory_was_touched(transposed):
    """Touching writes zeros: what was written before would be lost."""
    stored = np.arange(1, 7, dtype=np.float32).reshape(2, 3).view(Matrix)
    out = np.zeros((3, 2) if transposed else (2, 3), np.float32)
    touched = Future()
    with ThreadPoolExecutor(2) as threads:
        blocks = fill_blocks(stored, out, Piece("w", (2, 3), transposed), threads, [touched])
        time.sleep(0.1)
        assert not out.any() and not any(block.done() for block in blocks)
        touched.set_result(None)
    np.testing.assert_array_equal(out, np.asarray(stored).T if transposed else stored)
