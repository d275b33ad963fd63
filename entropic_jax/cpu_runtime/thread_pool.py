"""Threads that share the chunks of a kernel's work.

The caller publishes a job as one word, `generation << 32 | chunks left`, and works on it itself; whoever
decrements the word owns the chunk. A thread that sleeps, or that the system gives no time, delays nobody:
its chunks are taken by others. After a fork there are no other threads, and the caller does all.

Waiting threads spin for some microseconds, then nap for a few at a time, so that XLA's own threads get the
cores between two kernels of a step; after some tens of milliseconds without work the naps grow.
"""

import sys
from typing import Any

from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

from .call_frame import symbol
from .mailbox import (
    ARGUMENT,
    BOARD,
    BUSY,
    DONE,
    FUNCTION,
    JOB,
    THREADS,
)
from .vector import intrinsic_of

SPINS = 20_000
NAP, LONGEST_NAP, NAPS = 10, 2000, 2000  # µs, µs, and how many short ones
TIMER_SLACK = 29  # of prctl: without, Linux adds 50 µs to every nap

place_of_board = symbol(BOARD)


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


@njit(nogil=True)
def parallel(function, argument, chunks):
    """Call `function(argument, chunk)` for every chunk, on all threads."""
    board = place_of_board()
    if chunks < 2 or load(board + THREADS) < 2 or swap_if(board + BUSY, 0, 1) == 0:
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


def worker() -> Any:
    """What a thread does: `void *worker(void *)`, which returns once the board says that it is alone."""
    nap = external("usleep")
    be_punctual = external("prctl", TIMER_SLACK, 1000) if sys.platform == "linux" else njit(lambda: None)

    @cfunc(types.voidptr(types.voidptr))
    def run(argument):
        be_punctual()
        board = place_of_board()
        idle, rest = 0, NAP
        while load(board + THREADS) > 1:
            if work(board) > 0:
                idle, rest = 0, NAP
                continue
            idle += 1
            if idle > SPINS:
                nap(rest)
            if idle > SPINS + NAPS:
                rest = min(2 * rest, LONGEST_NAP)
        return argument

    return run


def external(name: str, *constants: int) -> Any:
    """A function of the C library for Numba code: called with the constants, or with the one number given."""
    narrow, word = ir.IntType(32), ir.IntType(64)

    def call(builder, given):
        values = [word(c) for c in constants] if constants else [builder.trunc(given[0], narrow)]
        kind = ir.FunctionType(narrow, [v.type for v in values])
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        builder.call(function, values)

    return intrinsic_of(0 if constants else 1, call)
