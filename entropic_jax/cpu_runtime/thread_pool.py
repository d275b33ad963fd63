"""Thread pool of the CPU kernels: `parallel_for` over the chunks of a kernel's work.

The caller publishes a job as one word, `generation << 32 | chunks left`, in the mailbox and works on it
itself. The thread that decrements the word owns the chunk. A thread that sleeps, or that the system does not
schedule, delays nobody: other threads take its chunks. After a fork there are no other threads, and the
caller does all.

Idle threads spin for some microseconds, then sleep for a few at a time, so that XLA's own threads get the
cores between two kernels of a step. After some tens of milliseconds without work they sleep longer.
"""

import sys
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .call_frame import symbol_address
from .instructions import intrinsic_of
from .mailbox import ARGUMENT, BUSY, DONE, FUNCTION, JOB, MAILBOX, THREADS
from .numba_compiler import cfunc, njit

SPINS = 20_000  # before the first sleep
SHORT_SLEEP, LONG_SLEEP = 10, 2000  # µs
SHORT_SLEEPS = 2000  # before the sleeps grow
TIMER_SLACK = 29  # of prctl: without it, Linux adds 50 µs to every sleep

mailbox_address = symbol_address(MAILBOX)


@intrinsic
def _load_acquire(context, address):
    """The word at an address, and with it everything that was written before it."""

    def generate(context, builder, signature, arguments):
        word = context.get_value_type(types.intp)
        return builder.load_atomic(builder.inttoptr(arguments[0], word.as_pointer()), "acquire", 8)

    return types.intp(types.intp), generate


@intrinsic
def _store_release(context, address, value):
    """Write a word, after everything that was written before."""

    def generate(context, builder, signature, arguments):
        word = context.get_value_type(types.intp)
        target = builder.inttoptr(arguments[0], word.as_pointer())
        builder.store_atomic(arguments[1], target, "release", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def _fetch_add(context, address, value):
    """Add to a word atomically; returns the old value."""

    def generate(context, builder, signature, arguments):
        word = context.get_value_type(types.intp)
        target = builder.inttoptr(arguments[0], word.as_pointer())
        return builder.atomic_rmw("add", target, arguments[1], "acq_rel")

    return types.intp(types.intp, types.intp), generate


@intrinsic
def _compare_and_swap(context, address, expected, value):
    """Replace a word if it equals `expected`; returns 1 if it did."""

    def generate(context, builder, signature, arguments):
        word = context.get_value_type(types.intp)
        target = builder.inttoptr(arguments[0], word.as_pointer())
        outcome = builder.cmpxchg(target, arguments[1], arguments[2], "acq_rel", "acquire")
        return builder.zext(builder.extract_value(outcome, 1), word)

    return types.intp(types.intp, types.intp, types.intp), generate


@intrinsic
def _call_task(context, function, argument, chunk):
    """Call the task at the address `function`."""

    def generate(context, builder, signature, arguments):
        word = context.get_value_type(types.intp)
        function_type = ir.FunctionType(ir.VoidType(), [word, word])
        builder.call(builder.inttoptr(arguments[0], function_type.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@njit(nogil=True)
def _run_chunks(mailbox):
    """Run chunks of the job in the mailbox until none is left; returns how many."""
    num_chunks = 0
    while True:
        job = _load_acquire(mailbox + JOB)
        left = job & 0xFFFFFFFF
        if left == 0:
            return num_chunks
        function, argument = _load_acquire(mailbox + FUNCTION), _load_acquire(mailbox + ARGUMENT)
        if _compare_and_swap(mailbox + JOB, job, job - 1) == 1:
            _call_task(function, argument, left - 1)
            _fetch_add(mailbox + DONE, 1)
            num_chunks += 1


@njit(nogil=True)
def parallel_for(function: int, argument: int, num_chunks: int) -> None:
    """Call the task `function(argument, chunk)` for every chunk, on all threads.

    Args:
        function: address of the task.
        argument: a word that every call gets, such as the address of the task's arguments.
        num_chunks: how often the task is called; with chunk numbers from 0.
    """
    mailbox = mailbox_address()
    if num_chunks < 2 or _load_acquire(mailbox + THREADS) < 2 or _compare_and_swap(mailbox + BUSY, 0, 1) == 0:
        for chunk in range(num_chunks):
            _call_task(function, argument, chunk)
        return
    generation = (_load_acquire(mailbox + JOB) >> 32) + 1
    _store_release(mailbox + DONE, 0)
    _store_release(mailbox + FUNCTION, function)
    _store_release(mailbox + ARGUMENT, argument)
    _store_release(mailbox + JOB, ((generation & 0x3FFFFFFF) << 32) | num_chunks)
    _run_chunks(mailbox)
    while _load_acquire(mailbox + DONE) < num_chunks:
        pass
    _store_release(mailbox + BUSY, 0)


@njit(nogil=True)
def next_chunk(chunk: int, num_chunks: int) -> int:
    """The chunk that the thread of a chunk will probably get next, or -1 if there is none."""
    threads = _load_acquire(mailbox_address() + THREADS)
    if threads > 1:
        return max(chunk - threads, -1)
    return chunk + 1 if chunk + 1 < num_chunks else -1


@njit(nogil=True)
def take(counter: int, number: int) -> int:
    """Take some of what the threads share, atomically.

    Args:
        counter: address of a word, the number of the first piece that is left.
        number: of pieces to take.

    Returns:
        The first of them.
    """
    return _fetch_add(counter, number)


@njit(nogil=True)
def num_threads() -> int:
    """Number of threads that share the work, the caller's included."""
    return _load_acquire(mailbox_address() + THREADS)


def worker_loop() -> Any:
    """The start routine of a thread, `void *worker(void *)`; it returns once the mailbox says one thread."""
    sleep = c_function("usleep")
    if sys.platform == "linux":
        set_timer_slack = c_function("prctl", TIMER_SLACK, 1000)
    else:
        set_timer_slack = njit(lambda: None)

    @cfunc(types.voidptr(types.voidptr))
    def run(argument):
        set_timer_slack()
        mailbox = mailbox_address()
        idle, duration = 0, SHORT_SLEEP
        while _load_acquire(mailbox + THREADS) > 1:
            if _run_chunks(mailbox) > 0:
                idle, duration = 0, SHORT_SLEEP
                continue
            idle += 1
            if idle > SPINS:
                sleep(duration)
            if idle > SPINS + SHORT_SLEEPS:
                duration = min(2 * duration, LONG_SLEEP)
        return argument

    return run


def c_function(name: str, *constants: int) -> Any:
    """A function of the C library for Numba code, without its result.

    It is called with the constants; without constants, with the one number that its caller passes.
    """
    narrow, word = ir.IntType(32), ir.IntType(64)

    def emit(builder, arguments):
        values = [word(c) for c in constants] if constants else [builder.trunc(arguments[0], narrow)]
        function_type = ir.FunctionType(narrow, [v.type for v in values])
        function = builder.module.globals.get(name) or ir.Function(builder.module, function_type, name)
        builder.call(function, values)

    return intrinsic_of(0 if constants else 1, emit)
