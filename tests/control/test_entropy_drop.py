"""The entropy-drop predictor: AR(1) estimates against float64, the expected drop against integration."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.control import entropy_drop
from entropic_jax.control.entropy_drop import AR1

PRIOR = AR1(2.0, 1.0, 0.3)
ar1_parameters = jax.jit(entropy_drop.ar1_parameters)
total_drop = lambda predictor, prior: entropy_drop.predicted_drop(predictor, prior).sum()
drop_and_gradients = jax.jit(jax.value_and_grad(total_drop, argnums=(0, 1), allow_int=True))
expected_drop = jax.jit(entropy_drop.expected_drop)


@jax.jit
def observed(entropies, emitting):
    """The predictor after a series of steps, both arguments `[steps, rows]`."""
    step = lambda predictor, inputs: (entropy_drop.update_predictor(predictor, *inputs), None)
    return jax.lax.scan(step, entropy_drop.new_predictor(entropies.shape[1]), (entropies, emitting))[0]


def all_emitting(steps: int, rows: int) -> np.ndarray:
    return np.ones((steps, rows), bool)


def exact_ar1(entropies, emitting) -> list[AR1]:
    """AR(1) parameters per row in float64, from the full series."""
    series = [entropies[emitting[:, row], row].astype(np.float64) for row in range(entropies.shape[1])]

    def fit(x, y, weight):
        middle = lambda a: np.average(a, weights=weight)
        spread = lambda a, b: middle((a - middle(a)) * (b - middle(b)))
        correlation = spread(x, y) / math.sqrt(spread(x, x) * spread(y, y))
        scale = math.sqrt(spread(y, y) * (1 - correlation**2))
        return AR1((middle(x) + middle(y)) / 2, scale, correlation)

    # The prior as four points of its mean, variance and covariance, with the weight of eight tokens.
    variance = PRIOR.scale**2 / (1 - PRIOR.correlation**2)
    along = math.sqrt(variance * (1 + PRIOR.correlation)) * np.array([1, -1, 0, 0])
    across = math.sqrt(variance * (1 - PRIOR.correlation)) * np.array([0, 0, 1, -1])
    x = np.concatenate([PRIOR.mean + along + across, *(s[:-1] for s in series)])
    y = np.concatenate([PRIOR.mean + along - across, *(s[1:] for s in series)])
    pooled = fit(x, y, np.where(np.arange(len(x)) < 4, 2.0, 1.0))
    per_row = lambda s: fit(s[:-1], s[1:], None)._replace(mean=s.mean())
    return [per_row(s) if len(s) > 8 else pooled for s in series]


@pytest.mark.parametrize("steps", [1, 3, 8, 9, 12, 200])  # per-row estimates after the eighth token
def test_ar1_parameters_match_float64(steps):
    rng = np.random.default_rng(steps)
    entropies = rng.gamma(2.0, 1.0, (steps, 5)).astype(np.float32)
    emitting = rng.random((steps, 5)) < [0, 0.2, 0.5, 0.9, 1]
    predictor = observed(entropies, emitting)
    assert predictor.num_tokens.tolist() == emitting.sum(0).tolist()
    result = ar1_parameters(predictor, PRIOR)
    for row, expected in enumerate(exact_ar1(entropies, emitting)):
        np.testing.assert_allclose([x[row] for x in result], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("correlation", [-0.6, 0.0, 0.4, 0.9])
def test_estimates_converge_on_an_ar1_series(correlation):
    rng = np.random.default_rng(3)
    series = np.zeros((20_000, 2))
    for t in range(1, len(series)):
        series[t] = correlation * series[t - 1] + 0.7 * rng.standard_normal(2)
    series = (series + 9).astype(np.float32)
    result = ar1_parameters(observed(series, all_emitting(20_000, 2)), PRIOR)
    np.testing.assert_allclose(result.mean, 9, atol=0.12)
    np.testing.assert_allclose(result.scale, 0.7, atol=0.02)
    np.testing.assert_allclose(result.correlation, correlation, atol=0.02)


ODD = ([0.0], [5.0], [1e-30], [1e38], [-1.0], [0.0, 100.0], [3.0, 3.0000002], [np.inf, 1.0], [np.nan, 2.0])


@pytest.mark.parametrize("values", ODD)
def test_predicted_drop_and_its_gradient_are_finite_for_any_series(values):
    series = np.resize(np.float32(values), 1000)[:, None]
    predictor = observed(series, all_emitting(1000, 1))
    drop, slopes = drop_and_gradients(predictor, PRIOR)
    assert 0 <= drop < 250
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(slopes) if x.dtype != jax.dtypes.float0)
    if len(values) == 1:  # a constant series
        assert drop < 1e-5 and predictor.variance_before.tolist() == [0.0]


@pytest.mark.parametrize("mean", [-3.0, -0.4, 0.0, 0.7, 2.5])
@pytest.mark.parametrize("scale", [0.05, 0.6, 2.0])
def test_expected_drop_is_the_mean_of_the_positive_part(mean, scale):
    entropy, process = 3 + mean / 1.25, AR1(3.0, scale, -0.25)
    noise = np.linspace(-12, 12, 400_001)
    drop = lambda noise: np.maximum(0, entropy - (3 - 0.25 * (entropy - 3) + scale * noise))
    integral = np.trapezoid(drop(noise) * np.exp(-0.5 * noise**2) / math.sqrt(2 * math.pi), noise)
    simulated = drop(np.random.default_rng(0).standard_normal(200_000)).mean()
    result = expected_drop(jnp.float32(entropy), process)
    np.testing.assert_allclose(result, integral, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(result, simulated, atol=0.01 * scale)


def test_gradients_of_the_expected_drop():
    slope = jax.grad(lambda h, s: entropy_drop.expected_drop(h, AR1(0.0, s, 0.0)), argnums=(0, 1))
    for entropy, scale in ((-1.0, 0.5), (0.0, 2.0), (1.5, 1.0)):
        ratio = entropy / scale
        result = slope(entropy, scale)
        np.testing.assert_allclose(result[0], math.erfc(-ratio / math.sqrt(2)) / 2, rtol=1e-5)
        np.testing.assert_allclose(result[1], math.exp(-(ratio**2) / 2) / math.sqrt(2 * math.pi), rtol=1e-5)
    assert slope(2.0, 0.0) == (1, 0) and slope(-2.0, 0.0) == (0, 0)
    assert [expected_drop(x, AR1(0.0, 0.0, 0.0)) for x in (2.0, -2.0)] == [2, 0]
