"""Generated text in a terminal: each token in the colour of its entropy, above a line of figures."""

import time
from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.style import Style
from rich.text import Text

from ..request.transcript import FinishReason, Token

# Upper limit in nats, colour, and what stands for it where a terminal has only sixteen. The colours have one
# luminance, near 0.18, whose contrast is 4.5 : 1 against both black and white. Tokens below the first limit
# keep the colour of the terminal.
SCALE = (
    (0.25, "default", "default"),
    (0.75, "#0074e1", "blue"),
    (1.5, "#008660", "cyan"),
    (2.5, "#957000", "yellow"),
    (4.0, "#d04700", "red"),
    (float("inf"), "#e00094", "magenta"),
)
PROMPT_LINES = 8  # of a long prompt, shown
REFRESH = 0.05  # seconds between two drawings


def tint(entropy: float, sixteen: bool = False) -> Style:
    """The colour of a token chosen at this entropy, in nats; one of `sixteen` if that is what there is."""
    _, colour, simple = next((entry for entry in SCALE if entropy < entry[0]), SCALE[-1])
    return Style(color=simple if sixteen else colour)


def legend(sixteen: bool = False) -> Text:
    """The scale in words: `entropy in nats ■ < 0.25 ■ < 0.75 …`."""
    text = Text().append("entropy in nats ", "dim")
    for limit, colour, simple in SCALE:
        text.append(" ■ ", Style(color=simple if sixteen else colour))
        text.append("and above" if limit == float("inf") else f"< {limit:g}", "dim")
    return text


def visible(text: str) -> str:
    """The text with control characters as pictures, so that a model cannot steer the terminal."""
    return "".join(
        chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else "␡" if 127 <= ord(c) < 160 else c
        for c in text
    )


class Screen:
    """The text so far and the figures of a running generation.

    Finished lines scroll away above; the line being written and the figures are drawn anew at each token.
    """

    def __init__(self, console: Console, note: str = "") -> None:
        """`note` is a line below the figures."""
        self.console = console
        self.note = note
        self.sixteen = console.color_system in ("standard", "windows")
        self.line = Text()
        self.tokens = 0
        self.entropy = 0.0
        self.total_entropy = 0.0
        self.entropic_time = 0.0
        self.first = self.last = 0.0
        self.drawn = 0.0
        self.live = Live(self, console=console, auto_refresh=False, vertical_overflow="visible")

    def __rich__(self) -> Group:
        """The lines that are drawn anew."""
        scale = [] if self.console.no_color else [legend(self.sixteen)]
        note = [Text(self.note, style="dim")] if self.note else []
        return Group(self.line, "", Text(self.status(), style="dim"), *scale, *note)

    def status(self) -> str:
        """Rate of decoding (the first token, which waits for the prompt, is not in it), entropy and τ."""
        elapsed = self.last - self.first
        rate = f"{(self.tokens - 1) / elapsed:.0f}" if elapsed > 0 else "–"
        mean = self.total_entropy / max(self.tokens, 1)
        figures = (
            f"{self.tokens} tokens",
            f"{rate} tokens/s",
            f"entropy {self.entropy:.2f}, mean {mean:.2f}",
            f"entropic time {self.entropic_time:.1f} nats",
        )
        return " · ".join(figures)

    def write(self, text: str, style: Style | str = "") -> None:
        """Append text to the line being written, and let finished lines go."""
        *finished, rest = visible(text).split("\n")
        for part in finished:
            self.line.append(part, style)
            self._let_go()
        self.line.append(rest, style)
        # A line that fills the screen cannot be drawn anew.
        width, height = self.console.size
        while cell_len(self.line.plain) > width * max(height - 6, 1):
            head, tail = self.line.divide([width])
            self.line = tail
            self.console.print(head, soft_wrap=True)

    def add(self, token: Token) -> None:
        """Append a token."""
        self.last = time.monotonic()
        self.first = self.first or self.last
        self.tokens += 1
        self.entropy = token.metrics["entropy"]
        self.total_entropy += self.entropy
        self.entropic_time = token.metrics["entropic_time"]
        self.write(token.text, tint(self.entropy, self.sixteen))
        if self.last - self.drawn > REFRESH:
            self.drawn = self.last
            self.live.refresh()

    def _let_go(self) -> None:
        line, self.line = self.line, Text()
        self.console.print(line, soft_wrap=True)


def console_for_text() -> Console | None:
    """The terminal that standard output is, or None if it can only take plain text."""
    console = Console(highlight=False, markup=False, emoji=False)
    return None if console.is_dumb_terminal or not console.is_terminal else console


def show(prompt: str, tokens: Iterable[Token], console: Console, note: str = "") -> FinishReason | None:
    """Stream a prompt and its continuation to a terminal; returns why the text ended.

    Args:
        prompt: the prompt, of which the last lines are shown.
        tokens: the tokens of the continuation, as they come.
        console: to print to.
        note: shown next to the figures of the run.
    """
    screen = Screen(console, note)
    reason = None
    with screen.live:
        lines = prompt.split("\n")
        if len(lines) > PROMPT_LINES:
            screen.write(f"… {len(lines) - PROMPT_LINES} lines above\n", "dim italic")
        screen.write("\n".join(lines[-PROMPT_LINES:]), "bold")
        for token in tokens:
            screen.add(token)
            reason = token.finish_reason
        if reason == "length":
            screen.note = " · ".join(filter(None, (note, "ended at max_tokens")))
    return reason
