"""Memory of the arrays that a model is loaded into: reserved, touched, and filled in another order."""

import ctypes
import functools
import math
import mmap
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np

ALIGNMENT = 64  # bytes, of arrays that a device need not copy
LARGE = 1 << 20  # bytes of an array that has pages of its own
NEW_MEMORY = 1 << 23  # bytes of new memory that a thread touches at a time
POPULATE_WRITE = 23  # of Linux: touches pages faster than a process can
WIDENED = 4  # rows of 16-bit numbers that are transposed as one of 64 bits
STRIP = (256, 1024)  # rows and columns of a part that stays in the processor's cache while it is transposed
STRIPS = threading.local()


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that a CPU device takes over without a copy.

    A large one has pages of the system's size, where NumPy asks for huge ones, which virtual machines may
    take long to provide.
    """
    size = math.prod(shape) * dtype.itemsize
    if size >= LARGE:
        return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)
    memory = np.empty(size + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def touch(host: np.ndarray, threads: ThreadPoolExecutor) -> list[Future[None]]:
    """Have threads touch new memory, each its own pages, before rows are transposed into it.

    A block of transposed rows touches all pages of the array, which several threads would wait for at once.
    Touching a page writes to it, so that nothing else may be written before the results are there.

    Args:
        host: an array that nothing was written to, in one piece.
        threads: the threads that touch the memory.
    """
    memory = host.reshape(-1).view(np.uint8)
    first, size = -host.ctypes.data % mmap.PAGESIZE, memory.size
    memory[:1] = 0
    ranges = ((begin, min(begin + NEW_MEMORY, size)) for begin in range(first, size, NEW_MEMORY))
    return [threads.submit(touch_pages, memory[begin:end]) for begin, end in ranges]


def touch_pages(memory: np.ndarray) -> None:
    """Touch memory that begins at a page."""
    advise = memory_advice()
    if advise is None or advise(memory.ctypes.data, memory.size, POPULATE_WRITE):
        memory[:: mmap.PAGESIZE].fill(0)


@functools.cache
def memory_advice() -> Callable[..., int] | None:
    """The system call `madvise`, during which other threads of Python run; None where there is none."""
    try:
        call = ctypes.CDLL(None, use_errno=True).madvise
    except (AttributeError, OSError, TypeError):
        return None
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call


def transpose(rows: np.ndarray, out: np.ndarray) -> None:
    """Copy a matrix to its transpose, in strips that stay in the processor's cache.

    Four rows of 16-bit numbers are interleaved first, and moved as one row of 64-bit numbers.

    Args:
        rows: [rows, columns].
        out: is filled, [columns, rows].
    """
    widened = len(rows) // WIDENED * WIDENED if rows.itemsize == 2 and is_widened(out) else 0
    height, width = STRIP
    for begin in range(0, len(rows), height):
        for left in range(0, rows.shape[1], width):
            columns = slice(left, left + width)
            part, end = rows[begin : begin + height, columns], min(begin + height, widened)
            if begin < end:
                out[columns, begin:end].view(np.uint64)[...] = interleaved(part[: end - begin]).T
            rest = max(begin, end)
            out[columns, rest : begin + height] = part[rest - begin :].T


def interleaved(rows: np.ndarray) -> np.ndarray:
    """Rows of 16-bit numbers, four as one of 64-bit numbers, which holds until this thread's next call."""
    if not hasattr(STRIPS, "buffer"):
        STRIPS.buffer = np.empty(math.prod(STRIP), np.uint16)
    strip = STRIPS.buffer[: rows.size].view(rows.dtype).reshape(len(rows) // WIDENED, -1, WIDENED)
    for i in range(WIDENED):
        strip[..., i] = rows[i::WIDENED]
    return strip.view(np.uint64)[..., 0]


def bits(array: np.ndarray) -> np.ndarray:
    """A view that NumPy copies fast: its own integers in place of bfloat16."""
    return array.view(np.uint16) if array.dtype == jnp.bfloat16 else array


def is_widened(out: np.ndarray) -> bool:
    """Whether four 16-bit numbers of a row of the array are one of 64 bits."""
    return out.strides == (out.strides[0], 2) and not any(n % 8 for n in (out.ctypes.data, out.strides[0]))
