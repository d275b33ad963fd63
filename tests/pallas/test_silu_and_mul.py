"""The gated product: against float64, element by element, and with the derivatives of the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import cpu_runtime
from entropic_jax.pallas.silu_and_mul import reference, silu_and_mul

ON_CPU = pytest.mark.skipif(cpu_runtime.unavailable_reason() is not None, reason="no kernels for this CPU")


def case(rows: int, size: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(size)
    gate, up = 8 * rng.standard_normal((rows, size)), rng.standard_normal((rows, size))
    return jnp.asarray(gate, jnp.float32), jnp.asarray(up, jnp.float32)


@pytest.mark.parametrize("backend", [None, "xla"])
@pytest.mark.parametrize(
    ("rows", "size"), [(1, 16), (5, 96), (3, 7), (60, 1408)]
)  # the last has several chunks
def test_rows_are_gated(rows, size, backend):
    gate, up = case(rows, size)
    gate = gate.at[0, :4].set(jnp.asarray([0.0, -200.0, 200.0, -79.5]))
    wide = np.asarray(gate, np.float64)
    expected = wide / (1 + np.exp(-wide)) * np.asarray(up, np.float64)
    actual = silu_and_mul(gate, up, backend=backend)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-30)
    assert actual.dtype == jnp.float32 and actual[0, 0] == 0


@ON_CPU
def test_an_element_does_not_depend_on_the_others():
    gate, up = case(60, 1408)
    together = silu_and_mul(gate, up)
    for part in (slice(0, 1), slice(1, 3), slice(7, 22), slice(30, 60)):
        np.testing.assert_array_equal(silu_and_mul(gate[part], up[part]), together[part])
    poisoned = silu_and_mul(gate.at[4, 3].set(jnp.nan), up)
    np.testing.assert_array_equal(np.isnan(poisoned), np.isnan(np.asarray(gate.at[4, 3].set(jnp.nan))))


@ON_CPU
def test_a_kernel_is_vectorised_over_further_axes():
    gate, up = case(6, 32)
    stacked = jax.vmap(silu_and_mul)(gate.reshape(3, 2, 32), up.reshape(3, 2, 32))
    np.testing.assert_array_equal(stacked.reshape(6, 32), silu_and_mul(gate, up))


@pytest.mark.slow
def test_derivatives_are_those_of_the_formula():
    arguments = case(3, 32)
    loss = lambda function: lambda gate, up: jnp.sin(function(gate, up)).sum()
    actual = jax.jit(jax.grad(loss(silu_and_mul), (0, 1)))(*arguments)
    expected = jax.jit(jax.grad(loss(reference.silu_and_mul), (0, 1)))(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)
