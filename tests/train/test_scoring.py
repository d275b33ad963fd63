"""Every target is scored exactly once, with the loss that training computes."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_jax.models.train import forward, scoring
from tests.train.model import TINY


@given(length=st.integers(2, 150), context=st.sampled_from((8, 16, 64)), first=st.integers(1, 40))
def test_windows_score_each_target_once_with_half_the_context(length: int, context: int, first: int):
    scored = []
    for start, begin, stop in scoring.windows(first, length, context):
        assert stop - start <= context + 1
        for target in range(begin, stop):
            assert target - start >= min(target, context // 2 + 1)
            scored.append(target)
    assert scored == list(range(first, length))


@pytest.fixture(scope="module")
def scorer(params: dict[str, Any]) -> Iterator[scoring.Scorer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "DEVICE_TOKENS", 1024)
        yield scoring.Scorer(params, TINY)


def windows(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, TINY.vocab_size, n + 1).astype(np.int32) for n in lengths]


@pytest.mark.standard_promotion
def test_scores_are_the_loss_of_training(scorer: scoring.Scorer, params: dict[str, Any]):
    (window,) = windows(1024)
    _, nats = forward.loss(params, jnp.array(window[None]), jnp.ones((1, 1024)), TINY)
    (scores,) = scorer([window])
    assert scores.nats.sum() == pytest.approx(float(nats), rel=1e-5)


@pytest.mark.standard_promotion
def test_neighbours_and_padding_do_not_matter(scorer: scoring.Scorer):
    short = windows(1024, 100, 256, 700)
    progress: list[tuple[int, int]] = []
    together = scorer(short, lambda done, total: progress.append((done, total)))
    assert progress[-1] == (len(short), len(short))
    for window, scores in zip(short, together, strict=True):
        (alone,) = scorer([window])
        assert len(scores.nats) == len(scores.hit) == len(window) - 1
        np.testing.assert_allclose(scores.nats, alone.nats, atol=1e-5)
        np.testing.assert_array_equal(scores.hit, alone.hit)


@pytest.mark.standard_promotion
def test_hits_are_the_greedy_continuation(scorer: scoring.Scorer, params: dict[str, Any]):
    prompts = np.stack(windows(49, 49))
    rng = np.random.default_rng(0)
    greedy = scoring.sample(params, TINY, prompts, 4, 1e-3, 0.5, 1.0, rng)
    assert greedy.shape == (2, 4)
    for scores in scorer(list(np.concatenate([prompts, greedy], 1))):
        assert scores.hit[-4:].mean() >= 0.75  # a near tie may fall either way in another order of sums


def test_too_long_a_window_is_an_error(scorer: scoring.Scorer):
    with pytest.raises(ValueError, match="at most 8192 targets; got 8193"):
        scorer(windows(8193))
