"""Progress of compilation at start-up: a bar on a terminal, a log line elsewhere."""

import logging
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

logger = logging.getLogger(__name__)


class WarmProgress:
    """Called with (done, all) after each program that is compiled ahead, in the engine's thread."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        columns = TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        console = Console(stderr=True)
        self.bar = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal, redirect_stdout=False
        )
        self.task = self.bar.add_task("", total=None)

    def __call__(self, done: int, programs: int) -> None:
        """Draw; at the end, log how long it took."""
        if not self.bar.live.is_started and sys.stderr.isatty():
            self.bar.start()
        self.bar.update(self.task, completed=done, total=programs)
        if done >= programs:
            self.bar.stop()
            seconds = round(time.monotonic() - self.begun, 1)
            logger.info("warm-up complete", extra={"programs": programs, "seconds": seconds})
