"""Float32 rows times weights of bfloat16 on matrix units: as exact as float32, and identical row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.pallas import skinny_matmul as package
from entropic_jax.pallas.skinny_matmul import by_columns, cpu, in_blocks, in_tiles, skinny_matmul

WITH_UNITS = pytest.mark.skipif(
    not cpu.splits_operands("bfloat16"), reason="the processor has no matrix units"
)
ROWS = (1, 2, 5, 6, 16, 17, 31, 32, 33, 64, 65, 100)


def case(rows: int, inputs: int, columns: int = 128):
    """Rows whose numbers span many orders of magnitude."""
    rng = np.random.default_rng(inputs)
    x = rng.standard_normal((100, inputs)) * np.exp(3 * rng.standard_normal((100, inputs)))
    weight = jnp.asarray(rng.standard_normal((inputs, columns)), jnp.bfloat16)
    return jnp.asarray(x[:rows], jnp.float32), weight


def worst_error(y, x, weight) -> float:
    """The largest error of a product, ÷ the sum of its absolute terms."""
    left, right = np.asarray(x, np.float64), np.asarray(weight.astype(jnp.float32), np.float64)
    return float(np.max(np.abs(np.asarray(y) - left @ right) / (np.abs(left) @ np.abs(right))))


@WITH_UNITS
@pytest.mark.parametrize(("inputs", "columns"), [(32, 64), (96, 128), (70, 72), (600, 192), (1024, 8)])
def test_products_are_as_exact_as_float32(inputs, columns):
    x, weight = case(100, inputs, columns)
    (y,) = skinny_matmul(x, weight, backend="cpu")
    (plain,) = skinny_matmul(x, weight.astype(jnp.float32), backend="cpu")
    assert worst_error(y, x, weight) <= max(2**-23, 1.5 * worst_error(plain, x, weight))


@WITH_UNITS
@pytest.mark.parametrize("inputs", [64, 96, 544])
def test_every_layout_and_number_of_rows_gives_the_same_bits(inputs):
    x, weight = case(100, inputs)
    (together,) = skinny_matmul(x, weight, backend="cpu")
    for rows in ROWS:
        for layout in (lambda w: w, in_blocks, in_tiles):
            (y,) = skinny_matmul(x[:rows], layout(weight), backend="cpu")
            np.testing.assert_array_equal(y, together[:rows])
    (y,) = skinny_matmul(x[7:30], in_tiles(weight), backend="cpu")
    np.testing.assert_array_equal(y, together[7:30])


@WITH_UNITS
def test_several_weights_in_tiles_and_their_rounded_products():
    x, first = case(20, 96)
    second = case(20, 96, 64)[1] * 2
    for options in ({}, {"operand_dtype": "bfloat16"}):
        expected = skinny_matmul(x, first, second, backend="cpu", **options)
        products = skinny_matmul(x, in_tiles(first), in_tiles(second), backend="cpu", **options)
        for y, plain in zip(products, expected, strict=True):
            np.testing.assert_array_equal(y, plain)


def test_tiles_hold_the_numbers_of_the_weight():
    weight = jnp.arange(64 * 128).reshape(64, 128)
    tiles = in_tiles(weight)
    np.testing.assert_array_equal(by_columns(tiles), weight)
    np.testing.assert_array_equal(in_tiles(np.asarray(weight)), tiles)
    # Pairs of inputs side by side, 16 columns in a row of a tile, two tiles in a step of a half of a block.
    first = np.asarray(tiles[1, 0])
    assert first[:4].tolist() == [64, 128 + 64, 65, 128 + 65]
    assert first[32] == 2 * 128 + 64 and first[512] == 64 + 16 and first[1024] == 32 * 128 + 64


@WITH_UNITS
@pytest.mark.parametrize("bad", [jnp.nan, -jnp.nan, jnp.inf])
def test_what_is_not_finite_stays_in_its_row(bad):
    x, weight = case(20, 96)
    (expected,) = skinny_matmul(x, weight, backend="cpu")
    (y,) = skinny_matmul(x.at[7, 3].set(bad), weight, backend="cpu")
    assert not np.isfinite(y[7]).any()
    np.testing.assert_array_equal(np.delete(y, 7, 0), np.delete(expected, 7, 0))


@WITH_UNITS
def test_large_and_small_numbers():
    x = jnp.asarray([[3e38, 1.0, -1e-30, 0.0, -0.0, 1 + 2**-23, 2.0**-126, 1 / 3]])
    (y,) = skinny_matmul(x, jnp.eye(8, dtype=jnp.bfloat16), backend="cpu")
    np.testing.assert_array_equal(y, x)


def test_tiles_of_other_weights_are_left_to_plain_jax():
    weight = jnp.ones((64, 64), jnp.float32)
    assert not package.reads_tiles(weight)
    with pytest.raises(NotImplementedError, match=r"tiles of float32|Numba"):
        cpu.skinny_matmul(jnp.ones((2, 64)), (in_tiles(weight),))
    np.testing.assert_array_equal(
        skinny_matmul(jnp.ones((2, 64)), in_tiles(weight))[0], jnp.full((2, 64), 64.0)
    )


@pytest.mark.slow
def test_gradients_are_those_of_float32():
    x, weight = case(3, 64)
    total = lambda x, w: jnp.sin(skinny_matmul(x / 100, w)[0]).sum()
    plain = lambda x, w: jnp.sin((x / 100) @ w.astype(jnp.float32)).sum()
    for a, b in zip(jax.grad(total, (0, 1))(x, weight), jax.grad(plain, (0, 1))(x, weight), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=2e-2, atol=1e-2)
