"""Tokenizer of a directory whose only vocabulary is `tekken.json`, as some of Mistral's models have it.

The file lists byte strings in the order in which pairs are merged. Ids begin with the special tokens: those
that the file names, or in older files those that all have, then fillers. A text begins with `<s>`.
"""

import base64
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken
from tokenizers.models import BPE

from .byte_level import byte_alphabet, byte_level_bpe
from .chat_templates import read_templates
from .config import LARGEST_JSON, ModelError, abbreviate, is_integer, read_json
from .gguf_tokenizer import merges_of
from .tokenizer import Tokenizer
from .tokenizer_files import is_there, read_settings, refusing

NAME = "tekken.json"
UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
SPECIAL = (  # of files that name none, in the order of their ids
    *(UNKNOWN, BEGIN, END, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
LONGEST_TOKEN, LARGEST_VOCABULARY = 512, 1_000_000  # bytes, tokens


def tekken_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer of a directory with tekken.json; None without one. Raises ModelError."""
    path = directory / NAME
    if not is_there(path):
        return None
    raw = read_json(path, LARGEST_JSON)
    try:
        special, tokens, pattern = read_vocabulary(raw)
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from None
    with refusing(path):
        backend = byte_pairs(special, tokens, pattern)
    settings = {
        "bos_token": BEGIN,
        "eos_token": END,
        "add_bos_token": True,
        "add_eos_token": False,
        **{name: value for name, value in read_settings(directory).items() if value is not None},
    }
    tokenizer = Tokenizer(backend, settings)
    tokenizer.set_templates(read_templates(directory, settings))
    return tokenizer


def byte_pairs(special: list[str], tokens: list[bytes], pattern: str) -> tokenizers.Tokenizer:
    """Byte-level BPE that merges those pairs first whose token comes first.

    Args:
        special: the special tokens, which have the first ids.
        tokens: the other tokens, in the order of their ids.
        pattern: the expression of the parts that a text is cut into.
    """
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    written = ["".join(map(letters.__getitem__, token)) for token in tokens]
    vocabulary = {token: number for number, token in enumerate([*special, *written])}
    merges = merges_of({token: -rank for rank, token in enumerate(written)})
    backend = byte_level_bpe(BPE(vocabulary, merges, ignore_merges=True), pattern)
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return backend


def read_vocabulary(raw: Any) -> tuple[list[str], list[bytes], str]:
    """Special tokens and the others in the order of their ids, and the expression that cuts a text.

    Args:
        raw: a parsed tekken.json.

    Raises:
        ValueError: a field is not as these files have it.
    """
    config = raw.get("config") if isinstance(raw, dict) else None
    if not isinstance(config, dict) or not isinstance(config.get("pattern"), str):
        raise ValueError("config must be an object with a pattern")
    size, count = (config.get(name) for name in ("default_vocab_size", "default_num_special_tokens"))
    if not (is_integer(size) and is_integer(count) and len((UNKNOWN, BEGIN, END)) <= count < size):
        raise ValueError(
            "config must have default_num_special_tokens from 3, below default_vocab_size; got "
            f"{abbreviate(count)} and {abbreviate(size)}"
        )
    if size > LARGEST_VOCABULARY:
        raise ValueError(f"config.default_vocab_size must be at most {LARGEST_VOCABULARY}; got {size}")
    entries = raw.get("vocab")
    if not isinstance(entries, list) or len(entries) < size - count:
        raise ValueError(f"vocab must be a list of at least {size - count} tokens")
    tokens = [token_bytes(entry, rank) for rank, entry in enumerate(entries[: size - count])]
    if len(set(tokens)) < len(tokens) or {bytes([byte]) for byte in range(256)} - set(tokens):
        raise ValueError("vocab must have different tokens, and each byte among them")
    return special_tokens(raw.get("special_tokens"), count), tokens, config["pattern"]


def token_bytes(entry: Any, rank: int) -> bytes:
    """The bytes of an entry of the vocabulary.

    Args:
        entry: an object with `rank` and `token_bytes`.
        rank: where it stands.
    """
    try:
        if entry["rank"] != rank:
            raise ValueError
        token = base64.b64decode(entry["token_bytes"], validate=True)
    except (TypeError, KeyError, ValueError):
        raise ValueError(
            f"vocab must have rank {rank} and token_bytes at {rank}; got {abbreviate(entry)}"
        ) from None
    if not 0 < len(token) <= LONGEST_TOKEN:
        raise ValueError(f"tokens must have between 1 and {LONGEST_TOKEN} bytes; got {len(token)}")
    return token


def special_tokens(stated: Any, count: int) -> list[str]:
    """The special tokens, with fillers where there is none.

    Args:
        stated: the field of the file, a list of objects with `rank` and `token_str`; None if it is absent.
        count: the number of special tokens.
    """
    names = [f"<SPECIAL_{number}>" for number in range(count)]
    if stated is None:
        stated = [{"rank": rank, "token_str": name} for rank, name in enumerate(SPECIAL[:count])]
    if not isinstance(stated, list):
        raise ValueError(f"special_tokens must be a list; got {abbreviate(stated)}")
    for entry in stated:
        rank, name = (entry.get(key) if isinstance(entry, dict) else None for key in ("rank", "token_str"))
        if not is_integer(rank) or not 0 <= rank < count or not isinstance(name, str) or not name:
            raise ValueError(
                f"special_tokens must have a rank below {count} and a token_str; got {abbreviate(entry)}"
            )
        names[rank] = name
    if len(set(names)) < count or not {BEGIN, END} <= set(names):
        raise ValueError(f"special_tokens must be different texts, {BEGIN} and {END} among them")
    return names
