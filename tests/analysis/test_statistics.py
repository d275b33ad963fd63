"""Confidence intervals and paired comparisons."""

import numpy as np
import pytest
from scipy import stats

from entropic_jax.analysis.statistics import beyond_product, compared, estimate, split, worded


def test_an_interval_is_students():
    x = np.random.default_rng(0).normal(0.3, 1.0, 9)
    actual, test = estimate(x), stats.ttest_1samp(x, 0.0)
    interval = test.confidence_interval()
    np.testing.assert_allclose(actual, (x.mean(), interval.low, interval.high, test.pvalue), rtol=1e-9)


def test_two_values_claim_nothing():
    assert np.isnan(estimate([2.0]).low) and worded(estimate([2.0])) == "+2.0"
    assert estimate([0.0, 0.0]).p == 1 and estimate([1.0, 1.0]).p == 0


def test_a_change_is_paired_and_symmetric():
    base = [{"seed": s, "x": 10.0**s} for s in range(4)]
    more = [{"seed": s, "x": 1.25 * 10.0**s} for s in reversed(range(4))]
    assert compared(more, base, "x", "seed").mean == pytest.approx(25)
    assert compared(base, more, "x", "seed").mean == pytest.approx(-20)


@pytest.mark.parametrize(("combined", "sign"), [(1.3, 1), (1.1 * 1.1 * 1.0, 0), (1.05, -1)])
def test_more_than_the_product_of_the_parts(combined, sign):
    gains = {"off": 1.0, "micro": 1.1, "meso": 1.1, "macro": 1.0, "full": combined}
    rng = np.random.default_rng(0)
    rows = [
        {"preset": name, "turn": t, "rate": gain * float(np.exp(rng.normal(0, 0.01)))}
        for t in range(12)
        for name, gain in gains.items()
    ]
    actual = beyond_product(rows, "rate", "full", ("micro", "meso", "macro"), "turn")
    assert actual.mean == pytest.approx(100 * (combined / 1.21 - 1), abs=2)
    assert (actual.low > 0) - (actual.high < 0) == sign


def test_groups_keep_the_order_of_their_first_row():
    rows = [{"a": x, "b": n} for n, x in enumerate("babca")]
    assert [(key, [r["b"] for r in group]) for (key,), group in split(rows, "a")] == [
        ("b", [0, 2]),
        ("a", [1, 4]),
        ("c", [3]),
    ]
