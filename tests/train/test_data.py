"""Windows to train on: generated documents begin with their header, which source text never has."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from entropic_jax.models.train import data, tasks


@pytest.fixture(scope="module")
def streams(texts: list[str], tokenizer: Tokenizer) -> data.Streams:
    encoded = [[*tokenizer.encode(text).ids, tokenizer.token_to_id(data.END)] for text in texts]
    starts = np.cumsum([0, *map(len, encoded)])[:-1]
    stream = np.concatenate(encoded).astype(np.uint16)
    return data.Streams(tokenizer, stream, starts, texts)


def batch(streams: data.Streams, length: int, share: float, step: int = 0) -> tuple[list[str], np.ndarray]:
    tokens, weights = next(data.batches(streams, 0, step, 12, length, share))
    assert tokens.shape == (12, length + 1)
    return [streams.tokenizer.decode(list(row)) for row in tokens], weights


def test_generated_documents_are_marked_and_others_are_not(streams: data.Streams):
    texts, weights = batch(streams, 512, 1.0)
    assert all(text.startswith(tasks.HEADER) for text in texts)
    assert set(np.unique(weights)) >= {np.float32(tasks.CHANCE_WEIGHT), np.float32(tasks.ANSWER_WEIGHT)}
    texts, weights = batch(streams, 512, 0.0)
    assert not any(tasks.HEADER.strip() in text for text in texts)
    assert (weights == 1).all()


def test_a_batch_depends_on_its_number_alone(streams: data.Streams):
    source = data.batches(streams, 3, 0, 4, 128, 0.5)
    for _ in range(2):
        next(source)
    third = next(source)
    for a, b in zip(third, next(data.batches(streams, 3, 2, 4, 128, 0.5)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_windows_begin_a_document_as_often_as_their_length_says(streams: data.Streams):
    def begun(length: int) -> float:
        tokens, _ = next(data.batches(streams, 0, 0, 400, length, 0.0))
        return float((tokens[:, 0] == streams.tokenizer.token_to_id(data.BEGIN)).mean())

    assert begun(64) == pytest.approx(64 / data.START_LENGTH, abs=0.03)
    assert begun(2048) == pytest.approx(0.5, abs=0.08)
