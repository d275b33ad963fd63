"""The threads that help a kernel, and the board on which it publishes its work; `pool` is what they do."""

import ctypes
import os
from typing import Any

import numpy as np

from .library import compiled, name_address
from .once import once

MOST_THREADS = 8
BOARD = "entropic_board"
JOB, FUNCTION, ARGUMENT, DONE, BUSY, THREADS = (64 * i for i in range(6))  # bytes: a cache line for each
_kept: list[Any] = []


@once
def start() -> None:
    """Put up the board and start the threads, one fewer than there are processors to run on."""
    count = min(MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
    memory = np.zeros(64, np.int64)
    memory[THREADS // 8] = count
    _kept.append(memory)
    name_address(BOARD, memory.ctypes.data)
    if count < 2:
        return
    worker = compiled("entropic_worker", _worker)
    create = ctypes.CDLL(None).pthread_create
    create.argtypes, create.restype = [ctypes.c_void_p] * 4, ctypes.c_int
    for _ in range(count - 1):
        handle = ctypes.c_size_t()
        create(ctypes.byref(handle), None, worker, None)


def _worker() -> Any:
    from . import pool

    yield "entropic_worker", pool.worker()
