"""RMS normalisation: against float64, identical row by row, and with the derivatives of the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import cpu_runtime
from entropic_jax.pallas.rms_norm import reference, rms_norm

EPSILON = 1e-5
ON_CPU = pytest.mark.skipif(cpu_runtime.unavailable_reason() is not None, reason="no kernels for this CPU")


def case(rows: int, size: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(size)
    x, weight = 3 * rng.standard_normal((rows, size)), rng.standard_normal(size)
    return jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "xla"])
@pytest.mark.parametrize("size", [1, 24, 64, 256])
def test_rows_are_divided_by_their_root_mean_square(size, backend):
    x, weight = case(5, size)
    x = x.at[3].set(0.0)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPSILON) * np.asarray(weight, np.float64)
    np.testing.assert_allclose(rms_norm(x, weight, EPSILON, backend=backend), expected, rtol=1e-6, atol=1e-30)


@pytest.mark.slow
@ON_CPU
@pytest.mark.parametrize("size", [24, 64, 256])
def test_a_row_does_not_depend_on_how_many_there_are(size):
    x, weight = case(300, size)
    together = rms_norm(x, weight, EPSILON)
    for part in (slice(0, 1), slice(1, 3), slice(7, 22), slice(0, 16), slice(130, 263)):
        np.testing.assert_array_equal(rms_norm(x[part], weight, EPSILON), together[part])
    poisoned = rms_norm(x.at[4].set(jnp.nan), weight, EPSILON)
    np.testing.assert_array_equal(jnp.delete(poisoned, 4, 0), jnp.delete(together, 4, 0))
    assert np.isnan(poisoned[4]).all()


def test_derivatives_are_those_of_the_formula():
    x, weight = case(3, 24)
    loss = lambda norm: lambda x, weight: jnp.sin(norm(x, weight, EPSILON)).sum()
    actual = jax.jit(jax.grad(loss(rms_norm), (0, 1)))(x, weight)
    expected = jax.jit(jax.grad(loss(reference.rms_norm), (0, 1)))(x, weight)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)
