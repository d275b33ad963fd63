"""Gumbel-max sampling: both back ends against noise computed in float64 from the bits of `jax.random`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import cpu_runtime
from entropic_jax.pallas.gumbel_argmax import gumbel, gumbel_argmax

ON_CPU = pytest.mark.skipif(cpu_runtime.unavailable_reason() is not None, reason="no kernels for this CPU")
BACKENDS = ["xla", pytest.param("cpu", marks=ON_CPU)]
ROWS = 256


def case(vocabulary: int) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Logits, keys and the noise of float64."""
    rng = np.random.default_rng(vocabulary)
    keys = jax.random.split(jax.random.key(vocabulary), ROWS)
    bits = np.asarray(jax.vmap(lambda key: jax.random.bits(key, (vocabulary,)))(keys), np.float64)
    noise = -np.log(-np.log1p(-np.minimum((bits + 0.5) * 2.0**-32, 1 - 2.0**-24)))
    logits = jnp.asarray(3 * rng.standard_normal((ROWS, vocabulary)), jnp.float32)
    return logits, jax.random.key_data(keys), noise


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocabulary", [16, 17, 31, 1000, 4096])
def test_the_largest_perturbed_logit_is_drawn(vocabulary, backend):
    logits, keys, noise = case(vocabulary)
    noisy = np.arange(ROWS) % 3 > 0
    drawn = gumbel_argmax(logits, keys, jnp.asarray(noisy), backend=backend)
    expected = (np.asarray(logits) + np.where(noisy[:, None], noise, 0)).argmax(-1)
    np.testing.assert_array_equal(drawn, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_noise_is_exact_to_float32(backend):
    """Two tokens whose perturbed logits differ by a little more than rounding, in both directions."""
    _, keys, noise = case(4096)
    largest, other = noise.argmax(-1), noise.argsort(-1)[:, 2048]
    row, noisy = np.arange(ROWS), jnp.ones(ROWS, bool)
    gap = noise[row, largest] - noise[row, other]
    assert noise.max() > 12
    for shift, expected in ((1e-5, other), (-1e-5, largest)):
        logits = np.full((ROWS, 4096), -np.inf, np.float32)
        logits[row, largest], logits[row, other] = 0.0, gap + shift
        drawn = gumbel_argmax(jnp.asarray(logits), keys, noisy, backend=backend)
        np.testing.assert_array_equal(drawn, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_and_values_that_are_not_finite(backend):
    logits = np.zeros((4, 40), np.float32)
    logits[0, [7, 23, 39]] = 2.0
    logits[1] = -np.inf
    logits[2, 5] = np.nan
    logits[3, 33] = np.inf
    keys = jax.random.key_data(jax.random.split(jax.random.key(1), 4))
    greedy = gumbel_argmax(jnp.asarray(logits), keys, jnp.zeros(4, bool), backend=backend)
    assert greedy[0] == 7 and greedy[1] == 0 and greedy[3] == 33
    drawn = gumbel_argmax(jnp.asarray(logits), keys, jnp.ones(4, bool), backend=backend)
    assert drawn[1] == 0 and drawn[3] == 33
    assert ((np.asarray(greedy) >= 0) & (np.asarray(drawn) >= 0) & (np.asarray(drawn) < 40)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_are_not_active_give_zero(backend):
    logits, keys, _ = case(1000)
    noisy, active = jnp.arange(ROWS) % 3 > 0, np.arange(ROWS) % 4 > 1
    drawn = gumbel_argmax(logits, keys, noisy, jnp.asarray(active), backend=backend)
    expected = np.where(active, gumbel_argmax(logits, keys, noisy, backend=backend), 0)
    np.testing.assert_array_equal(drawn, expected)
    assert expected[active].any()


@ON_CPU
def test_a_row_does_not_depend_on_its_neighbours():
    logits, keys, _ = case(1000)
    noisy = jnp.arange(ROWS) % 3 > 0
    together = gumbel_argmax(logits, keys, noisy)
    for part in (slice(0, 1), slice(3, 5), slice(100, 133)):
        np.testing.assert_array_equal(gumbel_argmax(logits[part], keys[part], noisy[part]), together[part])


def test_noise_is_finite_and_reaches_far():
    noise = gumbel(jnp.array([0, 1, 2**31, 2**32 - 1], jnp.uint32))
    exact = -np.log(-np.log1p(-(np.array([0.5, 1.5, 2.0**31]) / 2.0**32)))
    np.testing.assert_allclose(noise[:3], exact, rtol=1e-6)
    assert np.isfinite(noise).all()
    assert noise[3] < -2.8 < 22 < noise[0]
