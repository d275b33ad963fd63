"""Length prediction: the index is that of its definition, and equal lengths fall back to order of arrival."""

import numpy as np
import pytest

from entropic_jax.control import length_prediction
from entropic_jax.control.length_prediction import (
    NUM_RESIDUALS,
    LengthModel,
    censored_quantiles,
    fit_length_model,
    serving_order,
)


def model(residuals: np.ndarray, weights: tuple[float, ...] = (0.0, 1.0)) -> LengthModel:
    return LengthModel(np.array(weights), np.sort(residuals), ("max_tokens",))


def test_the_index_and_the_remaining_length_are_those_of_their_definitions():
    rng = np.random.default_rng(0)
    law = model(rng.normal(0, 1, NUM_RESIDUALS))
    limits, ages = rng.integers(5, 300, 20), rng.integers(0, 40, 20)
    forecast = law.forecast({"max_tokens": limits}, ages)
    for limit, age, remaining, index in zip(
        limits, ages, forecast.remaining, forecast.gittins_index, strict=True
    ):
        atoms = np.exp(np.clip(np.log1p(limit) + law.residuals, 0, None))
        left = atoms[atoms > age] - age
        if not len(left):
            assert remaining == age and index == 1 / age
            continue
        horizon = np.maximum(left, age / 4)
        best = max((left <= work).mean() / np.minimum(horizon, max(work, age / 4)).mean() for work in left)
        assert index == pytest.approx(best) and remaining == pytest.approx(left.mean())


def test_a_known_length_is_found():
    lengths = np.array([3, 10, 40, 160] * 10)
    features = {"max_tokens": 2 * lengths}
    law = fit_length_model(features, lengths, ("max_tokens",))
    assert np.abs(law.forecast(features, np.zeros(40)).remaining / lengths - 1).max() < 0.2
    order = serving_order(law, features, np.zeros(40), np.arange(40))
    assert (np.diff(lengths[order]) >= 0).all()


def test_equal_lengths_are_served_in_order_of_arrival():
    law, arrival = model(np.random.default_rng(1).normal(0, 0.3, NUM_RESIDUALS)), np.array([4, 0, 9, 2])
    features = {"max_tokens": np.full(4, 100)}
    ages = np.array([0, 90, 3, 50])
    assert law.forecast(features, ages).tail < length_prediction.LARGEST_LIGHT_TAIL
    assert serving_order(law, features, ages, arrival).tolist() == [1, 3, 0, 2]


def test_under_a_heavy_tail_the_young_come_first_and_the_overdue_before_them():
    law, features = (
        model(np.random.default_rng(2).normal(0, 2, NUM_RESIDUALS)),
        {"max_tokens": np.full(3, 100)},
    )
    ages, arrival = np.array([300, 0, 60]), np.arange(3)
    assert serving_order(law, features, ages, arrival).tolist() == [1, 2, 0]
    overdue = np.array([True, False, False])
    assert serving_order(law, features, ages, arrival, overdue).tolist() == [0, 1, 2]


def test_quantiles_without_censoring_are_those_of_the_values():
    values = np.random.default_rng(3).normal(size=NUM_RESIDUALS)
    assert censored_quantiles(values, np.ones(NUM_RESIDUALS, bool)).tolist() == np.sort(values).tolist()


def test_censoring_corrects_for_the_long_requests_that_have_not_ended():
    rng = np.random.default_rng(4)
    lengths, limits = rng.exponential(1, 4000), rng.exponential(1, 4000)
    seen, ended = np.log(np.minimum(lengths, limits)), lengths <= limits
    median = lambda x: float(np.exp(x[NUM_RESIDUALS // 2 - 1 : NUM_RESIDUALS // 2 + 1].mean()))
    assert median(censored_quantiles(seen, ended)) == pytest.approx(np.log(2), rel=0.1)
    naive = censored_quantiles(seen[ended], np.ones(ended.sum(), bool))
    assert median(naive) < 0.7 * np.log(2)  # the short ones alone mislead


def test_residuals_follow_recent_requests():
    law, features = (
        model(np.random.default_rng(5).normal(0, 2, NUM_RESIDUALS)),
        {"max_tokens": np.full(40, 99)},
    )
    ended, all_ended = np.arange(40) < 15, np.ones(40, bool)
    assert law.updated(features, np.full(40, 50), ended) is law
    after = law.updated(features, np.full(40, 50), all_ended)
    np.testing.assert_allclose(after.residuals, np.log(50))  # equal lengths need no features
    assert after.forecast(features, np.zeros(40)).tail == pytest.approx(0)


def test_a_prediction_that_does_not_help_is_dropped():
    rng = np.random.default_rng(6)
    law, ended = model(np.zeros(NUM_RESIDUALS)), np.ones(60, bool)
    lengths, unrelated = rng.integers(1, 200, 60), rng.integers(1, 200, 60)
    assert not law.updated({"max_tokens": unrelated}, lengths, ended).weights.any()
    assert law.updated({"max_tokens": 2 * lengths}, lengths, ended).weights.any()


def test_fewer_requests_than_needed_are_refused():
    with pytest.raises(ValueError, match="lengths must have at least 2 entries; got 1"):
        fit_length_model({"max_tokens": np.ones(1)}, np.ones(1), ("max_tokens",))
