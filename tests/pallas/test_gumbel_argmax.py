"""Gumbel-max sampling: both back ends against noise computed in float64 from the bits of `jax.random`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import cpu_runtime
from entropic_jax.pallas.gumbel_argmax import gumbel, gumbel_argmax

ON_CPU = pytest.mark.skipif(cpu_runtime.unavailable_reason() is not None, reason="no kernels for this CPU")
BACKENDS = ["xla", pytest.param("cpu", marks=ON_CPU)]
ROWS = 256
KEY = jax.random.key(5)
WORDS = jax.random.key_data(KEY)
SEEDS = jnp.asarray(np.random.default_rng(0).integers(0, 2**31, ROWS), jnp.int32)
POSITIONS = jnp.asarray(np.random.default_rng(1).integers(0, 2**20, ROWS), jnp.int32)
WARM = jnp.ones(ROWS)
GREEDY = jnp.zeros(ROWS)


@functools.cache
def noise_of(vocabulary: int) -> np.ndarray:
    """The noise of each row in float64, from the bits of `jax.random`."""
    keys = jax.vmap(lambda s, p: jax.random.fold_in(jax.random.fold_in(KEY, s), p))(SEEDS, POSITIONS)
    bits = np.asarray(jax.vmap(lambda key: jax.random.bits(key, (vocabulary,)))(keys), np.float64)
    return -np.log(-np.log1p(-np.minimum((bits + 0.5) * 2.0**-32, 1 - 2.0**-24)))


def logits_of(vocabulary: int, scale: float = 3.0) -> np.ndarray:
    return (scale * np.random.default_rng(vocabulary).standard_normal((ROWS, vocabulary))).astype(np.float32)


def draw(
    logits: np.ndarray, temperature: Any = WARM, backend: str | None = None, **others: Any
) -> np.ndarray:
    rows = len(logits)
    arguments = jnp.asarray(logits), temperature[:rows], WORDS, SEEDS[:rows], POSITIONS[:rows]
    return np.asarray(gumbel_argmax(*arguments, backend=backend, **others))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [0.0, 3.0, 12.0, 1000.0])
@pytest.mark.parametrize("vocabulary", [16, 17, 31, 63, 65, 1000, 4096])
def test_the_largest_perturbed_logit_is_drawn(vocabulary, scale, backend):
    logits, noise = logits_of(vocabulary, scale), noise_of(vocabulary)
    temperature = np.array([0.0, 0.3, 1.0, 2.5], np.float32)[np.arange(ROWS) % 4, None]
    divisor = np.where(temperature > 0, temperature, 1).astype(np.float64)
    perturbed = logits / divisor + np.where(temperature > 0, noise, 0)
    drawn = draw(logits, jnp.asarray(temperature[:, 0]), backend)
    best = perturbed.max(-1)
    tolerance = 1e-5 + 1e-6 * np.abs(logits).max(-1) / divisor[:, 0]  # rounding of the quotients
    assert (perturbed[np.arange(ROWS), drawn] >= best - tolerance).all()
    if scale in (0.0, 3.0):
        np.testing.assert_array_equal(drawn, perturbed.argmax(-1))


@ON_CPU
@pytest.mark.parametrize("order", ["ascending", "descending", "likeliest last"])
def test_no_token_is_skipped_whose_noise_could_make_it_the_largest(order):
    """Rows in which the largest so far changes often, or only at the end, whatever bounds are used."""
    vocabulary = 4096
    slope = np.linspace(-9, 0, vocabulary) if order != "likeliest last" else np.full(vocabulary, -9.0)
    slope = slope[::-1] if order == "descending" else slope
    logits = np.broadcast_to(slope, (ROWS, vocabulary)).astype(np.float32).copy()
    logits[:, -1] += 9.0 * (order == "likeliest last")
    expected = (logits + noise_of(vocabulary)).argmax(-1)
    np.testing.assert_array_equal(draw(logits, backend="cpu"), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_noise_is_exact_to_float32(backend):
    """Two tokens whose perturbed logits differ by a little more than rounding, in both directions."""
    noise = noise_of(4096)
    largest, other = noise.argmax(-1), noise.argsort(-1)[:, 2048]
    row = np.arange(ROWS)
    gap = noise[row, largest] - noise[row, other]
    assert noise.max() > 12
    for shift, expected in ((1e-5, other), (-1e-5, largest)):
        logits = np.full((ROWS, 4096), -np.inf, np.float32)
        logits[row, largest], logits[row, other] = 0.0, gap + shift
        np.testing.assert_array_equal(draw(logits, backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 1e30])
def test_no_temperature_overflows(temperature, backend):
    logits = logits_of(1000)
    drawn = draw(logits, jnp.full(ROWS, temperature), backend)
    np.testing.assert_array_equal(drawn, (logits if temperature < 1 else noise_of(1000)).argmax(-1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_and_values_that_are_not_finite(backend):
    logits = np.zeros((4, 40), np.float32)
    logits[0, [7, 23, 39]] = 2.0
    logits[1] = -np.inf
    logits[2, 5] = np.nan
    logits[3, 33] = np.inf
    greedy, drawn = draw(logits, GREEDY, backend), draw(logits, backend=backend)
    assert greedy[0] == 7 and greedy[1] == 0 and greedy[3] == 33
    assert drawn[1] == 0 and drawn[3] == 33
    assert ((greedy >= 0) & (drawn >= 0) & (drawn < 40)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_are_not_active_give_zero(backend):
    logits, active = logits_of(1000), np.arange(ROWS) % 4 > 1
    temperature = jnp.where(jnp.arange(ROWS) % 3 > 0, 1.0, 0.0)
    drawn = draw(logits, temperature, backend, active=jnp.asarray(active))
    expected = np.where(active, draw(logits, temperature, backend), 0)
    np.testing.assert_array_equal(drawn, expected)
    assert expected[active].any()


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [16, 33, 500])
def test_columns_of_a_list_have_the_noise_of_their_tokens(number, backend):
    logits = logits_of(1000)
    tokens = np.sort(np.random.default_rng(number).permutation(1000)[:number])
    temperature = jnp.where(jnp.arange(ROWS) % 3 > 0, 1.0, 0.0)
    drawn = draw(logits[:, tokens], temperature, backend, numbers=jnp.asarray(tokens, jnp.int32))
    masked = np.full_like(logits, -np.inf)
    masked[:, tokens] = logits[:, tokens]
    np.testing.assert_array_equal(tokens[drawn], draw(masked, temperature, backend))


@ON_CPU
def test_a_row_does_not_depend_on_its_neighbours():
    logits, temperature = logits_of(1000), jnp.where(jnp.arange(ROWS) % 3 > 0, 1.0, 0.0)
    together = draw(logits, temperature)
    for part in (slice(0, 1), slice(3, 5), slice(100, 133)):
        arguments = jnp.asarray(logits[part]), temperature[part], WORDS, SEEDS[part], POSITIONS[part]
        np.testing.assert_array_equal(gumbel_argmax(*arguments), together[part])


def test_noise_is_finite_and_reaches_far():
    noise = gumbel(jnp.array([0, 1, 2**31, 2**32 - 1], jnp.uint32))
    exact = -np.log(-np.log1p(-(np.array([0.5, 1.5, 2.0**31]) / 2.0**32)))
    np.testing.assert_allclose(noise[:3], exact, rtol=1e-6)
    assert np.isfinite(noise).all()
    assert noise[3] < -2.8 < 22 < noise[0]
