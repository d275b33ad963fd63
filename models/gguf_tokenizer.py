"""Tokenizer of a GGUF file: its vocabulary and merges from the metadata.

Two kinds are read: "gpt2", byte-level BPE with a list of merges, and "llama", SentencePiece BPE, whose merges
follow from the scores of its tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, normalizers
from tokenizers.models import BPE

from .byte_level import byte_level_bpe
from .chat_templates import DEFAULT
from .config import ModelError, abbreviate, is_integer, is_number
from .formats.gguf_files import GGUFFile
from .tokenizer import Tokenizer
from .tokenizer_classes import WORDS

LLAMA_3 = ("llama-bpe", "llama3", "llama-v3")
SPLITS = {  # by tokenizer.ggml.pre
    **dict.fromkeys(LLAMA_3, WORDS % r"\p{N}{1,3}"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), WORDS % r"\p{N}"),
}
CONTROL, USER_DEFINED = 3, 4  # types of tokens
SPACE = "▁"
KEY = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"  # the default; others follow as `tokenizer.chat_template.NAME`
# Characters of the tokens of SentencePiece, each of which is taken apart in every place.
LONGEST_TOKEN, LONGEST_VOCABULARY = 512, 8_000_000


def gguf_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer in a GGUF file; None if it has none. Raises ModelError for one that is not understood."""
    values = GGUFFile(path).metadata
    kind = values.get(f"{KEY}model")
    if kind is None:
        return None
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{path}: {KEY}model must be gpt2 or llama, or tokenizer.json must stand next to it; "
            f"got {abbreviate(kind)}"
        )
    tokens = listed(path, values, "tokens", str)
    if len(set(tokens)) != len(tokens) or not tokens:
        raise ModelError(f"{path}: {KEY}tokens must be different strings")
    try:
        backend = (byte_level if kind == "gpt2" else sentencepiece)(path, values, tokens)
    except ModelError:
        raise
    except Exception as error:  # the bindings raise nothing narrower
        text = abbreviate(" ".join(str(error).split()))
        raise ModelError(f"{path}: {KEY}tokens and merges must fit together ({text})") from None
    types = listed(path, values, "token_type", int, default=[1] * len(tokens))
    added_tokens = [
        AddedToken(token, special=token_type == CONTROL, normalized=False)
        for token, token_type in zip(tokens, types, strict=False)
        if token_type in (CONTROL, USER_DEFINED)
    ]
    backend.add_tokens(added_tokens)  # at once: one by one takes the square of the time
    begin, end = (named(path, values, name, tokens) for name in ("bos_token_id", "eos_token_id"))
    begins = kind == "llama" or values.get(f"{KEY}pre") in LLAMA_3  # where no flag says so, as in llama.cpp
    added = {
        "add_bos_token": bool(values.get(f"{KEY}add_bos_token", begins)) and begin is not None,
        "add_eos_token": bool(values.get(f"{KEY}add_eos_token", False)) and end is not None,
    }
    tokenizer = Tokenizer(backend, {"bos_token": begin, "eos_token": end, **added})
    templates = {
        key.removeprefix(TEMPLATE).removeprefix(".") or DEFAULT: text
        for key, text in values.items()
        if (key == TEMPLATE or key.startswith(f"{TEMPLATE}.")) and isinstance(text, str)
    }
    tokenizer.set_templates(templates)
    return tokenizer


def byte_level(path: Path, values: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    """The tokenizer of kind "gpt2".

    Args:
        path: the path of the file, for messages.
        values: its metadata.
        tokens: in the order of their ids.
    """
    pre = values.get(f"{KEY}pre")
    if not isinstance(pre, str) or pre not in SPLITS:
        raise ModelError(
            f"{path}: {KEY}pre must be {', '.join(SPLITS)}, or tokenizer.json must stand next to it; "
            f"got {abbreviate(pre)}"
        )
    merges = [tuple(merge.split(" ")) for merge in listed(path, values, "merges", str)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = byte_level_bpe(BPE(vocabulary, merges, ignore_merges=pre in LLAMA_3), SPLITS[pre])
    if pre not in LLAMA_3:
        backend.normalizer = normalizers.NFC()
    return backend


def sentencepiece(path: Path, values: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    """The tokenizer of kind "llama".

    Args:
        path: the path of the file, for messages.
        values: its metadata.
        tokens: in the order of their ids.
    """
    scores = listed(path, values, "scores", float)
    if len(scores) != len(tokens):
        raise ModelError(f"{path}: {KEY}scores must be {len(tokens)} numbers, one a token; got {len(scores)}")
    longest, together = max(map(len, tokens), default=0), sum(map(len, tokens))
    if longest > LONGEST_TOKEN or together > LONGEST_VOCABULARY:
        raise ModelError(
            f"{path}: {KEY}tokens must have at most {LONGEST_TOKEN} characters each and {LONGEST_VOCABULARY} "
            f"together; got {longest} and {together}"
        )
    unknown = named(path, values, "unknown_token_id", tokens) or tokens[0]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = merges_of(dict(zip(tokens, scores, strict=True)))
    backend = tokenizers.Tokenizer(
        BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefixed = bool(values.get(f"{KEY}add_space_prefix", True))
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefixed else replace
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def merges_of(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Pairs of tokens that form a token, those of the highest score first.

    >>> merges_of({"a": 0, "b": 0, "c": 0, "bc": -2, "ab": -1})
    [('a', 'b'), ('b', 'c')]
    """
    return [
        (token[:i], token[i:])
        for token in sorted(scores, key=lambda token: -scores[token])
        for i in range(1, len(token))
        if token[:i] in scores and token[i:] in scores
    ]


def listed(
    path: Path, values: Mapping[str, Any], name: str, kind: type, default: list[Any] | None = None
) -> list[Any]:
    """A list of the metadata.

    Args:
        path: the path of the file, for messages.
        values: the metadata.
        name: the name of the list.
        kind: the type of its entries.
        default: if it is absent; None for an error.
    """
    value = values.get(f"{KEY}{name}", default)
    fits = is_number if kind is float else lambda entry: isinstance(entry, kind)
    if not isinstance(value, list) or not all(map(fits, value)):
        raise ModelError(f"{path}: {KEY}{name} must be a list of {kind.__name__}; got {abbreviate(value)}")
    return value


def named(path: Path, values: Mapping[str, Any], name: str, tokens: list[str]) -> str | None:
    """The token whose id a field of the metadata states; None if it is absent.

    Args:
        path: the path of the file, for messages.
        values: the metadata.
        name: the name of the field.
        tokens: in the order of their ids.
    """
    value = values.get(f"{KEY}{name}")
    if value is None:
        return None
    if not is_integer(value) or not 0 <= value < len(tokens):
        raise ModelError(f"{path}: {KEY}{name} must be from 0 to {len(tokens) - 1}; got {abbreviate(value)}")
    return tokens[value]
