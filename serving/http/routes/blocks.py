"""Blocks of a message: its thoughts, texts and calls, as they open, grow and close."""

from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..tools.parser import MessagePart

Kind = Literal["thought", "text", "call"]


@dataclass
class Block:
    """A run of thought, a run of text, or a call."""

    kind: Kind
    index: int  # among the blocks of the message
    call: str = ""  # id of a call
    name: str = ""  # of the function that it calls
    text: str = ""  # so far; the arguments of a call


class BlockChange(NamedTuple):
    """A change of a block; `text` is what it grows by."""

    kind: Literal["open", "grow", "close"]
    block: Block
    text: str = ""


class Blocks:
    """The blocks of one message, of which at most the last is open."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        """Whether the message calls anything."""
        return any(block.kind == "call" for block in self.blocks)

    def push(self, part: MessagePart) -> list[BlockChange]:
        """The changes that the next part of the message makes."""
        calls = deque(part.calls)
        changes = []
        while calls and calls[0].id is None:  # the rest of a call comes before any text
            changes.append(self._grow(calls.popleft().arguments))
        changes += self._run("thought", part.reasoning) + self._run("text", part.content)
        for call in calls:
            if call.id is not None:
                changes += self._open("call", call.id, call.name or "")
            if call.arguments:
                changes.append(self._grow(call.arguments))
        return changes

    def close(self) -> list[BlockChange]:
        """The end of the open block, if there is one."""
        changes = [BlockChange("close", self.blocks[-1])] if self._is_open else []
        self._is_open = False
        return changes

    def _run(self, kind: Kind, text: str) -> list[BlockChange]:
        if not text:
            return []
        opening = [] if self._is_open and self.blocks[-1].kind == kind else self._open(kind)
        return [*opening, self._grow(text)]

    def _open(self, kind: Kind, call: str = "", name: str = "") -> list[BlockChange]:
        changes = self.close()
        self.blocks.append(Block(kind, len(self.blocks), call, name))
        self._is_open = True
        return [*changes, BlockChange("open", self.blocks[-1])]

    def _grow(self, text: str) -> BlockChange:
        self.blocks[-1].text += text
        return BlockChange("grow", self.blocks[-1], text)
