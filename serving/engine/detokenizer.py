"""Incremental detokenizer for byte-level tokens: one table look-up a token."""

import codecs
from collections.abc import Callable, Mapping
from typing import Any

from entropic_jax.models.byte_level import byte_alphabet

from ..request.transcript import Detokenizer

INCREMENTAL = codecs.getincrementaldecoder("utf-8")


class ByteLevelDetokenizer:
    """The `Detokenizer` of one sequence, over a table of the tokens' bytes."""

    __slots__ = ("_bytes", "_decode")

    def __init__(self, table: Mapping[int, bytes]) -> None:
        self._bytes, self._decode = table, INCREMENTAL("replace").decode

    def push(self, token: int) -> str:
        """The text that a token completes."""
        return self._decode(self._bytes.get(token, b""))

    def flush(self) -> str:
        """The rest of the text, with U+FFFD for an unfinished character."""
        return self._decode(b"", True)


def detokenizer_factory(tokenizer: Any) -> Callable[[], Detokenizer]:
    """A function that makes the detokenizer of a sequence; special tokens have no text.

    It makes a `ByteLevelDetokenizer` where the tokenizer is byte-level, else the tokenizer's own stream.
    """
    if type(tokenizer.backend.decoder).__name__ != "ByteLevel":
        return tokenizer.stream
    byte_of = byte_alphabet()
    added = tokenizer.backend.get_added_tokens_decoder()
    table = {}
    for text, number in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        if number in added and added[number].special:
            continue
        try:
            table[number] = bytes(byte_of[character] for character in text)
        except KeyError:  # an added token, whose text is written as it is
            table[number] = text.encode()
    return lambda: ByteLevelDetokenizer(table)
