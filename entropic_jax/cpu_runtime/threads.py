"""Start and stop of the worker threads; `thread_pool` holds the code that they run."""

import atexit
import ctypes
import os
from typing import Any

import numpy as np

from .code_cache import define_symbol, load_or_compile
from .mailbox import MAILBOX, SIZE, THREADS
from .matrix_units import matrix_units_missing
from .run_once import run_once

MAX_THREADS = 8
_kept_alive: list[Any] = []


def num_processors() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2


def num_threads() -> int:
    """Threads among which a kernel divides its work, the caller's included."""
    return min(MAX_THREADS, num_processors())


@run_once
def start() -> None:
    """Allocate the mailbox and start the threads, one fewer than there are processors to run on.

    A kernel that comes from the code cache may use the matrix units, so the permission is asked for here.
    """
    matrix_units_missing()
    threads = num_threads()
    mailbox = np.zeros(SIZE // 8, np.int64)
    mailbox[THREADS // 8] = threads
    _kept_alive.append(mailbox)
    define_symbol(MAILBOX, mailbox.ctypes.data)
    if threads < 2:
        return
    worker = load_or_compile("entropic_worker", _build_worker)
    library = ctypes.CDLL(None)
    create, join = library.pthread_create, library.pthread_join
    create.argtypes, create.restype = [ctypes.c_void_p] * 4, ctypes.c_int
    join.argtypes = [ctypes.c_size_t, ctypes.c_void_p]
    handles = [ctypes.c_size_t() for _ in range(threads - 1)]
    running = [handle for handle in handles if create(ctypes.byref(handle), None, worker, None) == 0]
    process = os.getpid()

    def stop() -> None:
        """End the threads before the interpreter frees their code and the mailbox."""
        mailbox[THREADS // 8] = 1
        if os.getpid() == process:  # a fork has none of the threads
            for handle in running:
                join(handle, None)

    atexit.register(stop)


def _build_worker() -> Any:
    from . import thread_pool

    yield "entropic_worker", thread_pool.worker_loop()
