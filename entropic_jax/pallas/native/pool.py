"""Threads that share the chunks of a kernel's work.

The caller publishes a job as one word, `generation << 32 | chunks left`, and works on it itself; whoever
decrements the word owns the chunk. A thread that sleeps, or that the system gives no time, delays nobody:
its chunks are taken by others. After a fork there are no other threads, and the caller does all.

Waiting threads spin for some microseconds, then nap for a few at a time, so that XLA's own threads get the
cores between two kernels of a step; after some tens of milliseconds without work the naps grow.
"""

import ctypes
import os
import sys
from typing import Any

import numpy as np
from numba import cfunc, njit, types
from numba.extending import intrinsic

from .once import once
from .vector import intrinsic_of

MOST_THREADS = 8
SPINS = 2_000
JOB, FUNCTION, ARGUMENT, DONE, BUSY = (64 * i for i in range(5))  # bytes: each on a cache line of its own
NAP, LONGEST_NAP, NAPS = 10, 2000, 2000  # µs, µs, and how many short ones
TIMER_SLACK = 29  # of prctl: without, Linux adds 50 µs to every nap


@intrinsic
def load(context, place):
    """The word at an address, with all that was written before it."""

    def generate(context, builder, signature, arguments):
        word = context.get_value_type(types.intp)
        return builder.load_atomic(builder.inttoptr(arguments[0], word.as_pointer()), "acquire", 8)

    return types.intp(types.intp), generate


@intrinsic
def store(context, place, value):
    """Write a word after all that was written before."""

    def generate(context, builder, signature, arguments):
        word = context.get_value_type(types.intp)
        target = builder.inttoptr(arguments[0], word.as_pointer())
        builder.store_atomic(arguments[1], target, "release", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def add(context, place, value):
    """Add to a word; returns what it was."""

    def generate(context, builder, signature, arguments):
        word = context.get_value_type(types.intp)
        target = builder.inttoptr(arguments[0], word.as_pointer())
        return builder.atomic_rmw("add", target, arguments[1], "acq_rel")

    return types.intp(types.intp, types.intp), generate


@intrinsic
def swap_if(context, place, expected, value):
    """Replace the word if it is `expected`; 1 if it was."""

    def generate(context, builder, signature, arguments):
        word = context.get_value_type(types.intp)
        target = builder.inttoptr(arguments[0], word.as_pointer())
        outcome = builder.cmpxchg(target, arguments[1], arguments[2], "acq_rel", "acquire")
        return builder.zext(builder.extract_value(outcome, 1), word)

    return types.intp(types.intp, types.intp, types.intp), generate


@intrinsic
def invoke(context, function, argument, chunk):
    """Call the task at an address."""
    from llvmlite import ir

    def generate(context, builder, signature, arguments):
        word = context.get_value_type(types.intp)
        kind = ir.FunctionType(ir.VoidType(), [word, word])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@njit(nogil=True)
def work(board):
    """Take chunks of the job on the board until none is left; how many there were."""
    taken = 0
    while True:
        job = load(board + JOB)
        left = job & 0xFFFFFFFF
        if left == 0:
            return taken
        function, argument = load(board + FUNCTION), load(board + ARGUMENT)
        if swap_if(board + JOB, job, job - 1) == 1:
            invoke(function, argument, left - 1)
            add(board + DONE, 1)
            taken += 1


@once
def build():
    """`parallel(function, argument, chunks)`: calls `function(argument, chunk)` for every chunk."""
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
    memory = np.zeros(64, np.int64)
    board = memory.ctypes.data
    library = ctypes.CDLL(None)
    call_nap = _external(library.usleep)
    be_punctual = (
        _external(library.prctl, TIMER_SLACK, 1000) if sys.platform == "linux" else njit(lambda: None)
    )

    @cfunc(types.voidptr(types.voidptr))
    def worker(argument):
        be_punctual()
        idle, rest = 0, NAP
        while True:
            if work(board) > 0:
                idle, rest = 0, NAP
                continue
            idle += 1
            if idle > SPINS:
                call_nap(rest)
            if idle > SPINS + NAPS:
                rest = min(2 * rest, LONGEST_NAP)
        return argument

    library.pthread_create.argtypes, library.pthread_create.restype = [ctypes.c_void_p] * 4, ctypes.c_int
    for _ in range(threads - 1):
        handle = ctypes.c_size_t()
        library.pthread_create(ctypes.byref(handle), None, worker.address, None)

    @njit(nogil=True)
    def parallel(function, argument, chunks):
        if chunks < 2 or threads < 2 or swap_if(board + BUSY, 0, 1) == 0:
            for chunk in range(chunks):
                invoke(function, argument, chunk)
            return
        generation = (load(board + JOB) >> 32) + 1
        store(board + DONE, 0)
        store(board + FUNCTION, function)
        store(board + ARGUMENT, argument)
        store(board + JOB, ((generation & 0x3FFFFFFF) << 32) | chunks)
        work(board)
        while load(board + DONE) < chunks:
            pass
        store(board + BUSY, 0)

    _kept.append((memory, worker))
    return parallel


_kept: list = []


def _external(function: Any, *constants: int) -> Any:
    """A function of the C library for Numba code: called with the constants, or with the one number given."""
    from llvmlite import ir

    place = ctypes.cast(function, ctypes.c_void_p).value
    narrow, word = ir.IntType(32), ir.IntType(64)

    def call(builder, given):
        values = [word(c) for c in constants] if constants else [builder.trunc(given[0], narrow)]
        kind = ir.FunctionType(narrow, [v.type for v in values])
        builder.call(builder.inttoptr(word(place), kind.as_pointer()), values)

    return intrinsic_of(0 if constants else 1, call)
