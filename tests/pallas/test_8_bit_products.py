"""Products of rows that are rounded to 8 bits with weights of int8: sums are exact, and rows independent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.pallas import skinny_matmul as package
from entropic_jax.pallas.skinny_matmul import cpu, in_quads, reference, skinny_matmul

WITH_VNNI = pytest.mark.skipif(not cpu.multiplies_8_bits(), reason="the processor has no AVX512-VNNI")
BACKENDS = ["xla", pytest.param("cpu", marks=WITH_VNNI)]
SIZES = [(256, (128, 64)), (68, (64,)), (1024, (192,))]


def case(rows: int, inputs: int, columns: tuple[int, ...]):
    rng = np.random.default_rng(rows + inputs)
    x = jnp.asarray(rng.standard_normal((rows, inputs)) * rng.uniform(0.01, 100, (rows, 1)), jnp.float32)
    weights = tuple(jnp.asarray(rng.integers(-128, 128, (inputs, n)), jnp.int8) for n in columns)
    return x, weights, tuple(jnp.asarray(rng.uniform(0.001, 0.01, n), jnp.float32) for n in columns)


def product(x, weights, scales, backend):
    return skinny_matmul(x, *map(in_quads, weights), scales=scales, operand_dtype="int8", backend=backend)


def exact(x, weight, scale):
    """The product of the rounded rows, in float64."""
    x, weight = np.asarray(x), np.asarray(weight, np.float64)
    largest = np.abs(x).max(-1, keepdims=True)
    numbers = np.rint(x * (np.float32(127) / largest))
    assert np.abs(numbers).max() == 127
    return numbers @ weight * (largest / 127).astype(np.float64) * np.asarray(scale, np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("inputs", "columns"), SIZES)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 11, 64])
def test_products_are_those_of_rounded_rows(rows, inputs, columns, backend):
    x, weights, scales = case(rows, inputs, columns)
    for y, weight, scale in zip(product(x, weights, scales, backend), weights, scales, strict=True):
        expected = exact(x, weight, scale)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
        assert y.dtype == jnp.float32


@WITH_VNNI
def test_extreme_numbers_do_not_overflow():
    inputs = cpu.MAX_QUAD_INPUTS
    x, weight = jnp.ones((6, inputs), jnp.float32), jnp.full((inputs, 64), -128, jnp.int8)
    (y,) = product(x, (weight,), (jnp.ones(64),), "cpu")
    np.testing.assert_array_equal(y, np.full((6, 64), -128.0 * inputs))
    with pytest.raises(NotImplementedError, match="inputs: at most"):
        cpu.skinny_matmul(
            jnp.ones((1, inputs + 4)), (jnp.zeros((1, inputs // 4 + 1, 256), jnp.int8),), (), "int8"
        )


@WITH_VNNI
def test_a_row_does_not_depend_on_how_many_there_are():
    x, weights, scales = case(40, 256, (128, 64))
    together = product(x, weights, scales, "cpu")
    for first, end in ((0, 1), (3, 5), (7, 13), (2, 40)):
        for part, all_ in zip(product(x[first:end], weights, scales, "cpu"), together, strict=True):
            np.testing.assert_array_equal(part, all_[first:end])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_zeros_and_rows_that_are_not_finite_leave_the_others_alone(backend):
    x, weights, scales = case(5, 64, (64,))
    bad = x.at[0].set(0.0).at[1, 3].set(jnp.nan).at[2, 5].set(jnp.inf).at[3].multiply(1e-38)
    (y,), (plain,) = product(bad, weights, scales, backend), product(x, weights, scales, backend)
    np.testing.assert_array_equal(y[0], np.zeros(64))
    assert np.isnan(y[1]).all() and not np.isfinite(y[2]).any()
    assert np.abs(y[3]).max() < 1e-25
    np.testing.assert_array_equal(y[4], plain[4])


def test_a_weight_in_quads_is_the_same_weight():
    weight = jnp.asarray(np.random.default_rng(0).integers(-127, 128, (24, 128)), jnp.int8)
    laid_out = in_quads(weight)
    assert laid_out.shape == (2, 6, 256) and package.is_in_quads(laid_out) and not package.is_in_quads(weight)
    np.testing.assert_array_equal(package.by_columns(laid_out), weight)
    numbers = jnp.asarray([0, 5, 64, 127, 200])
    np.testing.assert_array_equal(
        package.take_columns(laid_out, numbers), package.take_columns(weight, numbers)
    )


def test_other_weights_are_refused():
    x = jnp.ones((1, 64))
    with pytest.raises(ValueError, match="weights must be int8 for operand_dtype='int8'; got float32"):
        reference.skinny_matmul(x, (jnp.ones((64, 64)),), (), "int8")
    assert not package.reads_quads(jnp.ones((64, 64)))
    assert not package.reads_quads(jnp.zeros((62, 64), jnp.int8))
    assert not package.reads_quads(jnp.zeros((64, 72), jnp.int8))


@WITH_VNNI
@pytest.mark.parametrize(
    ("weight", "operand_dtype"),
    [(jnp.zeros((64, 64), jnp.int8), "int8"), (jnp.zeros((1, 16, 256), jnp.int8), None)],
)
def test_the_kernel_reads_quads_for_rows_of_8_bits_alone(weight, operand_dtype):
    assert package.reads_quads(jnp.zeros((64, 64), jnp.int8))
    with pytest.raises(NotImplementedError, match="quads"):
        cpu.skinny_matmul(jnp.ones((1, 64)), (weight,), (jnp.ones(64),), operand_dtype)


def test_gradients_are_those_of_the_reference():
    x, weights, scales = case(2, 64, (64,))
    gradient = jax.grad(lambda s: product(x, weights, (s,), None)[0].sum())(scales[0])
    np.testing.assert_allclose(gradient, exact(x, weights[0], np.ones(64)).sum(0), rtol=1e-4, atol=1e-2)
