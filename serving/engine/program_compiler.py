"""Background compiler: compiles the engine's programs in threads while others run, in order of need."""

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

from entropic_jax.mesh.devices import chosen_device, use_device


class ProgramCompiler:
    """A queue of programs to compile, and the threads that compile them. Safe to call from any thread."""

    def __init__(
        self,
        compile_program: Callable[[tuple, tuple], object],
        examples: Mapping[tuple, tuple],
        workers: int,
        notify: Callable[[BaseException | None], None],
    ) -> None:
        """A compiler with an empty queue.

        Args:
            compile_program: `compile_program(key, arguments)` compiles one and keeps it.
            examples: arguments of every program by its key. Only their shapes count, so they may be donated.
            workers: threads.
            notify: called after each program, in a thread of this compiler, with the exception if it failed.
        """
        self._compile, self._examples, self._notify = compile_program, examples, notify
        self._device = chosen_device()  # of this thread: programs are compiled for it
        self._pool = ThreadPoolExecutor(workers, "compiler")
        self._changed = threading.Condition()
        self._queue: list[tuple] = []
        self._begun: set[tuple] = set()
        self._ended: set[tuple] = set()
        self._calls: list[Future[None]] = []
        self._stopped = False

    def enqueue(self, keys: Iterable[tuple]) -> None:
        """Append programs to the queue; those that are in it or compiled are left out."""
        with self._changed:
            for key in keys:
                if key not in self._begun and key not in self._queue:
                    self._queue.append(key)
                    self._submit()

    def prefer(self, key: tuple) -> bool:
        """Move a program to the head of the queue; False if it is not one of this compiler's."""
        if key not in self._examples:
            return False
        with self._changed:
            if key in self._begun:
                return True
            if key in self._queue:
                self._queue.remove(key)
            else:
                self._submit()
            self._queue.insert(0, key)
        return True

    def forget(self, key: tuple) -> None:
        """Let a program be enqueued again that was compiled, or is just being looked for."""
        with self._changed:
            self._begun.discard(key)
            self._ended.discard(key)

    def wait_for(self, key: tuple) -> None:
        """Wait until a program is compiled; return at once if it is not one of this compiler's."""
        if self.prefer(key):
            with self._changed:
                self._changed.wait_for(lambda: key in self._ended or self._stopped)

    def stop(self, timeout: float | None = None) -> bool:
        """Empty the queue and wait for the programs that are being compiled, which nothing can interrupt.

        Args:
            timeout: seconds to wait; None waits until they are compiled.

        Returns:
            Whether no program is being compiled any more.
        """
        with self._changed:
            self._stopped = True
            self._queue.clear()
            self._changed.notify_all()
            calls = [call for call in self._calls if not call.cancel()]
        self._pool.shutdown(wait=False)
        return not wait(calls, timeout).not_done

    def _submit(self) -> None:
        if not self._stopped:
            self._calls = [call for call in self._calls if not call.done()]
            self._calls.append(self._pool.submit(self._compile_next))

    def _compile_next(self) -> None:
        with self._changed:
            if self._stopped or not self._queue:
                return
            key = self._queue.pop(0)
            self._begun.add(key)
        failure: BaseException | None = None
        with use_device(self._device):
            try:
                self._compile(key, self._examples[key])
            except BaseException as error:  # for the engine's thread to raise
                failure = error
            with self._changed:
                self._ended.add(key)
                self._changed.notify_all()
            self._notify(failure)


def cores() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
