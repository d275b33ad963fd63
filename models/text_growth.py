"""Text growth: a bound on how much the parts of tokenizer.json can lengthen a text, from their description.

Each part of a sequence multiplies: 32 that replace a space by two make 2³² of it.
"""

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

import tokenizers

from .config import ModelError

LARGEST_GROWTH = 1000  # of the characters of a text, by all parts together; real files stay below 150
FIELDS = ("normalizer", "pre_tokenizer", "decoder")
PARTS = ("normalizers", "pretokenizers", "decoders")  # of a sequence
GROWTH = {  # characters that a part makes of one at most; 1 where it is not listed
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Lowercase": 3,
    "BertNormalizer": 36,
    "ByteLevel": 5,
    "Metaspace": 2,
    "WordPiece": 2,
    "BPEDecoder": 2,
}


def check_growth(backend: tokenizers.Tokenizer) -> None:
    """Raise ModelError, which names the field, for parts that make a short text longer without bound."""
    product = 1.0
    for name in FIELDS:
        part = getattr(backend, name)
        described = None if part is None else json.loads(part.__getstate__())
        factor = growth(described) if isinstance(described, Mapping) else 1.0
        product = factor if name == "decoder" else product * factor  # which has tokens before it
        if not product <= LARGEST_GROWTH:
            raise ModelError(
                f"{name} must make a text at most {LARGEST_GROWTH} times as long; got parts that can make it "
                f"{product:.0e} times as long"
            )


def growth(part: Mapping[str, Any]) -> float:
    """Characters that a part makes of one at most.

    >>> growth({"type": "Replace", "pattern": {"String": " "}, "content": "  "})
    2.0
    """
    inner = next((part[name] for name in PARTS if name in part), None)
    if inner is not None:
        return math.prod(map(growth, inner))
    if part["type"] == "Prepend":
        return 1.0 + len(part["prepend"])
    if part["type"] == "Replace":
        pattern, content = part["pattern"], len(part["content"])
        if "String" in pattern:
            return max(1.0, content / max(1, len(pattern["String"])))
        return 1.0 + content  # an expression may match between characters
    if part["type"] == "Precompiled":
        return longest_text(base64.b64decode(part["precompiled_charsmap"] or ""))
    return float(GROWTH.get(part["type"], 1))


def longest_text(charsmap: bytes) -> float:
    """Characters of the longest text in SentencePiece's table of characters: an index, then texts."""
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
    return float(max(1, *map(len, texts)))
