"""The suffix drafter: matches and continuations, against a brute-force search."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from entropic_jax.speculation.suffix import longest_match

LONGEST = 4


def search(text: list[int]) -> tuple[int, int]:
    """The longest match, the latest of them, by trying every place."""
    best = (0, 0)
    for end in range(len(text) - 1):
        matched = 0
        while matched < LONGEST and matched <= end and text[end - matched] == text[len(text) - 1 - matched]:
            matched += 1
        best = max(best, (matched, end))
    return best


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=3, max_size=3))
def test_the_match_is_the_latest_of_the_longest(texts):
    array = np.full((3, 20), 2, np.int32)  # what stands past the end of a text must not matter
    for row, text in enumerate(texts):
        array[row, : len(text)] = text
    matched, end = longest_match(jnp.asarray(array), jnp.asarray([len(t) - 1 for t in texts]), LONGEST)
    for row, text in enumerate(texts):
        length, place = search(text)
        assert int(matched[row]) == length
        if length:
            assert int(end[row]) == place
