"""Tokenizer of a directory whose only vocabulary is `tokenizer.model`, a file of SentencePiece.

BPE without a table of characters is read, as in Llama 2, Mistral, Gemma and Phi 3. The file is a protocol
buffer of pieces (text, score, type), of the trainer's settings and of the normalizer's.

Source: SentencePiece (Kudo and Richardson 2018; arXiv 1808.06226), `sentencepiece_model.proto`.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from .chat_templates import read_templates
from .config import ModelError, require_file
from .gguf_tokenizer import KEY, sentencepiece
from .tokenizer import Tokenizer
from .tokenizer_files import added_tokens, is_there, read_settings

NAME = "tokenizer.model"
LARGEST = 64_000_000  # bytes
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # types of pieces
BPE = 2  # of the trainer's model types
# Fields, by number: of the model, of a piece, of the trainer, of the normalizer.
PIECE, TRAINER, NORMALIZER = 1, 2, 3
TEXT, SCORE, TYPE = 1, 2, 3
MODEL_TYPE, BYTE_FALLBACK, BEGIN, END = 3, 35, 41, 42
CHARACTERS, PREFIX, COLLAPSES = 2, 3, 4


def sentencepiece_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer of a directory with tokenizer.model; None without one. Raises ModelError."""
    path = directory / NAME
    if not is_there(path):
        return None
    require_file(path)
    settings = read_settings(directory)
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it must be at most {LARGEST} bytes")
        pieces, trainer, normalizer = read_model(path.read_bytes())
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} must be a model of SentencePiece: {error}") from None
    user_defined = any(piece.get(TYPE) == USER_DEFINED for piece in pieces)
    refuse_others(path, trainer, normalizer, user_defined)
    tokens = [piece[TEXT] for piece in pieces]
    unknown = next((i for i, piece in enumerate(pieces) if piece.get(TYPE) == UNKNOWN), 0)
    values = {
        f"{KEY}scores": [piece.get(SCORE, 0.0) for piece in pieces],
        f"{KEY}unknown_token_id": unknown,
        f"{KEY}add_space_prefix": bool(normalizer.get(PREFIX, 1)),
    }
    backend = sentencepiece(path, values, tokens)
    symbols = [
        AddedToken(piece[TEXT], special=piece[TYPE] == CONTROL, normalized=False)
        for piece in pieces
        if piece.get(TYPE) in (CONTROL, USER_DEFINED)
    ]
    backend.add_tokens(symbols)  # at once: one by one takes the square of the time
    named = {"bos_token": trainer.get(BEGIN, 1), "eos_token": trainer.get(END, 2)}
    stated = {name: tokens[i] for name, i in named.items() if 0 <= i < len(tokens)}
    added = {"add_bos_token": "bos_token" in stated, "add_eos_token": False}
    settings = {**stated, **added, **{name: value for name, value in settings.items() if value is not None}}
    backend.add_tokens(added_tokens(directory, settings, backend, backend.get_added_tokens_decoder()))
    tokenizer = Tokenizer(backend, settings)
    tokenizer.set_templates(read_templates(directory, settings))
    return tokenizer


def refuse_others(
    path: Path, trainer: dict[int, Any], normalizer: dict[int, Any], user_defined: bool
) -> None:
    """Raise ModelError for a model that splits text in another way than BPE over single spaces.

    Args:
        path: the path of the file.
        trainer: its trainer's fields.
        normalizer: its normalizer's.
        user_defined: whether some pieces are symbols that the user named.
    """
    for problem, is_so in (
        ("be of type BPE", trainer.get(MODEL_TYPE, 1) == BPE),
        ("fall back to bytes", bool(trainer.get(BYTE_FALLBACK, 0))),
        ("have no table of characters", not normalizer.get(CHARACTERS)),
        ("keep spaces that repeat", not normalizer.get(COLLAPSES, 1)),
        (
            "have no symbols of the user next to a space in front",
            not (user_defined and normalizer.get(PREFIX, 1)),
        ),
    ):
        if not is_so:
            raise ModelError(f"{path} must {problem}, or tokenizer.json must stand next to it; it does not")


def read_model(data: bytes) -> tuple[list[dict[int, Any]], dict[int, Any], dict[int, Any]]:
    """Pieces, settings of the trainer, and settings of the normalizer. Raises ValueError for other bytes."""
    pieces: list[dict[int, Any]] = []
    settings: dict[int, dict[int, Any]] = {TRAINER: {}, NORMALIZER: {}}
    for number, value in fields(data):
        if number in (PIECE, TRAINER, NORMALIZER) and not isinstance(value, bytes):
            raise ValueError("its parts must be messages")
        if number == PIECE:
            piece = dict(fields(value))
            if not isinstance(piece.get(TEXT), bytes) or not isinstance(piece.get(SCORE, 0.0), float):
                raise ValueError("a piece must have a text and a score")
            piece[TEXT] = piece[TEXT].decode("utf-8")
            pieces.append(piece)
        elif number in settings:
            settings[number] = {n: signed(v) for n, v in fields(value)}
    if not pieces or len({piece[TEXT] for piece in pieces}) != len(pieces):
        raise ValueError("its pieces must be different texts")
    return pieces, settings[TRAINER], settings[NORMALIZER]


def signed(value: Any) -> Any:
    """A number of 64 bits as one with a sign; anything else as it is."""
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message: integers, floats of 32 bits, and bytes; others are passed over."""
    place = 0

    def integer() -> int:
        nonlocal place
        value = 0
        for shift in range(0, 70, 7):
            if place >= len(data):
                raise ValueError("it ends within a number")
            byte = data[place]
            place += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a number has too many bytes")

    while place < len(data):
        key = integer()
        number, kind = key >> 3, key & 7
        if kind == 0:
            yield number, integer()
            continue
        size = {1: 8, 5: 4}.get(kind)
        size = integer() if kind == 2 else size
        if size is None or size > len(data) - place:
            raise ValueError("it ends within a field")
        part = data[place : place + size]
        place += size
        if kind != 1:
            yield number, struct.unpack("<f", part)[0] if kind == 5 else part
