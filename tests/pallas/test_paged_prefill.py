"""Prefill of listed pages on a CPU against plain attention, with NaN in all memory that is not listed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import cpu_runtime
from entropic_jax.pallas.paged_attention import cpu, decode, prefill_cpu, prefill_reference

ROWS, KV_HEADS, GROUP, QUERIES, HEAD_DIM, SIZE, PAGES = 2, 2, 2, 8, 16, 4, 10
REFERENCE = jax.jit(prefill_reference.prefill)
ON_CPU = pytest.mark.skipif(cpu_runtime.unavailable_reason() is not None, reason="no kernels for this CPU")
BACK_ENDS = [
    pytest.param(REFERENCE, id="xla"),
    pytest.param(jax.jit(prefill_cpu.prefill), id="cpu", marks=ON_CPU),
]


def case(seed: int):
    """Two rows of 37 and 21 positions with 8 and 3 queries at their ends; each head has its own pages."""
    rng = np.random.default_rng(seed)
    last, count = np.array([37, 21]), np.array([8, 3])
    q = rng.standard_normal((ROWS, KV_HEADS, GROUP, QUERIES, HEAD_DIM)).astype(np.float32)
    k, v = rng.standard_normal((2, ROWS, KV_HEADS, PAGES * SIZE, HEAD_DIM)).astype(np.float32)
    table = rng.permutation(ROWS * PAGES + 1)[: ROWS * PAGES].reshape(ROWS, PAGES)
    listed = np.zeros((ROWS, KV_HEADS, PAGES), bool)
    for row in range(ROWS):
        position = np.arange(PAGES) * SIZE + SIZE > last[row] - count[row]
        for head in range(KV_HEADS):
            listed[row, head] = position | (rng.random(PAGES) < 0.4)
    return q, k, v, table, listed, last - count, last


def pool(x, table, kept, last):
    """Pages of the pool, NaN where a head does not list them and past the end of a row."""
    out = np.full((ROWS * PAGES + 1, KV_HEADS, SIZE, HEAD_DIM), np.nan, np.float32)
    for row in range(ROWS):
        for head in range(KV_HEADS):
            for page in np.flatnonzero(kept[row, head]):
                held = np.arange(SIZE) + page * SIZE < last[row]
                out[table[row, page], head, held] = x[row, head].reshape(PAGES, SIZE, -1)[page, held]
    return jnp.asarray(out)


def plain(q, k, v, listed, query, last, window=None):
    out = np.zeros(q.shape)
    for row, head, group, i in np.ndindex(q.shape[:4]):
        position = query[row] + i
        seen = np.repeat(listed[row, head], SIZE)
        seen &= (np.arange(PAGES * SIZE) <= position) & (np.arange(PAGES * SIZE) < last[row])
        if window is not None:
            seen &= np.arange(PAGES * SIZE) > position - window
        score = k[row, head].astype(np.float64) @ q[row, head, group, i]
        weight = np.where(seen, np.exp(score - score.max()), 0)
        out[row, head, group, i] = weight @ v[row, head] / weight.sum()
    return out


@pytest.mark.parametrize("prefill", BACK_ENDS)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("seed", [0, 1])
def test_each_head_reads_its_list_and_nothing_else(seed, window, prefill):
    q, k, v, table, listed, query, last = case(seed)
    index = np.argsort(~listed, axis=-1, kind="stable").astype(np.int32)
    position = query[:, None] + np.arange(QUERIES)
    first = np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)
    keys, values = (pool(x, table, listed, last) for x in (k, v))
    integers = lambda *arrays: [jnp.asarray(x, jnp.int32) for x in arrays]
    out = prefill(jnp.asarray(q), keys, values, *integers(table, index, listed.sum(-1), first, query, last))
    expected = plain(q, k, v, listed, query, last, window)
    for row, count in enumerate((8, 3)):
        np.testing.assert_allclose(out[row, :, :, :count], expected[row, :, :, :count], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("prefill", BACK_ENDS)
def test_all_pages_listed_is_dense(prefill):
    q, k, v, table, listed, query, last = case(2)
    every = np.ones_like(listed)
    keys, values = (pool(x, table, every, last) for x in (k, v))
    first = jnp.zeros((ROWS, QUERIES), jnp.int32)
    integers = lambda *arrays: [jnp.asarray(x, jnp.int32) for x in arrays]
    count = -(-last // SIZE)[:, None].repeat(KV_HEADS, 1)
    index = np.broadcast_to(np.arange(PAGES), listed.shape)
    places = integers(query, last)
    table = jnp.asarray(table, jnp.int32)
    dense = prefill(jnp.asarray(q), keys, values, table, None, None, first, *places)
    full = prefill(jnp.asarray(q), keys, values, table, *integers(index, count), first, *places)
    for row, number in enumerate((8, 3)):
        np.testing.assert_allclose(full[row, :, :, :number], dense[row, :, :, :number], atol=1e-5)


@pytest.mark.parametrize("form", ["dense", "listed"])
def test_queries_past_the_context_see_what_the_last_position_sees(form):
    """Row 1 has three queries and five of padding; memory past its context is NaN."""
    q, k, v, table, listed, query, last = case(3)
    listed = np.ones_like(listed) if form == "dense" else listed
    keys, values = (pool(x, table, listed, last) for x in (k, v))
    integers = lambda *arrays: [jnp.asarray(x, jnp.int32) for x in arrays]
    lists = (None, None)
    if form == "listed":
        lists = integers(np.argsort(~listed, axis=-1, kind="stable"), listed.sum(-1))
    first = np.zeros((ROWS, QUERIES))
    first[1, -1] = last[1]  # this query sees nothing
    places = integers(table)[0], *lists, *integers(first, query, last)
    out = np.asarray(REFERENCE(jnp.asarray(q), keys, values, *places))
    expected = plain(q, k, v, listed, query, last)
    expected[1, :, :, -1] = 0
    np.testing.assert_allclose(out, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
@ON_CPU
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("number", [1, cpu.MAX_QUERIES, cpu.MAX_QUERIES + 1, 3 * cpu.MAX_QUERIES + 5])
@pytest.mark.parametrize("parts", [False, True])
def test_each_query_has_the_bits_of_decoding(number, window, parts, monkeypatch):
    """The second row has half of the queries; what follows them is padding, which sees nothing."""
    if parts:  # two blocks of queries in a call
        partials = KV_HEADS * cpu.MAX_QUERIES * GROUP * (HEAD_DIM + 2) * 4
        monkeypatch.setattr(prefill_cpu, "MOST_PARTIALS", 2 * partials)
    rng, size, pages, start = np.random.default_rng(number), 16, 12, np.array([3, 70])
    count = np.array([number, (number + 1) // 2])
    q = jnp.asarray(rng.standard_normal((ROWS, KV_HEADS, GROUP, number, HEAD_DIM)), jnp.float32)
    keys, values = jnp.asarray(
        rng.standard_normal((2, ROWS * pages + 1, KV_HEADS, size, HEAD_DIM)), jnp.float32
    )
    table = jnp.asarray(rng.permutation(ROWS * pages).reshape(ROWS, pages), jnp.int32)
    position = start[:, None] + np.arange(number)
    first = np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)
    places = (jnp.asarray(x, jnp.int32) for x in (first, start, start + count))
    out = np.asarray(prefill_cpu.prefill(q, keys, values, table, None, None, *places))
    for row in range(ROWS):
        for i in range(count[row]):
            ends = (jnp.asarray([x], jnp.int32) for x in (first[row, i], position[row, i] + 1))
            alone = decode(
                q[row : row + 1, :, :, i],
                keys,
                values,
                table[row : row + 1],
                None,
                None,
                *ends,
                backend="cpu",
            )
            np.testing.assert_array_equal(out[row, :, :, i], alone.out[0])
        assert not out[row, :, :, count[row] :].any()


@pytest.mark.slow
@ON_CPU
def test_no_rows():
    keys, none = jnp.zeros((3, KV_HEADS, 16, HEAD_DIM)), jnp.zeros((0, 2), jnp.int32)
    q, first, ends = jnp.zeros((0, KV_HEADS, GROUP, 40, HEAD_DIM)), jnp.zeros((0, 40), jnp.int32), none[:, 0]
    assert prefill_cpu.prefill(q, keys, keys, none, None, None, first, ends, ends).shape == q.shape
