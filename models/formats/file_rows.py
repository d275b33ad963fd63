"""Rows of a large tensor, or parts of rows, read from its file into a buffer that each thread uses again.

Pages of a memory-mapped file cost time and memory: the system copies them to its page cache, and maps each
of them. What the page cache does not hold is read past it here, where the system can (`O_DIRECT`).
"""

import ctypes
import functools
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ModelError

DIRECT = getattr(os, "O_DIRECT", 0)
UNIT = mmap.PAGESIZE  # bytes, of which offsets and lengths of direct reads are multiples
SMALLEST = 1 << 16  # bytes that are read past the page cache
BUFFERS = threading.local()


def read_rows(array: np.ndarray, file: Path) -> np.ndarray:
    """The numbers of an array that is mapped from a file, until this thread's next call.

    They are those of the array itself if it is not mapped, or its rows are not in one piece each.

    Args:
        array: the array.
        file: the path of the file.
    """
    mapping = mapping_of(array)
    if mapping is None or not array.size or not hasattr(os, "preadv"):
        return array
    origin = np.frombuffer(mapping, np.uint8).ctypes.data
    begin = array.ctypes.data - origin  # in the file
    if not array.flags.c_contiguous:
        in_rows = array.ndim == 2 and array.strides[1] == array.itemsize and array.strides[0] > 0
        return read_parts(array, file, begin) if in_rows else array
    end = begin + array.nbytes
    first, last = begin // UNIT * UNIT, -(-end // UNIT) * UNIT
    buffer = buffer_of(last - first)
    direct = DIRECT and array.nbytes >= SMALLEST and not is_cached(origin + first, last - first)
    filled = direct and fill(buffer[: last - first], file, DIRECT, first, end)
    if not filled and not fill(buffer[begin - first : end - first], file, 0, begin, end):
        raise ModelError(f"{file} must not change while it is read")
    return np.frombuffer(buffer, array.dtype, array.size, begin - first).reshape(array.shape)


def read_parts(array: np.ndarray, file: Path, begin: int) -> np.ndarray:
    """The numbers of an array whose rows are parts of those of a tensor; nothing between them is read.

    Args:
        array: the array, `[rows, columns]`.
        file: the path of the file.
        begin: where in the file its first number is, in bytes.
    """
    stride, size = array.strides[0], array.shape[1] * array.itemsize
    buffer = buffer_of(array.nbytes)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for row in range(len(array)):
            part = buffer[row * size : (row + 1) * size]
            if os.preadv(descriptor, [part], begin + row * stride) != size:
                raise ModelError(f"{file} must not change while it is read")
    finally:
        os.close(descriptor)
    return np.frombuffer(buffer, array.dtype, array.size).reshape(array.shape)


def fill(buffer: memoryview, file: Path, flags: int, begin: int, end: int) -> bool:
    """Read a part of a file. Returns whether it could be read so.

    Args:
        buffer: is filled; may be longer than the file.
        file: the path of the file.
        flags: further flags of `os.open`.
        begin: first byte in the file.
        end: the byte in the file after the last that is needed.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | flags)
    except OSError:  # a file system without direct reads
        return False
    try:
        if not flags and hasattr(os, "posix_fadvise"):
            # Read-ahead would put the rest of the file in the page cache, from where it is read more slowly.
            os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_RANDOM)
        position = begin
        while position < end:
            count = os.preadv(descriptor, [buffer[position - begin :]], position)
            if count == 0:
                return False
            position += count
    except OSError:  # a unit other than that of this system
        return False
    finally:
        os.close(descriptor)
    return True


def mapping_of(array: np.ndarray) -> mmap.mmap | None:
    """The mapping of a file that an array is a part of; None for one in memory."""
    base: Any = array
    while base is not None and not isinstance(base, mmap.mmap):
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return base


def buffer_of(size: int) -> memoryview:
    """The buffer of this thread, of at least `size` bytes, at the begin of a page."""
    buffer = getattr(BUFFERS, "buffer", None)
    if buffer is None or len(buffer) < size:
        BUFFERS.buffer = buffer = memoryview(mmap.mmap(-1, size))
    return buffer


@functools.cache
def page_query() -> Callable[..., int] | None:
    """The system call `mincore`, which tells which pages are in memory; None where there is none."""
    try:
        call = ctypes.CDLL(None, use_errno=True).mincore
    except (AttributeError, OSError, TypeError):
        return None
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return call


def is_cached(begin: int, size: int) -> bool:
    """Whether the system holds more than half of a mapped part of a file in its page cache.

    Args:
        begin: its address, the begin of a page.
        size: bytes.
    """
    query = page_query()
    resident = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    if query is None or query(begin, size, resident.ctypes.data):
        return False
    return bool((resident & 1).mean() > 0.5)
