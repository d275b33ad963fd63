"""Paged attention in plain JAX: the oracle of the kernels, and what runs where none accepts."""

import jax
import jax.numpy as jnp

CHUNK_POSITIONS = 256  # read at once
NEGATIVE = -1e30  # a score that is masked; finite, so that a fully masked chunk does no harm


def decode(q, keys, values, table, first, last):
    """See the package. Rows one after another, each a loop over chunks of its own pages."""
    return prefill(q[:, :, :, None], keys, values, table, first[:, None], last - 1, last)[:, :, :, 0]


def prefill(q, keys, values, table, first, query, last):
    """Causal attention of several queries per row, with the softmax kept online over chunks of pages.

    q `[rows, kv_heads, group, n, head_dim]`, scaled. Query i of a row stands at position `query + i` and
    sees positions from `first[row, i]` to its own; nothing at or past `last` is read into the result.
    Scores are kept as `[kv_heads, positions, queries]`: reductions over positions then vectorise.
    """
    rows, kv_heads, group, n, head_dim = q.shape
    size = keys.shape[2]
    pages = max(1, CHUNK_POSITIONS // size)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)), constant_values=keys.shape[0] - 1)
    q = q.reshape(rows, kv_heads, group * n, head_dim).swapaxes(2, 3)

    def row(operands):
        q, table, first, query, last = operands
        own, first_seen = (jnp.tile(x, group) for x in (query + jnp.arange(n), first))

        def chunk(i, carry):
            top, total, out = carry
            page = jax.lax.dynamic_slice_in_dim(table, i * pages, pages)
            position = i * pages * size + jnp.arange(pages * size)[:, None]
            flat = lambda x: x[page].swapaxes(0, 1).reshape(kv_heads, pages * size, head_dim)
            # Slots at or past `last` may hold anything: they must not reach a product as NaN.
            k, v = flat(keys), jnp.where(position < last, flat(values), 0)
            score = jnp.matmul(k, q, preferred_element_type=jnp.float32)
            score = jnp.where((position <= own) & (position >= first_seen), score, NEGATIVE)
            new = jnp.maximum(top, score.max(1, keepdims=True))
            weight, scale = jnp.exp(score - new), jnp.exp(top - new)
            part = jnp.matmul(v.swapaxes(1, 2), weight.astype(v.dtype), preferred_element_type=jnp.float32)
            return new, total * scale + weight.sum(1, keepdims=True), out * scale + part

        blank = jnp.zeros((kv_heads, 1, group * n))
        start = (blank + NEGATIVE, blank, jnp.zeros((kv_heads, head_dim, group * n)))
        stop = jnp.where(last > first.min(), -(-last // (pages * size)), 0)
        _, total, out = jax.lax.fori_loop(first.min() // (pages * size), stop, chunk, start)
        return (out / jnp.maximum(total, 1e-30)).swapaxes(1, 2).astype(keys.dtype)

    out = jax.lax.map(row, (q, table, first, query, last))
    return out.reshape(rows, kv_heads, group, n, head_dim)


def gathered(q, keys, values, table, first, last):
    """`decode` without a loop of unknown length, so that it can be differentiated; reads every page."""
    rows, _, _, head_dim = q.shape
    flat = lambda x: jnp.swapaxes(x[table], 2, 3).reshape(rows, -1, x.shape[1], head_dim)
    position = jnp.arange(table.shape[1] * keys.shape[2])
    seen = (position >= first[:, None]) & (position < last[:, None])
    k, v = (jnp.where(seen[:, :, None, None], flat(x), 0) for x in (keys, values))
    score = jnp.einsum("rkgd,rskd->rkgs", q, k, preferred_element_type=jnp.float32)
    score = jnp.where(seen[:, None, None], score, NEGATIVE)
    weight = jnp.where(seen.any(1)[:, None, None, None], jax.nn.softmax(score, -1), 0.0)
    return jnp.einsum(
        "rkgs,rskd->rkgd", weight.astype(v.dtype), v, preferred_element_type=jnp.float32
    ).astype(q.dtype)
