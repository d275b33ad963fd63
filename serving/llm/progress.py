"""Progress bar of `LLM`: the sequences that have ended, and that programs are being compiled."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..engine.warmup import CompilationCount


class GenerationBar:
    """A progress bar on standard error, if it is a terminal; elsewhere one line if programs are compiled.

    A context manager.
    """

    def __init__(self, total: int, shown: bool, compiled: CompilationCount) -> None:
        """A bar without an end.

        Args:
            total: sequences to generate.
            shown: whether to draw it.
            compiled: says whether programs are being compiled.
        """
        console = Console(stderr=True)
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
        hidden = not (shown and console.is_terminal)
        self._says_once = shown and hidden
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=hidden)
        self._task, self._tokens = self._bar.add_task("generating", total=total, rate=""), 0
        self._compiled = compiled

    def __enter__(self) -> "GenerationBar":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    @property
    def doing(self) -> str:
        """The activity of the engine: the text before the bar."""
        return self._compiled.doing or "generating"

    def update(self) -> None:
        """Say what the engine does."""
        if self._says_once and self._compiled.doing:
            self._compiled.notice.print()
        self._bar.update(self._task, description=self.doing)

    def advance(self, tokens: int) -> None:
        """Count a sequence of that many tokens."""
        self._tokens += tokens
        elapsed = self._bar.tasks[0].elapsed or 0.0
        rate = f"{self._tokens / elapsed:.0f} tokens/s" if elapsed else ""
        self._bar.update(self._task, advance=1, rate=rate, description=self.doing)
