"""Parser of messages: splits a text, as it is generated, into thought, content and tool calls."""

import json
import re
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ...request.transcript import Token
from .formats import END_OF_THOUGHT, MISTRAL, THINK, CallFormat

BEGINNING, THOUGHT, AFTER_THOUGHT, TEXT, CALL, ARGUMENTS, END_OF_CALL, BETWEEN = range(8)
LONGEST_HEAD = 1024  # characters of a call before its arguments; beyond, it is read once it has ended
HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class CallPart(NamedTuple):
    """The next part of a call; the first states the id and the name."""

    call_index: int
    id: str | None
    name: str | None
    arguments: str  # JSON text


class MessagePart(NamedTuple):
    """The next part of a message."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()


class MessageParser:
    """Splits one text. What cannot be decided yet is held back until more has come."""

    def __init__(
        self, form: CallFormat | None, reasoning: bool | None, special: Mapping[str, int] | None = None
    ) -> None:
        """A parser before the first token.

        Args:
            form: the format of the calls; None where the text has none.
            reasoning: whether the text may begin with a thought; True if it has begun in the prompt, None if
                thoughts are content.
            special: markers that are special tokens, whose texts are left out of the tokens.
        """
        self.form, self.num_calls = form, 0
        self._markers = {token: marker for marker, token in (special or {}).items()}
        self._state = TEXT if reasoning is None else THOUGHT if reasoning else BEGINNING
        self._buffer = ""
        self._has_text = False  # whether content has been released
        self._opening = ""  # text before the call that may be none after all
        self._after_call = False  # whether a call has come, and no content since then
        self._blank: list[str] = []  # white space since that call
        self._scan = ObjectScan()  # of the call, or of its arguments
        self._is_malformed = False  # whether the call has ended, and is no JSON
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[CallPart] = []

    @property
    def in_call(self) -> bool:
        """Whether the text so far ends within the arguments of a call."""
        return self._state == ARGUMENTS

    def push(self, tokens: Iterable[Token]) -> MessagePart:
        """The text and the calls that the tokens add."""
        self._buffer += "".join(token.text or self._markers.get(token.id, "") for token in tokens)
        self._advance()
        return self._released()

    def finish(self) -> MessagePart:
        """The parts held back, at the end of the text.

        A first call without arguments yet is content. After other calls, the beginning of one is left out.
        """
        self._advance()
        rest, self._buffer = self._buffer, ""
        if self._state == THOUGHT:
            self._reasoning.append(rest)
        elif self._state == CALL:
            self._say("" if self.num_calls else self._opening + rest)
        elif self._state not in (END_OF_CALL, BETWEEN):
            self._say(rest)
        return self._released()

    def _advance(self) -> None:
        steps = {
            BEGINNING: self._beginning,
            THOUGHT: self._thought,
            AFTER_THOUGHT: self._after_thought,
            TEXT: self._text,
            CALL: self._call,
            ARGUMENTS: self._arguments,
            END_OF_CALL: self._end_of_call,
            BETWEEN: self._between,
        }
        while self._buffer and steps[self._state]():
            pass

    def _released(self) -> MessagePart:
        """The part that has been decided since the last one."""
        part = MessagePart("".join(self._content), "".join(self._reasoning), _merged(self._calls))
        self._content, self._reasoning, self._calls = [], [], []
        return part

    def _enter(self, state: int, rest: str, opening: str = "") -> None:
        """Begin a part of the text that has not been scanned, after text that belongs to it."""
        self._state, self._buffer, self._opening = state, rest, opening
        self._scan, self._is_malformed = ObjectScan(), False

    # One step each; False if more text is needed.

    def _beginning(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(THINK):
            self._state, self._buffer = THOUGHT, text[len(THINK) :]
        elif THINK.startswith(text):
            return False
        else:
            self._state = TEXT
        return True

    def _thought(self) -> bool:
        thought, marker, rest = self._buffer.partition(END_OF_THOUGHT)
        if not marker:
            self._reasoning.append(self._release(END_OF_THOUGHT))
            return False
        self._reasoning.append(thought)
        self._state, self._buffer = AFTER_THOUGHT, rest
        return True

    def _after_thought(self) -> bool:
        self._buffer = self._buffer.lstrip("\n")
        self._state = TEXT if self._buffer else AFTER_THOUGHT
        return bool(self._buffer)

    def _text(self) -> bool:
        form = self.form
        if form is None or (not form.marker and self._has_text):
            self._say(self._buffer)
            self._buffer = ""
            return False
        if form.marker:
            text, marker, rest = self._buffer.partition(form.marker)
            if marker:
                self._say(text)
                self._enter(CALL, rest, marker)
                return True
            self._say(self._release(form.marker))
            return False
        text = self._buffer.lstrip()
        optional = form.optional_marker
        if optional and text.startswith(optional):
            text = text[len(optional) :].lstrip()
        elif not text or (optional and optional.startswith(text)):
            return False
        if text.startswith("{"):
            self._enter(CALL, text, self._buffer.removesuffix(text))
            return True
        self._has_text = bool(text)
        return bool(text)

    def _call(self) -> bool:
        text = self._buffer.lstrip(" \n[,;")
        if not text.startswith("{"):
            if text:  # no call after all
                self._say(self._opening)
                self._has_text, self._state = True, TEXT
            return bool(text)
        if self._is_malformed:
            return False
        scanned = self._scan.length
        head = HEAD.match(text, 0, LONGEST_HEAD) if scanned < LONGEST_HEAD else None
        if head and (name := _text_of(head[1])) is not None:
            self._open(name)
            self._enter(ARGUMENTS, text[head.end() :])
            return True
        if (end := self._scan.end(text[scanned:])) is None:
            return False
        written, rest = text[: scanned + end], text[scanned + end :]
        try:
            call = json.loads(written)
            arguments = call.get("arguments", call.get("parameters", {}))
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
        except (ValueError, RecursionError):
            self._is_malformed = True
            return False
        if isinstance(name := call.get("name"), str):
            self._open(name, arguments)
            self._enter(BETWEEN, rest)
        else:
            self._say(self._opening + self._buffer.removesuffix(rest))
            self._has_text = True
            self._enter(TEXT, rest)
        return True

    def _arguments(self) -> bool:
        end = self._scan.end(self._buffer)
        text = self._buffer if end is None else self._buffer[:end]
        self._calls.append(CallPart(self.num_calls - 1, None, None, text))
        self._buffer = "" if end is None else self._buffer[end:]
        self._state = ARGUMENTS if end is None else END_OF_CALL
        return end is not None

    def _end_of_call(self) -> bool:
        text = self._buffer.lstrip()
        if not text:
            return False
        self._state, self._buffer = BETWEEN, text.removeprefix("}")
        return True

    def _between(self) -> bool:
        text = self._buffer.lstrip()
        end = "" if self.form is None else self.form.after.strip()
        if not text or (end and end != text and end.startswith(text)):
            return False
        if end:
            self._state, self._buffer = TEXT, text.removeprefix(end)
        elif text[0] in ",;{":
            self._enter(CALL, text)
        else:
            self._has_text, self._state, self._buffer = True, TEXT, text.removeprefix("]")
        return True

    def _open(self, name: str, arguments: str = "") -> None:
        letters = uuid.uuid4().hex
        identity = letters[:9] if self.form is MISTRAL else f"call_{letters[:24]}"
        self._calls.append(CallPart(self.num_calls, identity, name, arguments))
        self.num_calls += 1
        self._after_call, self._blank = True, []

    def _say(self, text: str) -> None:
        """Release content. White space after a call is content once other text follows it."""
        if self._after_call and not text.strip():
            self._blank.append(text)
        elif text:
            self._content += [*self._blank, text]
            self._after_call, self._blank = False, []

    def _release(self, marker: str) -> str:
        """The text that cannot be the beginning of a marker; the rest is held back."""
        longest = min(len(self._buffer), len(marker) - 1)
        held = next((n for n in range(longest, 0, -1) if self._buffer.endswith(marker[:n])), 0)
        text, self._buffer = (
            self._buffer[: len(self._buffer) - held],
            self._buffer[len(self._buffer) - held :],
        )
        return text


class ObjectScan:
    """Finds the end of a JSON object that comes piece by piece."""

    def __init__(self) -> None:
        self.depth = 0  # open brackets
        self.length = 0  # characters so far
        self.in_string = self.escaped = False

    def end(self, text: str) -> int | None:
        """The end of the object in the next piece; None if it does not end there."""
        self.length += len(text)
        for place, character in enumerate(text):
            if self.in_string:
                if self.escaped:
                    self.escaped = False
                elif character == "\\":
                    self.escaped = True
                elif character == '"':
                    self.in_string = False
            elif character == '"':
                self.in_string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return place + 1
        return None


def _text_of(string: str) -> str | None:
    """The text of a JSON string; None if it is none."""
    try:
        return json.loads(string)
    except ValueError:
        return None


def _merged(parts: Iterable[CallPart]) -> tuple[CallPart, ...]:
    """One part for each call."""
    merged: dict[int, CallPart] = {}
    for part in parts:
        before = merged.get(part.call_index)
        text = "" if before is None else before.arguments
        merged[part.call_index] = (before or part)._replace(arguments=text + part.arguments)
    return tuple(merged.values())


def call_fields(parts: Iterable[CallPart], streamed: bool) -> list[dict[str, Any]]:
    """The field `tool_calls` of a message, or of a chunk of a stream."""
    fields = []
    for part in parts:
        function: dict[str, Any] = {"name": part.name} if part.name is not None else {}
        call: dict[str, Any] = {"index": part.call_index} if streamed else {}
        if part.id is not None:
            call |= {"id": part.id, "type": "function"}
        fields.append({**call, "function": {**function, "arguments": part.arguments}})
    return fields
