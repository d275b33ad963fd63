"""Longest match: both back ends against a search written out in Python."""

import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import cpu_runtime
from entropic_jax.pallas.longest_match import longest_match

ON_CPU = pytest.mark.skipif(cpu_runtime.unavailable_reason() is not None, reason="no kernels for this CPU")
BACKENDS = ["xla", pytest.param("cpu", marks=ON_CPU)]


def search(text: list[int], longest: int) -> tuple[int, int]:
    """Length and end of the latest of the longest earlier matches of the tokens that end a text."""
    best, end = 0, max(len(text) - 2, 0)
    for position in range(len(text) - 2, -1, -1):
        length = 0
        while length < longest and length <= position and text[position - length] == text[-1 - length]:
            length += 1
        if length > best:
            best, end = length, position
    return best, end


def texts(lengths: list[int], vocabulary: int, context: int) -> np.ndarray:
    rng = np.random.default_rng(vocabulary)
    array = rng.integers(0, vocabulary, (len(lengths), context)).astype(np.int32)
    for row, length in enumerate(lengths):
        if length > 300:  # a long repetition, across blocks
            array[row, length - 150 : length] = array[row, length - 290 : length - 140]
    return array


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("longest", [1, 4, 16])
@pytest.mark.parametrize("vocabulary", [1, 2, 7, 300])
def test_the_latest_of_the_longest_matches(vocabulary, longest, backend):
    lengths = [1, 2, 3, 63, 64, 65, 66, 129, 300, 640, 1000]
    array = texts(lengths, vocabulary, 1000)
    last = jnp.asarray(lengths) - 1
    matched, end = longest_match(jnp.asarray(array), last, longest, backend=backend)
    for row, length in enumerate(lengths):
        expected = search(array[row, :length].tolist(), longest)
        if expected[0]:
            assert (int(matched[row]), int(end[row])) == expected
        else:
            assert int(matched[row]) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_after_the_last_one_do_not_count(backend):
    text = jnp.asarray([[5, 6, 7, 1, 6, 7, 6, 7], [9, 9, 9, 9, 9, 9, 9, 9]])
    matched, end = longest_match(text, jnp.asarray([5, 2]), 4, backend=backend)
    assert matched.tolist() == [2, 2] and end.tolist() == [2, 1]


@ON_CPU
def test_positions_outside_of_the_text_are_not_read():
    text = jnp.asarray([[5, 6, 5, 6], [5, 6, 5, 6]])
    matched, _ = longest_match(text, jnp.asarray([100, -3]), 4, backend="cpu")
    assert matched.tolist() == [2, 0]
