"""A conversation at a prompt: messages, commands that begin with a slash, and the history of the input."""

import contextlib
import difflib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.text import Text

from ..request import RequestError
from .chat_backend import ChatBackend, Message, Piece
from .terminal import console_for_text, legend, tint, visible

HISTORY = "chat-history"  # file of the cache folder
MOST_LINES = 1000  # of the history
COMMAND = re.compile(r"/[a-z]+$")


class AnswerWriter:
    """Writes an answer as it arrives, in the colours of its entropies on a terminal."""

    def __init__(self, console: Console | None) -> None:
        """`console` is a terminal; None writes plain text to standard output."""
        self.console = console
        self.text = ""
        self.tokens = 0
        self.entropies: list[float] = []
        self.first = self.last = 0.0

    def write(self, piece: Piece) -> None:
        """Write a piece."""
        if not piece.text:
            return
        self.last = time.monotonic()
        self.first = self.first or self.last
        self.tokens += 1
        if not piece.thought:
            self.text += piece.text
        if piece.entropy is not None:
            self.entropies.append(piece.entropy)
        if self.console is None:
            if not piece.thought:
                print(piece.text, end="", flush=True)
            return
        style: Style | str = "dim italic" if piece.thought else ""
        if piece.entropy is not None and not piece.thought:
            style = tint(piece.entropy, self.console.color_system in ("standard", "windows"))
        self.console.print(Text(visible(piece.text), style), end="", soft_wrap=True)
        self.console.file.flush()

    def end(self, note: str) -> None:
        """Write the end of the line, and on a terminal a line of figures with a note."""
        if self.console is None:
            print(flush=True)
            return
        elapsed = self.last - self.first
        figures = [f"{self.tokens} tokens"]
        if elapsed > 0 and self.tokens > 1:
            figures.append(f"{(self.tokens - 1) / elapsed:.0f} tokens/s")
        if self.entropies:
            figures.append(f"mean entropy {sum(self.entropies) / len(self.entropies):.2f} nats")
        self.console.print()
        self.console.print(Text(" · ".join(filter(None, (*figures, note))), "dim"), soft_wrap=True)


class Session:
    """One conversation, from the first line of the input to the last."""

    def __init__(
        self, backend: ChatBackend, system: str | None = None, console: Console | None = None
    ) -> None:
        """A conversation without a message.

        Args:
            backend: answers.
            system: system message at the beginning.
            console: to write to; None is standard output if that is a terminal, and plain text else.
        """
        self.backend = backend
        self.opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.opening)
        self.console = console or console_for_text()
        self.interactive = sys.stdin.isatty()
        self.failed = False
        self.commands: dict[str, tuple[str, Callable[[str], bool]]] = {
            "/help": ("list the commands", self._help),
            "/preset": ("show the preset, or use another: /preset NAME", self._preset),
            "/reset": ("forget the conversation", self._reset),
            "/exit": ("end, as Ctrl-D does", lambda _: False),
        }

    def run(self) -> int:
        """Read and answer until the input or the user ends it; returns 1 if an answer failed, else 0."""
        with self._history():
            self._greet()
            while (line := self._read()) is not None:
                word, _, rest = line.strip().partition(" ")
                if COMMAND.match(word):
                    if not self._command(word, rest.strip()):
                        break
                elif line.strip():
                    self._answer(line)
        return int(self.failed)

    def _greet(self) -> None:
        if self.console is None or not self.interactive:
            return
        preset = f", preset {self.backend.preset}" if self.backend.preset else ""
        self.console.print(Text(f"{self.backend.name}{preset}; /help lists the commands", "dim"))
        if not self.console.no_color:
            self.console.print(legend(self.console.color_system in ("standard", "windows")))

    def _read(self) -> str | None:
        """The next line, with those that a backslash at its end continues; None at the end of the input."""
        lines = []
        while True:
            try:
                if self.interactive:
                    line = input(". " if lines else "> ")
                else:
                    line = sys.stdin.readline()
                    if not line:
                        return "\n".join(lines) if lines else None
                    line = line.removesuffix("\n")
            except EOFError:
                self._say("")
                return None
            except KeyboardInterrupt:
                lines = []
                self._say("\n(Ctrl-D or /exit ends)")
                continue
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _answer(self, text: str) -> None:
        """Send a message and write the answer; both are kept unless the answer fails."""
        messages = [*self.messages, {"role": "user", "content": text}]
        writer, note = AnswerWriter(self.console), ""
        pieces = self.backend.reply(messages)
        try:
            for piece in pieces:
                writer.write(piece)
                if piece.finish_reason == "length":
                    note = "ended at max_tokens"
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            note = "interrupted"
        except RequestError as error:
            self.failed = True
            if writer.text:
                print(flush=True)
            self._complain(str(error))
            return
        finally:
            with contextlib.suppress(AttributeError):
                pieces.close()  # type: ignore[attr-defined]
        writer.end(note)
        self.messages = [*messages, {"role": "assistant", "content": writer.text}]

    def _command(self, word: str, rest: str) -> bool:
        """Obey a command; False if it ends the conversation."""
        if word not in self.commands:
            close = difflib.get_close_matches(word, self.commands, 1)
            hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(self.commands)}"
            self._complain(f"there is no command {word}; {hint}")
            return True
        try:
            return self.commands[word][1](rest)
        except RequestError as error:
            self._complain(str(error))
            return True

    def _help(self, _: str) -> bool:
        for word, (text, _function) in self.commands.items():
            self._say(f"{word:<8} {text}")
        self._say("A backslash at the end of a line continues the message. Ctrl-C stops an answer.")
        return True

    def _preset(self, name: str) -> bool:
        if name:
            self.backend.use_preset(name)
        accepted = ", ".join(self.backend.presets())
        self._say(f"preset: {self.backend.preset or 'of the server'} (of {accepted})")
        return True

    def _reset(self, _: str) -> bool:
        self.messages = list(self.opening)
        self._say("a new conversation begins")
        return True

    def _say(self, text: str) -> None:
        """Write a line that is no part of an answer: to the terminal, or to standard error."""
        if self.console is None:
            print(text, file=sys.stderr)
        else:
            self.console.print(Text(text, "dim"), soft_wrap=True)

    def _complain(self, text: str) -> None:
        print(f"entropic chat: error: {text}", file=sys.stderr)

    @contextlib.contextmanager
    def _history(self) -> Iterator[None]:
        """The lines of earlier conversations, for a terminal; kept in a file that only this user may read."""
        try:
            import readline
        except ImportError:  # of Windows
            readline = None
        if readline is None or not self.interactive:
            yield
            return
        from entropic_jax.mesh.devices import user_cache

        path = user_cache() / HISTORY
        with contextlib.suppress(OSError):
            readline.read_history_file(path)
        readline.set_history_length(MOST_LINES)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                _write_history(readline.write_history_file, path)


def _write_history(write: Callable[[str], None], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    os.chmod(path, 0o600)
    write(str(path))
