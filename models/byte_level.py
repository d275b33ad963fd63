"""Byte-level BPE: tokens that are byte strings, written in characters that can be seen."""

import tokenizers
from tokenizers import Regex, decoders, pre_tokenizers
from tokenizers.models import BPE


def byte_alphabet() -> dict[str, int]:
    """The byte that each character of GPT-2's byte-level alphabet stands for."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    shown = {chr(byte): byte for byte in printable}
    return shown | {chr(256 + n): byte for n, byte in enumerate(others)}


def byte_level_bpe(model: BPE, pattern: str) -> tokenizers.Tokenizer:
    """A tokenizer of the bytes of a text, which an expression cuts into parts.

    Args:
        model: the model, whose tokens are written in the byte-level alphabet.
        pattern: the expression that matches a part.
    """
    backend = tokenizers.Tokenizer(model)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, in_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend
