"""Compilation of programs, which is announced once: in the log, or on a terminal without a log."""

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

LOG = logging.getLogger("entropic_jax.programs")
COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX's event, also after loading from its cache
LONG = 1.0  # seconds that JAX may spend on small programs before it is worth a notice
NOTICE = "compiling programs for this model and machine, which can take minutes; later starts load them"


class Notice:
    """Says once that programs are being compiled, and counts them: those that `running` and have `ended`."""

    def __init__(self) -> None:
        self.running = self.ended = 0
        self._lock = threading.Lock()
        self._said = self._printed = self._watching = False
        self._seconds = 0.0

    def watch(self) -> None:
        """Say it as well once what JAX compiles by itself takes long."""
        with self._lock:
            watching, self._watching = self._watching, True
        if not watching:
            jax.monitoring.register_event_duration_secs_listener(self._record)

    def _record(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILED:
            self._seconds += duration_secs
            if self._seconds > LONG:
                self.say()

    def say(self) -> None:
        """Say it, unless it was said."""
        with self._lock:
            said, self._said = self._said, True
        if said:
            return
        LOG.info(NOTICE)
        if sys.stderr.isatty():
            self.print()

    def print(self) -> None:
        """Write it to standard error, unless the log or standard error has it."""
        with self._lock:
            printed, self._printed = self._printed, True
        if not printed and not LOG.isEnabledFor(logging.INFO):
            print(f"entropic_jax: {NOTICE}", file=sys.stderr, flush=True)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """A program is being compiled within it."""
        self.say()
        with self._lock:
            self.running += 1
        try:
            yield
        finally:
            with self._lock:
                self.running -= 1
                self.ended += 1


notice = Notice()


def compile_program(
    function: Callable[..., Any], arguments: tuple[Any, ...], donate_argnums: int | tuple[int, ...]
) -> Callable[..., Any]:
    """The program of a function, compiled now.

    Args:
        function: the function of `arguments`.
        arguments: arrays, or their shapes; only these count.
        donate_argnums: those that the program consumes.
    """
    with notice.compiling():
        return jax.jit(function, donate_argnums=donate_argnums).lower(*arguments).compile()
