"""Compilation of a program. The first of a process is announced in the log, or on a terminal without a log."""

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax

LOG = logging.getLogger("entropic_jax.programs")
NOTICE = "compiling programs for this model and machine, which can take minutes; later starts load them"


class Notice:
    """Says once that programs are being compiled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said = False

    def say(self) -> None:
        """Say it, unless it was said."""
        with self._lock:
            said, self._said = self._said, True
        if said:
            return
        LOG.info(NOTICE)
        if not LOG.isEnabledFor(logging.INFO) and sys.stderr.isatty():
            print(f"entropic_jax: {NOTICE}", file=sys.stderr, flush=True)


notice = Notice()


def compile_program(
    function: Callable[..., Any], arguments: tuple[Any, ...], donate_argnums: int | tuple[int, ...]
) -> Callable[..., Any]:
    """The program of a function, compiled now.

    Args:
        function: of `arguments`.
        arguments: arrays, or their shapes; only these count.
        donate_argnums: those that the program consumes.
    """
    notice.say()
    return jax.jit(function, donate_argnums=donate_argnums).lower(*arguments).compile()
