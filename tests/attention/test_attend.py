"""Writing pages and attending to them, against plain arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.attention import attend
from entropic_jax.attention.attend import TokenSpan
from entropic_jax.state import cache
from entropic_jax.state.cache import ModelShape

SHAPE = ModelShape(layers=1, heads=4, kv_heads=2, head_dim=8, vocabulary=8, hidden=32)
PAGE = 4


def filled(lengths: list[int], chunks: tuple[int, ...], seed: int = 0):
    """A cache written in the given chunk sizes, NaN elsewhere, and the written keys and values."""
    rng = np.random.default_rng(seed)
    rows = len(lengths)
    k, v = rng.standard_normal((2, rows, max(lengths), 2, 8)).astype(np.float32)
    pool = cache.allocate(SHAPE, rows, 40, page_size=PAGE)
    layer = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pool.layers[0])
    pool, _ = cache.grant(pool, jnp.array(lengths, jnp.int32))
    done = 0
    for size in chunks:
        count = np.clip(np.array(lengths) - done, 0, size)
        piece = lambda x: jnp.asarray(np.pad(x, ((0, 0), (0, size), (0, 0), (0, 0)))[:, done : done + size])
        step = TokenSpan(jnp.full(rows, done, jnp.int32), jnp.asarray(count, jnp.int32))
        layer = attend.write(layer, pool.table, step, piece(k), piece(v))
        done += size
    return pool, layer, k, v


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [(1,) * 20, (16, 4), (3, 1, 9, 7), (20,)])
def test_pages_hold_what_was_written_and_their_summaries(chunks):
    lengths = [20, 13, 1]
    pool, layer, k, v = filled(lengths, chunks)
    for row, length in enumerate(lengths):
        for index in range(-(-length // PAGE)):
            page = int(pool.table[row, index])
            held = slice(index * PAGE, min((index + 1) * PAGE, length))
            keys, values = k[row, held], v[row, held]  # [slots, kv_heads, head_dim]
            slots = keys.shape[0]
            np.testing.assert_array_equal(layer.keys[page, :, :slots], keys.swapaxes(0, 1))
            np.testing.assert_array_equal(layer.values[page, :, :slots], values.swapaxes(0, 1))
            np.testing.assert_array_equal(layer.key_min[page], keys.min(0))
            np.testing.assert_array_equal(layer.key_max[page], keys.max(0))
            np.testing.assert_allclose(layer.key_sum[page], keys.sum(0), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(
                layer.value_norm[page], np.linalg.norm(values, axis=-1).max(0), rtol=1e-6
            )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("moments", [False, True])
def test_a_chunk_leaves_the_bits_of_single_tokens(dtype, moments):
    """At any offset, over pages, for rows of unequal lengths; what is not written keeps its bits."""
    rng = np.random.default_rng(2)
    rows, n = 3, 13
    k, v = jnp.asarray(rng.standard_normal((2, rows, n, 2, 8)), jnp.float32)
    pool = cache.allocate(SHAPE, rows, 40, page_size=PAGE, dtype=dtype, moments=moments)
    pool, _ = cache.grant(pool, jnp.full(rows, 40, jnp.int32))
    start, count = jnp.array([0, 3, 9], jnp.int32), jnp.array([13, 7, 0], jnp.int32)
    together = attend.write(pool.layers[0], pool.table, TokenSpan(start, count), k, v)
    layer = pool.layers[0]
    for i in range(n):
        span = TokenSpan(start + i, (i < count).astype(jnp.int32))
        layer = attend.write(layer, pool.table, span, k[:, i : i + 1], v[:, i : i + 1])
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(layer), strict=True):
        np.testing.assert_array_equal(a[:-1], b[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("queries", [1, 5])
def test_reading_equals_dense_attention(queries, window):
    lengths = [20, 13, 5]
    pool, layer, k, v = filled(lengths, (16, 4))
    rng = np.random.default_rng(1)
    q = rng.standard_normal((3, queries, 4, 8)).astype(np.float32)
    start = np.array(lengths) - queries
    step = TokenSpan(jnp.asarray(start, jnp.int32), jnp.full(3, queries, jnp.int32))
    out = attend.read(layer, pool.table, step, jnp.asarray(q), window)
    for row in range(3):
        for i in range(queries):
            position = start[row] + i
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(4):
                keys, values = (
                    k[row, first : position + 1, head // 2],
                    v[row, first : position + 1, head // 2],
                )
                score = (keys @ q[row, i, head]).astype(np.float64) * 8**-0.5
                weight = np.exp(score - score.max())
                expected = (weight / weight.sum()) @ values
                np.testing.assert_allclose(out[row, i, head], expected, atol=1e-5)


def test_a_row_that_must_not_write_leaves_every_page_alone():
    pool, layer, k, v = filled([9, 9], (9,))
    step = TokenSpan(jnp.array([9, 3], jnp.int32), jnp.array([0, 0], jnp.int32))
    for n in (1, 3):
        after = attend.write(layer, pool.table, step, jnp.asarray(k[:, :n]), jnp.asarray(v[:, :n]))
        for old, new in zip(layer[:6], after[:6], strict=True):
            np.testing.assert_array_equal(old[:-1], new[:-1])
    out = attend.read(layer, pool.table, step, jnp.ones((2, 1, 4, 8)))
    assert not out.any()
