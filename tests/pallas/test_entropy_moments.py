"""Moments of softmax(z / T): the CPU kernel against float64, and at extremes against the reference."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import cpu_runtime
from entropic_jax.pallas.entropy_moments import entropy_moments, reference
from entropic_jax.pallas.entropy_moments.cpu import entropy_moments as on_cpu

pytestmark = pytest.mark.skipif(
    cpu_runtime.unavailable_reason() is not None, reason="no kernels for this CPU"
)


def exact(z: np.ndarray, inverse: np.ndarray) -> list[np.ndarray]:
    z = z.astype(np.float64)
    d = (z - z.max(-1, keepdims=True)) * inverse.astype(np.float64)[:, None]
    weight = np.exp(d)
    p = weight / weight.sum(-1, keepdims=True)
    d = np.where(p > 0, d, 0)
    return [z.max(-1), np.log(weight.sum(-1)), (p * d).sum(-1), (p * d * d).sum(-1)]


@pytest.mark.parametrize("vocabulary", [1, 5, 1024, 1025, 50257])
@pytest.mark.parametrize("spread", [0.01, 3.0, 40.0])
def test_against_float64(vocabulary, spread):
    rng = np.random.default_rng(vocabulary)
    z = (spread * rng.standard_normal((3, vocabulary))).astype(np.float32)
    if vocabulary > 4:
        z[1, rng.permutation(vocabulary)[: vocabulary // 2]] = -np.inf
    inverse = np.array([1.0, 0.5, 3.0], np.float32)
    for actual, expected in zip(
        jax.jit(on_cpu)(z, inverse, jnp.ones(3, bool)), exact(z, inverse), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("vocabulary", [7, 16, 48, 50, 64])
def test_the_largest_logit_and_nan_count_wherever_they_stand(vocabulary):
    every = jnp.ones(vocabulary), jnp.ones(vocabulary, bool)
    moments = on_cpu(jnp.where(jnp.eye(vocabulary, dtype=bool), 5.0, 0.0), *every)
    np.testing.assert_array_equal(moments.highest, 5)
    np.testing.assert_allclose(moments.log_total, np.log1p((vocabulary - 1) * np.exp(-5)), rtol=1e-6)
    assert np.isnan(on_cpu(jnp.where(jnp.eye(vocabulary, dtype=bool), jnp.nan, 0.0), *every).mean).all()


def test_extremes_are_those_of_the_reference():
    inf, nan = np.inf, np.nan
    rows = [
        [0, 0, 0],
        [-inf, -inf, -inf],
        [0, inf, 0],
        [1, nan, 2],
        [-inf, 3, -inf],
        [1e30, 0, 1e30],
        [0, -1, 1],
    ]
    z = jnp.array(rows, jnp.float32)
    inverse = jnp.array([1, 1, 1, 1, 1, 1e9, jnp.nan], jnp.float32)
    for active in (jnp.ones(7, bool), jnp.arange(7) % 2 == 0):
        expected = reference.entropy_moments(z, inverse, active)
        for actual, other in zip(on_cpu(z, inverse, active), expected, strict=True):
            np.testing.assert_allclose(actual, other, rtol=1e-6)
            np.testing.assert_array_equal(actual[~active], 0)


def test_derivatives_are_those_of_the_reference():
    z = jnp.asarray(np.random.default_rng(0).standard_normal((2, 40)), jnp.float32)
    inverse = jnp.array([0.7, 2.0], jnp.float32)
    loss = lambda function: lambda *x: sum((y * y).sum() for y in function(*x))
    actual = jax.jit(jax.grad(loss(entropy_moments), (0, 1)))(z, inverse)
    everywhere = partial(reference.entropy_moments, active=jnp.ones(2, bool))
    expected = jax.jit(jax.grad(loss(everywhere), (0, 1)))(z, inverse)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)
