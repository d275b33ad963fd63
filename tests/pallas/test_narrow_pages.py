"""Pages of 16 and 8 bits on a CPU: the Numba kernels that read and write them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import cpu_runtime
from entropic_jax.pallas import paged_attention
from entropic_jax.pallas.paged_attention import cases, cpu, cpu_page, cpu_write, quantised, write_reference

from ..marks import sample

KINDS = ("bfloat16", "int8")
SHAPES = (
    cases.Case(3, 2, 4, 64, 16, 5),
    cases.Case(3, 1, 7, 32, 16, 6, kept=0.5, window=True),
    cases.Case(2, 2, 1, 16, 4, 9, kept=0.7),
    cases.Case(2, 1, 3, 128, 256, 6, window=True),
    cases.Case(3, 2, 17, 96, 32, 6, kept=0.5, window=True),
)


pytestmark = pytest.mark.skipif(
    cpu_runtime.unavailable_reason() is not None, reason=str(cpu_runtime.unavailable_reason())
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", sample(SHAPES, 1, 4), ids=lambda case: case.name)
def test_what_is_read_is_what_float64_says(shape, kind):
    """Rounding a weight moves the output by at most 2⁻⁸ of what the weight adds to it."""
    case = shape._replace(pages=kind)
    rounded = cpu_page.operands_of(kind, shape.head_dim, shape.page) != "float32"
    for seed in range(3):
        q, keys, values, *places = cases.build(case, seed)
        actual = jax.jit(cpu.decode)(q, keys, values, *places)
        if rounded:
            q = np.asarray(q).astype(jnp.bfloat16).astype(np.float32)
        out, log_sum_exp = cases.exact(case, (q, keys, values, *places))
        np.testing.assert_allclose(actual.log_sum_exp, log_sum_exp, atol=2e-5)
        bound = 2**-8 * cases.exact(case, (q, keys, np.abs(values), *places))[0] if rounded else 0
        assert (np.abs(actual.out - out) <= 2e-5 + bound).all()


@pytest.mark.skipif(cpu_page.operands_of("bfloat16", 32, 16) != "pairs", reason="no pairs of bfloat16 here")
@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize(
    ("first", "end"), [(0, 16), (3, 4), (2, 3), (5, 12), (6, 11), (15, 17), (1, 48), (33, 47)]
)
def test_pairs_of_rows_hold_those_that_are_seen(first, end, page_size):
    """Rows that are not seen hold NaN. Equal scores have equal weights, which bfloat16 holds exactly."""
    rng = np.random.default_rng(end)
    seen = (np.arange(96) >= first) & (np.arange(96) < end)
    values = np.where(seen[:, None], rng.integers(-8, 8, (96, 32)), np.nan).reshape(-1, 1, page_size, 32)
    pool = lambda x: jnp.asarray(np.concatenate([x, np.full_like(x[:1], np.nan)]), jnp.bfloat16)
    keys, table = np.where(np.isnan(values), np.nan, 0.0), jnp.arange(len(values), dtype=jnp.int32)[None]
    span = jnp.array([first], jnp.int32), jnp.array([end], jnp.int32)
    out = cpu.decode(jnp.ones((1, 1, 1, 32)), pool(keys), pool(values), table, None, None, *span).out
    np.testing.assert_allclose(out[0, 0, 0], np.nanmean(values, (0, 1, 2)), rtol=1e-6, atol=1e-6)


def written(kind, poison=False):
    """Vectors of all magnitudes, written slot by slot by the kernel and in plain JAX."""
    rng = np.random.default_rng(3)
    rows, kv_heads, head_dim, size = 3, 2, 32, 4
    tiles = tuple(quantised.zeros((2 * rows + 1, kv_heads, size, head_dim), kind) for _ in range(2))
    summaries = (*(jnp.full((2 * rows + 1, kv_heads, head_dim), jnp.nan) for _ in range(3)),)
    ways = [(tiles, (*summaries, jnp.full((2 * rows + 1, kv_heads), jnp.nan)))] * 2
    for position in range(2 * size):
        k, v = rng.standard_normal((2, rows, kv_heads, head_dim)) * 10.0 ** rng.integers(
            -6, 6, (2, rows, 1, 1)
        )
        k[1] = 0
        if poison and position == 5:
            k[2, 1, 7] = np.nan
        page = np.arange(rows) + rows * (position // size)
        slot = np.full(rows, position % size)
        location = (jnp.asarray(page, jnp.int32), jnp.asarray(slot, jnp.int32))
        vectors = (jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.float32))
        makers = (cpu_write.write, write_reference.write)
        ways = [jax.jit(m)(*way, *vectors, *location) for m, way in zip(makers, ways, strict=True)]
    return ways


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_has_the_bits_of_the_reference(kind):
    (ours, our_summaries), (theirs, their_summaries) = written(kind)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(np.asarray(x)[:-1], np.asarray(y)[:-1])
    low, high, total, norm = zip(our_summaries, their_summaries, strict=True)
    for x, y in (low, high):
        np.testing.assert_array_equal(x[:-1], y[:-1])
    for x, y in (total, norm):
        np.testing.assert_allclose(x[:-1], y[:-1], rtol=1e-5, atol=1e-5 * np.abs(high[1][:-1]).max())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_is_read_as_none(kind):
    (keys, values), _ = written(kind, poison=True)[0]
    read = np.asarray(quantised.gather(keys, np.array([5]), jnp.float32))
    assert np.isnan(read[0, 1, 1]).any() and np.isfinite(read[0, 0]).all()
    q = jnp.ones((1, 2, 1, 32))
    table, span = jnp.array([[5]], jnp.int32), (jnp.array([0], jnp.int32), jnp.array([4], jnp.int32))
    out = cpu.decode(q, keys, values, table, None, None, *span).out
    assert np.isnan(out[0, 1]).all() and np.isfinite(out[0, 0]).all()


def test_the_nearest_number_of_16_bits_and_the_even_one_of_two():
    tiles = tuple(quantised.zeros((2, 1, 1, 16), "bfloat16") for _ in range(2))
    summaries = (*(jnp.zeros((2, 1, 16)) for _ in range(3)), jnp.zeros((2, 1)))
    bits = [0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000]
    x = jnp.asarray(np.array(bits * 2, np.uint32).view(np.float32)).reshape(1, 1, 16)
    zero = jnp.zeros(1, jnp.int32)
    (keys, _), _ = cpu_write.write(tiles, summaries, x, x, zero, zero)
    np.testing.assert_array_equal(keys[0, 0, 0], x[0, 0].astype(jnp.bfloat16))


@pytest.mark.parametrize("kinds", [("float8_e4m3fn",) * 2, ("float16",) * 2, ("float32", "bfloat16")])
def test_other_pages_are_declined_and_served_by_plain_jax(kinds):
    shape = cases.Case(2, 1, 2, 32, 16, 3)
    q, keys, values, *places = cases.build(shape)
    keys, values = (
        cases.poisoned(kind, np.nan_to_num(x, nan=1.0), np.ones(x.shape[:3], bool))
        for kind, x in zip(kinds, (keys, values), strict=True)
    )
    with pytest.raises(NotImplementedError, match="float32, bfloat16 and int8 are supported"):
        cpu.decode(q, keys, values, *places)
    keys, values = jax.tree.map(jnp.asarray, (keys, values))
    assert np.isfinite(paged_attention.decode(q, keys, values, *places).out).all()
