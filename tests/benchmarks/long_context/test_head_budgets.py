"""Rules that share a prefill budget over heads: equal totals, and nothing beats the oracle."""

import numpy as np
import pytest

from benchmarks.long_context.head_budgets.measure import (
    LEAST,
    PAGE,
    SEGMENT,
    Profile,
    missed,
    need,
    rules,
    shared,
)


def profile(seed: int, segments: int = 3, heads: int = 4) -> Profile:
    """Random attention: the first head looks at few pages, the last at all of them."""
    rng = np.random.default_rng(seed)
    mass = np.zeros((segments, heads, segments * SEGMENT // PAGE))
    for i in range(segments):
        prior = (i + 1) * SEGMENT // PAGE
        for head in range(heads):
            mass[i, head, :prior] = 0.8 * np.sort(rng.dirichlet(np.full(prior, 0.01 * 8**head)))[::-1]
    entropy = -np.where(mass > 0, mass * np.log(np.where(mass > 0, mass, 1)), 0).sum(-1)
    return Profile(entropy, mass)


@pytest.mark.parametrize("budget", [64, 256, 1024])
def test_a_budget_is_shared_whole(budget):
    rng = np.random.default_rng(budget)
    for _ in range(20):
        weight = rng.dirichlet(np.full(10, 0.1)) + 1e-9
        pages = shared(weight, budget, prior := int(rng.integers(8, 400)))
        assert pages.sum() == min(round(budget / PAGE * 10), prior * 10)
        assert pages.max() <= prior and pages.min() >= int(min(LEAST * budget / PAGE, prior))
    assert shared(np.ones(10), budget, 400).tolist() == [budget // PAGE] * 10


def test_what_a_head_cannot_use_goes_to_the_others():
    assert shared(np.array([1e6, 1.0, 1.0]), 160, 16).tolist() == [16, 7, 7]


def test_missed_is_the_mass_beyond_the_pages():
    profiled = Profile(np.zeros((1, 2)), np.array([[[0.5, 0.25, 0.125], [0.3, 0.2, 0.1]]]))
    assert missed(profiled, np.array([[1, 2]])) == pytest.approx((0.375 + 0.1) / 2)
    assert missed(profiled, np.array([[3, 3]])) == 0


def test_no_other_static_weights_miss_less_than_the_table():
    mean = profile(0).mass.mean(0)
    profiled = Profile(np.zeros((1, 4)), np.minimum.accumulate(mean, -1)[None])
    best = missed(profiled, shared(need([profiled], 256), 256, mean.shape[-1])[None])
    rng = np.random.default_rng(0)
    others = [
        missed(profiled, shared(rng.dirichlet(np.ones(4)), 256, mean.shape[-1])[None]) for _ in range(200)
    ]
    assert best <= min(others) + 1e-3 < np.median(others)


def test_rules_are_ordered_where_need_is_known():
    table = need([profile(0), profile(1)], 128)
    centre = np.concatenate([profile(s).entropy for s in (0, 1)]).mean(0)
    measured = rules(profile(2), table, centre, 128)
    assert measured["oracle"] == min(measured.values())
    assert measured["table"] < 0.95 * measured["uniform"]
    assert measured["exp(E)"] < measured["exp(E), shuffled over heads"]
