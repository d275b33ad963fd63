"""Bounded thread pools for the host's work on requests: texts, constraints, grammars, embeddings, files.

Each kind has threads of its own, so that a short prompt never waits behind long texts or hard grammars. A
pool whose queue is full refuses.
"""

import asyncio
import contextvars
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from ..engine.interface import QueueFullError
from ..engine.thread_priority import be_nice

LONG = 32 * 1024  # bytes of a body from which its text counts as long
LONGEST_RETRY = 60.0  # seconds
NICE = 10  # added to the niceness of threads that must not slow the others down
T = TypeVar("T")


class AbandonedError(Exception):
    """The server ends before a call has."""


class WorkerPool:
    """A few threads with a bounded queue. For one event loop."""

    def __init__(self, name: str, threads: int, queue: int, nice: int = 0) -> None:
        """A pool without work.

        Args:
            name: the kind of its work, in the singular.
            threads: how many.
            queue: calls that may wait for a thread.
            nice: added to the niceness of the threads, where the system allows that.
        """
        self.name, self.threads, self.queue = name, threads, queue
        self.pending = 0  # calls that wait or run
        self.answers: set[asyncio.Future[Any]] = set()  # that somebody waits for
        self.seconds = 0.1  # that a call takes, smoothed
        self._executor = ThreadPoolExecutor(threads, f"{name} worker", be_nice, (nice,))

    def check_room(self) -> None:
        """Raise QueueFullError if no further call may wait."""
        if self.pending >= self.threads + self.queue:
            seconds = self.pending * self.seconds / self.threads
            raise QueueFullError(min(LONGEST_RETRY, max(1.0, seconds)), f"{self.name}s")

    async def run(self, function: Callable[..., T], *arguments: Any, admitted: bool = False) -> T:
        """Call a function in a thread of the pool, and return its result.

        Args:
            function: may block, and may raise anything.
            *arguments: the arguments of the function.
            admitted: whether the call may wait though the queue is full: there was room for it before it had
                to wait for another pool.

        Raises:
            QueueFullError: Too many calls wait.
            AbandonedError: `abandon` was called meanwhile.
        """
        if not admitted:
            self.check_room()
        self.pending += 1
        context = contextvars.copy_context()  # of the caller, for the log
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._executor, lambda: context.run(self._timed, function, arguments))
        answer = loop.create_future()
        work.add_done_callback(functools.partial(self._done, answer))  # also when the caller has gone
        self.answers.add(answer)
        try:
            return await answer
        finally:
            self.answers.discard(answer)

    def abandon(self) -> None:
        """Raise AbandonedError wherever a call is waited for; the calls go on."""
        for answer in self.answers:
            if not answer.done():
                answer.set_exception(AbandonedError())

    def _timed(self, function: Callable[..., T], arguments: tuple) -> T:
        start = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            self.seconds += 0.2 * (time.perf_counter() - start - self.seconds)

    def _done(self, answer: "asyncio.Future[Any]", work: "asyncio.Future[Any]") -> None:
        self.pending -= 1
        error = None if work.cancelled() else work.exception()  # retrieved, should nobody wait any more
        if answer.done():
            return
        if work.cancelled():
            answer.cancel()
        elif error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(work.result())

    def close(self) -> None:
        """Drop the queue; calls that run end by themselves."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class WorkerPools(NamedTuple):
    """The pools of a server."""

    short_texts: WorkerPool
    long_texts: WorkerPool
    constraints: WorkerPool
    grammars: WorkerPool
    embeddings: WorkerPool
    files: WorkerPool

    def for_text(self, size: int) -> WorkerPool:
        """The pool for the text of a body of that size in bytes."""
        return self.long_texts if size >= LONG else self.short_texts

    def for_constraint(self, size: int) -> WorkerPool:
        """The pool that writes the constraint of a body of that size as a grammar, before others have it."""
        return self.constraints if size >= LONG else self.short_texts

    @property
    def pending(self) -> int:
        """Calls that wait or run, in all pools."""
        return sum(pool.pending for pool in self)

    @property
    def awaited(self) -> int:
        """Calls that somebody waits for, in all pools."""
        return sum(len(pool.answers) for pool in self)

    def abandon(self) -> None:
        """Abandon the calls of every pool."""
        for pool in self:
            pool.abandon()

    def close(self) -> None:
        """Close every pool."""
        for pool in self:
            pool.close()


def worker_pools(engines: int = 1) -> WorkerPools:
    """The pools of a server with a number of data-parallel engines, without work."""
    return WorkerPools(
        short_texts=WorkerPool("short text", threads=2, queue=1024),
        long_texts=WorkerPool("long text", threads=1, queue=16, nice=NICE),
        constraints=WorkerPool("long constraint", threads=1, queue=64, nice=NICE),
        grammars=WorkerPool("grammar", threads=1, queue=32, nice=NICE),
        embeddings=WorkerPool("embedding", threads=2 * engines, queue=64, nice=NICE),
        files=WorkerPool("file", threads=2, queue=32, nice=NICE),
    )
