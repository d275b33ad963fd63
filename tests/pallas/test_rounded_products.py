"""Products of operands that are rounded to bfloat16: against float64, and identical row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.pallas import skinny_matmul as package
from entropic_jax.pallas.skinny_matmul import reference, skinny_matmul

WITH_UNITS = pytest.mark.skipif(
    not package.rounds_operands(), reason="the processor has no products of bfloat16"
)
BACKENDS = ["xla", pytest.param("cpu", marks=WITH_UNITS)]
INT8, E4M3 = (
    pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "float8_e4m3fn")
)  # compile long
ROWS = (1, 2, 15, 16, 17, 32, 33, 48, 49, 63, 80)


def case(rows: int, inputs: int, columns: tuple[int, ...], kind: str = "bfloat16"):
    rng = np.random.default_rng(rows + inputs)
    x = jnp.asarray(rng.standard_normal((rows, inputs)), jnp.float32)
    if kind == "bfloat16":
        return x, tuple(jnp.asarray(rng.standard_normal((inputs, n)), kind) for n in columns), ()
    weights = tuple(jnp.asarray(rng.integers(-127, 128, (inputs, n)), kind) for n in columns)
    return x, weights, tuple(jnp.asarray(rng.uniform(0.001, 0.01, n), jnp.float32) for n in columns)


def exact(x, weight, scale=None):
    """The product of the rounded rows, in float64."""
    rounded = np.asarray(x.astype(jnp.bfloat16), np.float64)
    product = rounded @ np.asarray(weight.astype(jnp.float32), np.float64)
    return product if scale is None else product * np.asarray(scale, np.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["bfloat16", "int8", E4M3])
@pytest.mark.parametrize(("inputs", "columns"), [(96, (128, 64)), (70, (72, 8)), (600, (64, 100))])
def test_products_are_those_of_rounded_rows(inputs, columns, kind, backend):
    for rows in ROWS if backend == "cpu" else (1, 33):
        x, weights, scales = case(rows, inputs, columns, kind)
        products = skinny_matmul(x, *weights, scales=scales, operand_dtype="bfloat16", backend=backend)
        for y, weight, scale in zip(products, weights, scales or (None,) * len(weights), strict=True):
            np.testing.assert_allclose(y, exact(x, weight, scale), rtol=0, atol=1e-5 * inputs)
            assert y.dtype == jnp.float32


@WITH_UNITS
@pytest.mark.parametrize(("inputs", "columns"), [(96, (128, 64)), (70, (72, 8)), (600, (64, 100))])
def test_a_row_does_not_depend_on_how_many_there_are(inputs, columns):
    x, weights, _ = case(200, inputs, columns)
    together = skinny_matmul(x, *weights, operand_dtype="bfloat16", backend="cpu")
    for first, end in ((0, 1), (5, 8), (7, 23), (7, 24), (3, 35), (9, 57), (100, 200)):
        parts = skinny_matmul(x[first:end], *weights, operand_dtype="bfloat16", backend="cpu")
        for part, all_ in zip(parts, together, strict=True):
            np.testing.assert_array_equal(part, all_[first:end])


@WITH_UNITS
@pytest.mark.parametrize("kind", ["bfloat16", INT8, E4M3])
@pytest.mark.parametrize("inputs", [70, 96, 600])
def test_weights_that_lie_block_by_block_give_the_same_bits(inputs, kind):
    for rows in ROWS:
        x, weights, scales = case(rows, inputs, (128, 64), kind)
        blocked = tuple(package.in_blocks(weight) for weight in weights)
        expected = skinny_matmul(x, *weights, scales=scales, operand_dtype="bfloat16", backend="cpu")
        products = skinny_matmul(x, *blocked, scales=scales, operand_dtype="bfloat16", backend="cpu")
        for y, plain in zip(products, expected, strict=True):
            np.testing.assert_array_equal(y, plain)


@WITH_UNITS
@pytest.mark.parametrize("rows", [48, 49, 64, 81, 200])
def test_weights_in_tiles_give_the_same_bits_in_several_passes_over_rows(rows):
    """Enough blocks for chunks of several, and last passes of 17 to 48 rows."""
    x, (weight,), _ = case(rows, 96, (64 * 40,))
    if not package.reads_tiles(weight):
        pytest.skip("the processor has no matrix units")
    (expected,) = skinny_matmul(x, weight, operand_dtype="bfloat16", backend="cpu")
    (y,) = skinny_matmul(x, package.in_tiles(weight), operand_dtype="bfloat16", backend="cpu")
    np.testing.assert_array_equal(y, expected)


@WITH_UNITS
def test_rows_are_rounded_to_nearest_with_ties_to_even():
    ulp = 2.0**-7
    x = jnp.asarray([[1 + ulp / 2, 1 + 1.5 * ulp, 1 + 0.51 * ulp, -(1 + ulp / 2), 3e38, 1e-30, 0.0, -0.0]])
    weight = jnp.eye(8, dtype=jnp.bfloat16)
    (y,) = skinny_matmul(x, weight, operand_dtype="bfloat16", backend="cpu")
    np.testing.assert_array_equal(y, x.astype(jnp.bfloat16).astype(jnp.float32))
    assert y[0, :3].tolist() == [1, 1 + 2 * ulp, 1 + ulp]


@WITH_UNITS
@pytest.mark.parametrize("rows", [20, 40])
def test_nan_and_infinity_stay_in_their_rows(rows):
    x, weights, _ = case(rows, 96, (64,))
    expected = skinny_matmul(x, *weights, operand_dtype="bfloat16")[0]
    for bad in (jnp.nan, -jnp.nan, jnp.inf):
        (y,) = skinny_matmul(x.at[7, 3].set(bad), *weights, operand_dtype="bfloat16", backend="cpu")
        assert not np.isfinite(y[7]).any()
        np.testing.assert_array_equal(np.delete(y, 7, 0), np.delete(expected, 7, 0))


@WITH_UNITS
def test_other_kernels_may_use_the_units_between_calls():
    """A product of XLA, which may use the units itself, is the same before and after."""
    x, (weight,), _ = case(64, 96, (128,))

    @jax.jit
    def alternate(x):
        half = x.astype(jnp.bfloat16)
        first = jnp.matmul(half, weight, preferred_element_type=jnp.float32)
        (ours,) = skinny_matmul(x, weight, operand_dtype="bfloat16", backend="cpu")
        return first, ours, jnp.matmul(half, weight, preferred_element_type=jnp.float32)

    before, ours, after = alternate(x)
    np.testing.assert_array_equal(before, after)
    np.testing.assert_allclose(ours, before, atol=1e-4)


def test_gradients_are_those_of_the_reference():
    x, (weight,), _ = case(3, 96, (64,))

    def total(product):
        return lambda x, w: (product(x, w) ** 2).sum()

    def plain(x, w):
        return reference.skinny_matmul(x, (w,), operand_dtype="bfloat16")[0]

    actual = jax.grad(total(lambda x, w: skinny_matmul(x, w, operand_dtype="bfloat16")[0]), (0, 1))(x, weight)
    expected = jax.grad(total(plain), (0, 1))(x, weight)
    for a, b in zip(actual, expected, strict=True):
        # The value that is squared is the kernel's; only rounding differs.
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["float32", "uint8"])
def test_weights_that_bfloat16_cannot_hold_are_declined(kind):
    x = jnp.ones((2, 64), jnp.float32)
    with pytest.raises(ExceptionGroup) as caught:
        skinny_matmul(x, jnp.ones((64, 64), kind), operand_dtype="bfloat16", backend="cpu")
    reason = str(caught.value.exceptions[0])
    assert f"float32 times {kind}: only" in reason if package.rounds_operands() else "AMX" in reason
