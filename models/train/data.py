"""Tokenizer and token streams made from the corpus, and the batches drawn from them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from . import corpus, tasks

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHARACTERS_PER_TOKEN = 2.8  # a little less than measured, so that a generated document fits its window
START_LENGTH = 4096  # tokens, about those of a document


def train_tokenizer(documents: list[corpus.Document], vocabulary: int, sample: int = 60_000_000) -> Tokenizer:
    """Byte-level BPE; digits in groups of three, indentation in runs.

    Args:
        documents: sources to learn from.
        vocabulary: tokens of the result.
        sample: characters that are read at most.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True, normalized=False) for t in (BEGIN, END)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    order = np.random.default_rng(0).permutation(len(documents))
    total = np.cumsum([len(documents[i].text) for i in order])
    chosen = order[: int(np.searchsorted(total, sample)) + 1]
    tokenizer.train_from_iterator((documents[i].text for i in chosen), trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)]),
        ]
    )
    return tokenizer


class Streams(NamedTuple):
    """Documents one after another in the order of their packages, each `begin … end`."""

    tokenizer: Tokenizer
    training: np.ndarray  # uint16
    starts: np.ndarray  # of each document in `training`
    text: list[str]  # some training documents, to fill generated tasks with


def prepare(
    folder: Path, vocabulary: int, tokenizer: Tokenizer | None = None, text: Path | None = None
) -> Streams:
    """Download, deduplicate, train a tokenizer, encode; each step only where `folder` lacks its result.

    Args:
        folder: where the corpus is, or is made.
        vocabulary: tokens of a new tokenizer.
        tokenizer: to encode with; None trains one.
        text: folder of text to train on in place of the packages.
    """
    tokenizer_file, stream_file = folder / "tokenizer.json", folder / "training.npy"
    if not (folder / "filler.json").exists():
        documents, held_out, packages = (
            corpus.collect_text(text) if text else corpus.collect(folder / "wheels")
        )
        tokenizer = tokenizer or train_tokenizer(documents, vocabulary)
        end = tokenizer.token_to_id(END)
        stream, starts, length = [], [], 0
        for first in range(0, len(documents), 256):
            batch = tokenizer.encode_batch_fast([d.text for d in documents[first : first + 256]])
            for encoding in batch:
                ids = np.array([*encoding.ids, end], np.uint16)
                starts.append(length)
                stream.append(ids)
                length += len(ids)
        tokenizer.save(str(tokenizer_file))
        np.save(stream_file, np.concatenate(stream))
        np.save(folder / "starts.npy", np.array(starts, np.int64))
        (folder / "held_out.json").write_text(json.dumps([d._asdict() for d in held_out]))
        table = [
            dict(
                name=p.name,
                version=p.version,
                licence=p.licence,
                bytes=sum(len(d.text.encode()) for d in p.documents),
                held_out=corpus.is_held_out(p),
            )
            for p in packages
        ]
        (folder / "packages.json").write_text(json.dumps(table, indent=1))
        order = np.random.default_rng(1).permutation(len(documents))[:4000]
        (folder / "filler.json").write_text(json.dumps([documents[i].text for i in order]))
    return Streams(
        Tokenizer.from_file(str(tokenizer_file)),
        np.load(stream_file, mmap_mode="r"),
        np.load(folder / "starts.npy"),
        json.loads((folder / "filler.json").read_text()),
    )


def encode_task(tokenizer: Tokenizer, pieces: list[tasks.Piece]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a generated document and the loss weight of each, by where its characters came from."""
    encoding = tokenizer.encode("".join(p.text for p in pieces))
    ends = np.cumsum([len(p.text) for p in pieces])
    last = np.array([max(0, stop - 1) for _, stop in encoding.offsets])
    weights = np.array([p.weight for p in pieces], np.float32)
    piece = np.minimum(np.searchsorted(ends, last, side="right"), len(pieces) - 1)
    return np.array(encoding.ids, np.int32), weights[piece]


def _code_window(streams: Streams, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
    """`length + 1` tokens of source: of long windows every second one starts where a document does.

    Of short ones fewer do, so that the first lines of files, often a licence, are not read too often.
    """
    stream = streams.training
    if rng.random() < min(0.5, length / START_LENGTH):
        start = int(rng.choice(streams.starts[: np.searchsorted(streams.starts, len(stream) - length - 1)]))
    else:
        start = int(rng.integers(0, len(stream) - length - 1))
    return np.asarray(stream[start : start + length + 1], np.int32), np.ones(length, np.float32)


def _task_window(streams: Streams, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
    """`length + 1` tokens of a generated document; what is missing at its end has no weight."""
    num_characters = int(length * CHARACTERS_PER_TOKEN)
    filler = ""
    while len(filler) < num_characters:
        filler += streams.text[rng.integers(len(streams.text))]
    ids, weights = encode_task(
        streams.tokenizer, tasks.document(rng, filler, num_characters - len(tasks.HEADER))
    )
    tokens, targets = np.zeros(length + 1, np.int32), np.zeros(length, np.float32)
    ids, weights = ids[: length + 1], weights[1 : length + 1]
    tokens[: len(ids)], targets[: len(weights)] = ids, weights
    return tokens, targets


def batches(
    streams: Streams, seed: int, first: int, batch: int, length: int, task_share: float
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches number `first`, `first + 1`, …: tokens `[batch, length + 1]` and weights `[batch, length]`.

    Batch i depends on `seed` and i alone, so a resumed run sees what an uninterrupted one would.

    Args:
        streams: encoded corpus.
        seed: the seed of the choice of windows.
        first: number of the first batch.
        batch: windows of a batch.
        length: targets of a window.
        task_share: share of windows of generated documents, in [0, 1].
    """
    step = first
    while True:
        rng = np.random.default_rng((seed, length, step))
        rows = [
            (_task_window if rng.random() < task_share else _code_window)(streams, rng, length)
            for _ in range(batch)
        ]
        yield np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows])
        step += 1
