"""Skinny products: against float64, identical row by row, and with the gradients of the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import cpu_runtime
from entropic_jax.pallas.skinny_matmul import (
    SKINNY_MATMUL,
    SKINNY_ROWS,
    by_columns,
    in_blocks,
    multiplies,
    reference,
    skinny_matmul,
)
from entropic_jax.pallas.skinny_matmul.reference import unpack

INPUTS, COLUMNS = 96, (128, 64, 192)
ON_CPU = pytest.mark.skipif(cpu_runtime.unavailable_reason() is not None, reason="no kernels for this CPU")


def case(rows: int, kind: str, columns: tuple[int, ...] = COLUMNS):
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, INPUTS)), jnp.float32)
    return x, tuple(jnp.asarray(rng.standard_normal((INPUTS, n)), kind) for n in columns)


@pytest.mark.parametrize(
    ("kind", "columns"),
    [("float32", COLUMNS), ("bfloat16", COLUMNS), ("float32", (8, 64, 100)), ("bfloat16", (72, 64, 8))],
)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 15, SKINNY_ROWS, SKINNY_ROWS + 1])
def test_products_are_those_of_the_widened_weights(rows, kind, columns):
    x, weights = case(rows, kind, columns)
    for y, weight in zip(skinny_matmul(x, *weights), weights, strict=True):
        exact = np.asarray(x, np.float64) @ np.asarray(weight.astype(jnp.float32), np.float64)
        np.testing.assert_allclose(y, exact, rtol=0, atol=1e-4)
        assert y.dtype == jnp.float32


@ON_CPU
@pytest.mark.parametrize(
    ("kind", "columns"), [("float32", COLUMNS), ("bfloat16", COLUMNS), ("float32", (8, 64, 100))]
)
def test_a_row_does_not_depend_on_how_many_there_are(kind, columns):
    x, weights = case(200, kind, columns)
    together = skinny_matmul(x, *weights)
    for rows in (slice(0, 1), slice(0, 2), slice(5, 8), slice(7, 20), slice(3, 18), slice(9, 159)):
        for part, all_ in zip(skinny_matmul(x[rows], *weights), together, strict=True):
            np.testing.assert_array_equal(part, all_[rows])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", pytest.param("cpu", marks=ON_CPU)])
@pytest.mark.parametrize(
    "kind", ["float32", "bfloat16", "int8", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 20, SKINNY_ROWS + 1])
def test_weights_that_lie_block_by_block_give_the_same_bits(rows, kind, backend):
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, INPUTS)), jnp.float32)
    weights = tuple(jnp.asarray(rng.integers(-127, 128, (INPUTS, n)), kind) for n in COLUMNS)
    scales = tuple(jnp.asarray(rng.uniform(0.001, 0.01, n), jnp.float32) for n in COLUMNS)
    scales = scales if kind in ("int8", "float8_e4m3fn") else ()
    blocked = tuple(in_blocks(weight) for weight in weights)
    expected = skinny_matmul(x, *weights, scales=scales, backend=backend)
    for y, plain in zip(skinny_matmul(x, *blocked, scales=scales, backend=backend), expected, strict=True):
        np.testing.assert_array_equal(y, plain)
    for weight, stored in zip(blocked, weights, strict=True):
        np.testing.assert_array_equal(by_columns(weight).astype(jnp.float32), stored.astype(jnp.float32))


@pytest.mark.slow
def test_the_gradient_of_a_weight_that_lies_block_by_block_does_so_too():
    x, (weight, _, other) = case(3, "float32")
    total = lambda layout: lambda w, v: jnp.sum(jnp.sin(skinny_matmul(x, layout(w), layout(v))[1]))
    plain = jax.grad(total(lambda w: w), (0, 1))(weight, other)
    blocked = jax.grad(lambda w, v: total(lambda w: w)(w, v), (0, 1))(in_blocks(weight), in_blocks(other))
    for actual, expected in zip(blocked, plain, strict=True):
        np.testing.assert_allclose(by_columns(actual), expected, rtol=1e-5, atol=1e-6)


@ON_CPU
@pytest.mark.parametrize("options", [{}, {"operand_dtype": "bfloat16"}], ids=["as they are", "rounded"])
def test_weights_of_both_layouts_are_left_to_plain_jax(options):
    weights = jnp.ones((2, INPUTS, 64)), jnp.ones((INPUTS, 64))
    products = skinny_matmul(jnp.ones((2, INPUTS)), *weights, **options)
    assert [y.shape for y in products] == [(2, 128), (2, 64)]
    assert all((y == INPUTS).all() for y in products)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", pytest.param("cpu", marks=ON_CPU)])
@pytest.mark.parametrize("columns", [COLUMNS, (8, 64, 100)])
@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_products_with_weights_of_8_bits_are_scaled_by_column(kind, columns, backend):
    rng = np.random.default_rng(3)
    weights = tuple(jnp.asarray(rng.integers(-127, 128, (INPUTS, n)), kind) for n in columns)
    scales = tuple(jnp.asarray(rng.uniform(0.001, 0.01, n), jnp.float32) for n in columns)
    x = jnp.asarray(rng.standard_normal((SKINNY_ROWS, INPUTS)), jnp.float32)
    together = skinny_matmul(x, *weights, scales=scales, backend=backend)
    for y, weight, scale in zip(together, weights, scales, strict=True):
        exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64) * np.asarray(scale, np.float64)
        np.testing.assert_allclose(y, exact, rtol=0, atol=1e-4)
    for rows in (slice(0, 1), slice(5, 8), slice(3, 18)) if backend == "cpu" else ():
        for part, all_ in zip(skinny_matmul(x[rows], *weights, scales=scales), together, strict=True):
            np.testing.assert_array_equal(part, all_[rows])


def packed_case(rows: int, inputs: int, group: int, columns: tuple[int, ...]):
    rng = np.random.default_rng(inputs)
    x = jnp.asarray(rng.standard_normal((rows, inputs)), jnp.float32)
    weights = tuple(jnp.asarray(rng.integers(0, 256, (inputs // 2, n)), jnp.uint8) for n in columns)
    scales = tuple(jnp.asarray(rng.uniform(-0.1, 0.1, (inputs // group, n)), jnp.bfloat16) for n in columns)
    return x, weights, scales


def test_halves_of_a_byte_are_neighbouring_inputs():
    weight, scale = jnp.asarray([[0x90], [0x8F]], jnp.uint8), jnp.asarray([[2.0], [-1.0]], jnp.bfloat16)
    assert unpack(weight, scale).tolist() == [[-16.0], [2.0], [-7.0], [0.0]]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", pytest.param("cpu", marks=ON_CPU)])
@pytest.mark.parametrize(("inputs", "group"), [(96, 32), (384, 128)])
@pytest.mark.parametrize("rows", [1, SKINNY_ROWS, SKINNY_ROWS + 1])
def test_products_with_packed_weights(rows, inputs, group, backend):
    x, weights, scales = packed_case(rows, inputs, group, (128, 8, 100))
    for y, weight, scale in zip(
        skinny_matmul(x, *weights, scales=scales, backend=backend), weights, scales, strict=True
    ):
        numbers = np.stack([np.asarray(weight) & 15, np.asarray(weight) >> 4], 1).reshape(inputs, -1) - 8.0
        wide = numbers * np.repeat(np.asarray(scale, np.float64), group, axis=0)
        np.testing.assert_allclose(y, np.asarray(x, np.float64) @ wide, rtol=0, atol=1e-4)


@pytest.mark.slow
@ON_CPU
@pytest.mark.parametrize("group", [32, 64, 160])
def test_bits_of_packed_products_are_those_of_the_widened_weights(group):
    """Every number of rows up to more than three tiles, full and partial blocks, several panels."""
    x, weights, scales = packed_case(40, 320, group, (320, 72))
    wide = tuple(unpack(weight, scale) for weight, scale in zip(weights, scales, strict=True))
    expected = skinny_matmul(x, *wide, backend="cpu")
    for count in range(1, 41):
        products = skinny_matmul(x[40 - count :], *weights, scales=scales, backend="cpu")
        for y, all_ in zip(products, expected, strict=True):
            np.testing.assert_array_equal(y, all_[40 - count :], err_msg=f"{count} rows")


@ON_CPU
def test_every_number_of_e4m3_is_widened():
    numbers = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), jnp.float8_e4m3fn)
    wide = jnp.nan_to_num(numbers.astype(jnp.float32))[None]  # NaN, which no quantised weight is, aside
    narrow, unit = wide.astype(jnp.float8_e4m3fn), jnp.ones((1, 1), jnp.float32)
    for begin in (0, 200):  # full blocks, and a part of one
        ones = jnp.ones(256 - begin, jnp.float32)
        y = skinny_matmul(unit, narrow[:, begin:], scales=(ones,), backend="cpu")[0]
        np.testing.assert_array_equal(y, wide[:, begin:])


@ON_CPU
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_tiles_or_panels(kind):
    """Every number of rows up to more than three tiles, and inputs that fill no panel."""
    rng = np.random.default_rng(0)
    rows, inputs = 40, 300
    x = jnp.asarray(rng.standard_normal((rows, inputs)), jnp.float32)
    weights = tuple(jnp.asarray(rng.standard_normal((inputs, n)), kind) for n in (320, 72))
    alone = [
        np.concatenate(y)
        for y in zip(*(skinny_matmul(x[r : r + 1], *weights) for r in range(rows)), strict=True)
    ]
    for count in range(2, rows + 1):
        for y, expected in zip(skinny_matmul(x[rows - count :], *weights), alone, strict=True):
            np.testing.assert_array_equal(y, expected[rows - count :], err_msg=f"{count} rows")


@ON_CPU
@pytest.mark.parametrize(
    "kind",
    ["float32", "bfloat16", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "uint8"))],
)
@pytest.mark.parametrize("rows", [272, 273, 600])
def test_passes_over_rows_change_no_bit(kind, rows):
    """Passes of 256 rows, of which the last has 17 to 272, by chunks of one block and of several."""
    rng = np.random.default_rng(rows)
    x, widths = jnp.asarray(rng.standard_normal((rows, 64)), jnp.float32), (64 * 40, 72)
    if kind == "uint8":
        weights = tuple(jnp.asarray(rng.integers(0, 256, (32, n)), kind) for n in widths)
        scales = tuple(jnp.asarray(rng.uniform(0.01, 0.1, (2, n)), jnp.bfloat16) for n in widths)
    else:
        weights = tuple(jnp.asarray(rng.standard_normal((64, n)) * 9, kind) for n in widths)
        scales = tuple(jnp.ones(n) for n in widths) if kind == "int8" else ()
    together = skinny_matmul(x, *weights, scales=scales, backend="cpu")
    for begin in range(0, rows, 50):
        parts = skinny_matmul(x[begin : begin + 50], *weights, scales=scales, backend="cpu")
        for part, all_ in zip(parts, together, strict=True):
            np.testing.assert_array_equal(part, all_[begin : begin + 50])


@ON_CPU
def test_sums_are_chains_of_fused_multiply_adds():
    """A sum whose products need more digits than float32 has is rounded once per input, in order."""
    x = jnp.full((1, 3), 1 + 2.0**-12, jnp.float32)
    weight = jnp.asarray([[-1.0], [1 + 2.0**-12], [2.0**-24]], jnp.float32) * jnp.ones((1, 72))
    chain = 0.0
    for a, b in zip(np.float64(x[0]), np.float64(weight[:, 0]), strict=True):
        chain = float(np.float32(a * b + chain))  # exact in float64 before it is rounded
    y = skinny_matmul(x, weight, backend="cpu")[0]
    np.testing.assert_array_equal(y, np.full((1, 72), chain, np.float32))
    assert chain != float(np.float32(np.float32(x[0, 1] * weight[1, 0]) + np.float32(x[0, 0] * weight[0, 0])))


@ON_CPU
def test_nan_stays_in_its_row():
    x, weights = case(5, "bfloat16")
    y = skinny_matmul(x.at[2].set(jnp.nan), *weights, backend="cpu")[0]
    assert np.isnan(y[2]).all()
    assert np.isfinite(y[jnp.array([0, 1, 3, 4])]).all()


def test_leading_axes_are_kept():
    x, weights = case(6, "float32")
    y = skinny_matmul(x.reshape(2, 3, INPUTS), *weights)[1]
    assert y.shape == (2, 3, COLUMNS[1])
    np.testing.assert_allclose(y.reshape(6, -1), x @ weights[1], atol=1e-4)


def test_gradients_are_those_of_the_plain_product():
    x, weights = case(3, "float32")
    loss = lambda product: lambda x, weights: sum((y * y).sum() for y in product(x, weights))
    actual = jax.grad(loss(lambda x, w: skinny_matmul(x, *w)), (0, 1))(x, weights)
    expected = jax.grad(loss(reference.skinny_matmul), (0, 1))(x, weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-2), actual, expected)


@pytest.mark.parametrize(
    ("x", "kinds", "columns"),
    [
        ("bfloat16", ("bfloat16",), (64,)),
        ("float32", ("float16",), (64,)),
        ("float32", ("float32", "bfloat16"), (64, 64)),
    ],
)
def test_what_is_not_served_is_declined_with_a_reason(x, kinds, columns):
    rows = jnp.ones((2, INPUTS), x)
    weights = tuple(jnp.ones((INPUTS, n), kind) for n, kind in zip(columns, kinds, strict=True))
    with pytest.raises(ExceptionGroup) as declined:
        SKINNY_MATMUL(rows, weights, backend="cpu")
    assert isinstance(declined.value.exceptions[0], NotImplementedError)
    assert skinny_matmul(rows, *weights)[0].shape == (2, columns[0])


@pytest.mark.parametrize(("group", "kind"), [(16, "bfloat16"), (32, "float32")])
def test_scales_that_the_kernel_does_not_read_are_declined(group, kind):
    x, weights, scales = packed_case(2, 96, group, (64,))
    scales = tuple(scale.astype(kind) for scale in scales)
    with pytest.raises(ExceptionGroup) as declined:
        SKINNY_MATMUL(x, weights, scales, backend="cpu")
    assert "only bfloat16 with groups of a multiple of 32 inputs" in str(declined.value.exceptions[0])
    wide = unpack(weights[0], scales[0])
    np.testing.assert_allclose(skinny_matmul(x, *weights, scales=scales)[0], x @ wide, atol=1e-4)


def test_many_rows_are_multiplied_unless_xla_has_more_threads(monkeypatch):
    assert multiplies(SKINNY_ROWS) and multiplies(2 * SKINNY_ROWS)
    monkeypatch.setattr(cpu_runtime, "num_processors", lambda: cpu_runtime.MAX_THREADS + 1)
    assert multiplies(SKINNY_ROWS) and not multiplies(SKINNY_ROWS + 1)
