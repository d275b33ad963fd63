"""Verification attention: each query has the bits of a decoding step, whatever else is computed with it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import cpu_runtime
from entropic_jax.pallas.paged_attention import MAX_VERIFIED, decode, prefill, quantised, verify
from tests.marks import exhaustive

PAGES, PER_ROW, KV_HEADS, GROUP, HEAD_DIM = 24, 12, 2, 2, 64
ROWS = 2
ON_CPU = pytest.mark.skipif(cpu_runtime.unavailable_reason() is not None, reason="no kernels for this CPU")


def pools(page_size: int, dtype: str, seed: int = 0):
    """Pools of keys and values, and a page table that gives every row pages of its own."""
    rng = np.random.default_rng(seed)
    shape = (PAGES + 1, KV_HEADS, page_size, HEAD_DIM)

    def pool():
        x = jnp.asarray(rng.standard_normal(shape), jnp.float32)
        if dtype != "int8":
            return x.astype(dtype)
        tiles, scale = quantised.quantise(x, jnp.int8)
        return quantised.Quantised(tiles, scale[:, :, None])

    table = jnp.asarray(rng.permutation(PAGES).reshape(ROWS, PER_ROW), jnp.int32)
    return pool(), pool(), table


def queries(n: int, seed: int = 1) -> jax.Array:
    shape = (ROWS, KV_HEADS, GROUP, n, HEAD_DIM)
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def windows(start: jax.Array, n: int, window: int | None) -> jax.Array:
    position = start[:, None] + jnp.arange(n)
    return jnp.zeros_like(position) if window is None else jnp.maximum(position - window + 1, 0)


def decoded(q, keys, values, table, lists, first, start, backend=None) -> jax.Array:
    """The output of one decoding step per query."""
    step = jax.jit(partial(decode, backend=backend))
    pages = keys, values, table, *lists
    outs = [step(q[:, :, :, i], *pages, first[:, i], start + i + 1).out for i in range(q.shape[3])]
    return jnp.stack(outs, 3)


# Matrix units attend to pages of bfloat16 whose size is a multiple of 32.
@pytest.mark.slow
@ON_CPU
@pytest.mark.parametrize(
    ("dtype", "page_size"), [("float32", 16), ("bfloat16", 16), ("bfloat16", 64), ("int8", 16)]
)
@pytest.mark.parametrize("window", [None, 21, *exhaustive(200)])
def test_a_query_has_the_bits_of_decoding(dtype, page_size, window):
    keys, values, table = pools(page_size, dtype)
    for n, offset in ((1, 0), (2, page_size - 1), (3, 46), (8, 9), (17, 150), (MAX_VERIFIED, 1)):
        start = jnp.array([offset, 97], jnp.int32)
        q, first = queries(n), windows(start, n, window)
        out = verify(q, keys, values, table, None, None, first, start, start + n, backend="cpu")
        expected = decoded(q, keys, values, table, (None, None), first, start, "cpu")
        np.testing.assert_array_equal(out, expected, err_msg=f"{n} queries from {offset}")


@pytest.mark.slow
@ON_CPU
def test_long_contexts_are_split_into_the_same_pieces():
    page_size, n = 256, 5
    keys, values, table = pools(page_size, "float32")
    start = jnp.array([1022, 2900], jnp.int32)
    for window in (None, 1023, 1500):
        q, first = queries(n), windows(start, n, window)
        out = verify(q, keys, values, table, None, None, first, start, start + n, backend="cpu")
        np.testing.assert_array_equal(out, decoded(q, keys, values, table, (None, None), first, start, "cpu"))


@pytest.mark.slow
@ON_CPU
def test_listed_pages():
    keys, values, table = pools(16, "float32")
    start, n = jnp.array([100, 130], jnp.int32), 6
    entries = jnp.array([0, 2, 5, 6, 7, 8, 0, 0], jnp.int32)
    lists = jnp.broadcast_to(entries, (ROWS, KV_HEADS, 8)), jnp.full((ROWS, KV_HEADS), 6, jnp.int32)
    q, first = queries(n), windows(start, n, None)
    out = verify(q, keys, values, table, *lists, first, start, start + n, backend="cpu")
    np.testing.assert_array_equal(out, decoded(q, keys, values, table, lists, first, start, "cpu"))


@pytest.mark.slow
@ON_CPU
@pytest.mark.parametrize(("dtype", "page_size"), [("float32", 16), ("bfloat16", 32)])
def test_neighbours_and_unused_slots_leave_no_trace(dtype, page_size):
    """A row of NaN, slots that no query sees yet, and queries past the end change no bit of another query."""
    keys, values, table = pools(page_size, dtype)
    start, n = jnp.array([37, 60], jnp.int32), 4
    q, first = queries(n), windows(start, n, None)
    attend = partial(verify, page_table=table, page_list=None, num_pages=None, window_start=first)
    alone = attend(q, keys, values, query_start=start, context_length=start + n, backend="cpu")
    nan = jnp.nan
    page, slot = divmod(39, page_size)
    poisoned = tuple(pool.at[table[1]].set(nan).at[table[0, page + 1 :]].set(nan) for pool in (keys, values))
    poisoned = tuple(pool.at[table[0, page], :, slot:].set(nan) for pool in poisoned)
    out = attend(q, *poisoned, query_start=start, context_length=start + 2, backend="cpu")
    np.testing.assert_array_equal(out[0, :, :, :2], alone[0, :, :, :2])
    assert np.isnan(out[1, :, :, :2]).all()


@pytest.mark.slow
@ON_CPU
@pytest.mark.parametrize(("dtype", "page_size"), [("float32", 16), ("bfloat16", 64)])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_value_that_is_no_number_reaches_those_who_see_it_only(dtype, page_size, bad):
    """The queries stand on 37 to 48, and the value on 40, where one tile has queries before and behind it."""
    keys, values, table = pools(page_size, dtype)
    start, n = jnp.array([37, 60], jnp.int32), 12
    page, slot = divmod(40, page_size)
    positions = (table, None, None, windows(start, n, None), start, start + n)
    expected = verify(queries(n), keys, values, *positions, backend="cpu")
    poisoned = values.at[table[0, page], :, slot, 5].set(bad)
    out = verify(queries(n), keys, poisoned, *positions, backend="cpu")
    np.testing.assert_array_equal(out[0, :, :, :3], expected[0, :, :, :3])
    np.testing.assert_array_equal(out[1], expected[1])
    assert not np.isfinite(out[0, :, :, 3:, 5]).any()
    others = np.arange(HEAD_DIM) != 5
    np.testing.assert_array_equal(out[0, :, :, 3:, others], expected[0, :, :, 3:, others])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", None])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_back_ends_agree_with_prefill(backend, dtype):
    keys, values, table = pools(16, dtype)
    start, n = jnp.array([37, 90], jnp.int32), 5
    q, first = queries(n), windows(start, n, 50)
    positions = (table, None, None, first, start, start + n)
    out = verify(q, keys, values, *positions, backend=backend)
    np.testing.assert_allclose(out, prefill(q, keys, values, *positions, backend="xla"), atol=2e-5)


@pytest.mark.slow
def test_gradients_are_those_of_prefill():
    keys, values, table = pools(16, "float32")
    start, n = jnp.array([17, 20], jnp.int32), 3
    q, first = queries(n), windows(start, n, None)
    positions = (table, None, None, first, start, start + n)
    loss = lambda f: lambda q, keys, values: jnp.sin(f(q, keys, values, *positions)).sum()
    actual = jax.jit(jax.grad(loss(verify), (0, 1, 2)))(q, keys, values)
    expected = jax.jit(jax.grad(loss(prefill), (0, 1, 2)))(q, keys, values)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), actual, expected)


@ON_CPU
def test_more_queries_than_are_supported_are_declined():
    keys, values, table = pools(16, "float32")
    n = MAX_VERIFIED + 1
    start = jnp.array([1, 1], jnp.int32)
    with pytest.raises(ExceptionGroup, match="no back end"):
        verify(
            queries(n), keys, values, table, None, None, windows(start, n, None), start, start, backend="cpu"
        )
