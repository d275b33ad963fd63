"""Areas under ROC curves and intervals over texts."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.harness.intervals import auc, auc_interval, ratio_interval, share_interval


def test_the_area_is_the_share_of_pairs_in_order():
    rng = np.random.default_rng(0)
    scores, positive = rng.integers(0, 9, 200).astype(float), rng.random(200) < 0.3
    pairs = scores[positive][:, None] - scores[~positive]
    assert auc(scores, positive) == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())
    assert auc(np.arange(4.0), np.array([False, False, True, True])) == 1.0
    assert np.isnan(auc(np.arange(3.0), np.ones(3, bool)))


def cases(seed: int, texts: int, shift: float, spread: float = 0.0):
    """Scores of texts, those of positive cases shifted, and whether cases are positive, at odds of a text."""
    rng = np.random.default_rng(seed)
    scores, flags = [], []
    for _ in range(texts):
        positive = rng.random(120) < np.clip(0.6 + spread * rng.normal(), 0.05, 0.95)
        flags.append(positive)
        scores.append(rng.normal(size=120) + shift * positive)
    return scores, flags


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, 0.8])
def test_the_interval_of_an_area_covers_it_about_as_often_as_it_says(shift):
    true = stats.norm.cdf(shift / np.sqrt(2))
    covered = 0
    for seed in range(60):
        value, low, high = auc_interval(*cases(seed, 16, shift))
        assert low < value < high
        covered += low <= true <= high
    assert covered >= 50


def test_dependent_tokens_widen_the_interval_of_a_share():
    _, flags = cases(1, 30, 0.0)
    _, dependent = cases(1, 30, 0.0, spread=0.3)
    wilson = share_interval([int(f.sum()) for f in flags], [120] * 30)
    reach = stats.binomtest(int(sum(f.sum() for f in flags)), 3600).proportion_ci(method="wilson")
    assert wilson.high - wilson.low < 1.7 * (reach.high - reach.low)
    assert wilson.low <= reach.low + 1e-9 and wilson.high >= reach.high - 1e-9
    wide = share_interval([int(f.sum()) for f in dependent], [120] * 30)
    assert wide.high - wide.low > 2 * (wilson.high - wilson.low)


def test_a_share_of_one_has_an_interval_below_it():
    value, low, high = share_interval([40, 60], [40, 60])
    exact = stats.binomtest(100, 100).proportion_ci(method="wilson")
    assert (value, high) == (1.0, 1.0) and low == pytest.approx(exact.low)
    assert all(map(np.isnan, share_interval([0], [0])))


def test_the_interval_of_a_ratio_is_paired():
    rng = np.random.default_rng(2)
    below = rng.uniform(1, 9, 30)  # texts differ much, their ratios little
    value, low, high = ratio_interval(1.1 * below + rng.normal(0, 0.01, 30), below)
    assert low > 1.09 and high < 1.11 and low <= value <= high
