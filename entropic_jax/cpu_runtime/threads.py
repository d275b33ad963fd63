"""The threads that help a kernel; `pool` is what they do."""

import atexit
import ctypes
import os
from typing import Any

import numpy as np

from .code_cache import compiled, name_address
from .mailbox import BOARD, SIZE, THREADS
from .run_once import once

MOST_THREADS = 8
_kept: list[Any] = []


@once
def start() -> None:
    """Put up the board and start the threads, one fewer than there are processors to run on."""
    count = min(MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
    memory = np.zeros(SIZE // 8, np.int64)
    memory[THREADS // 8] = count
    _kept.append(memory)
    name_address(BOARD, memory.ctypes.data)
    if count < 2:
        return
    worker = compiled("entropic_worker", _worker)
    library = ctypes.CDLL(None)
    create, join = library.pthread_create, library.pthread_join
    create.argtypes, create.restype = [ctypes.c_void_p] * 4, ctypes.c_int
    join.argtypes = [ctypes.c_size_t, ctypes.c_void_p]
    handles = [ctypes.c_size_t() for _ in range(count - 1)]
    running = [handle for handle in handles if create(ctypes.byref(handle), None, worker, None) == 0]
    mine = os.getpid()

    def stop() -> None:
        """Let the threads end: the interpreter is about to take their code and the board from under them."""
        memory[THREADS // 8] = 1
        if os.getpid() == mine:  # a fork has none of the threads
            for handle in running:
                join(handle, None)

    atexit.register(stop)


def _worker() -> Any:
    from . import thread_pool

    yield "entropic_worker", thread_pool.worker()
