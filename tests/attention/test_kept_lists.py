"""Page lists that are kept for several steps depend on the tokens of their row alone."""

import jax
import numpy as np
import pytest

from entropic_jax import generate
from entropic_jax.attention.page_selection import Selection
from tests import tiny
from tests.attention.test_page_selection import LOOSE, begin


@pytest.mark.slow
def test_kept_lists_do_not_depend_on_what_other_rows_do():
    """A row that waits for a step keeps its lists; they are renewed by its own tokens."""
    texts, choice = tiny.prompts(60, 40), Selection(rules=LOOSE, dense_layers=0, refresh=8)
    m = tiny.model()

    def tokens_of(texts: list[list[int]], waits: int) -> tuple[list[int], list[float]]:
        """The tokens of the last row and the shares that it reads, if it waits for a step after so many."""
        controller, state = begin(texts, choice, 0.6)
        parts = []
        for steps, quota in ((waits, 1), (1, 0), (24 - waits, 1)):
            waiting = state.action.quota.at[-1].set(quota)
            state = state._replace(action=state.action._replace(quota=waiting))
            state, trace = generate(m.decoder, m.params, controller, state, steps, capacity=24)
            parts.append(jax.device_get(trace))
        emitted = [trace.emitted[:, -1] for trace in parts]
        each = [
            [x for trace, flag in zip(parts, emitted, strict=True) for x in getattr(trace, name)[flag, -1]]
            for name in ("token", "kept_fraction")
        ]
        return each[0], each[1]

    expected, kept = tokens_of(texts, 0)
    assert len(expected) == 24
    assert max(kept[8:]) < 0.9  # also in steps that keep the lists of those before
    for waits in (3, 10):
        actual, read = tokens_of(texts, waits)
        assert actual == expected
        np.testing.assert_allclose(read, kept, atol=1e-6)
