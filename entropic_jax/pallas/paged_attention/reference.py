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
    """
    rows, kv_heads, group, n, head_dim = q.shape
    size = keys.shape[2]
    pages = max(1, CHUNK_POSITIONS // size)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)), constant_values=keys.shape[0] - 1)

    def row(operands):
        q, table, first, query, last = operands
        own = query + jnp.arange(n)

        def chunk(i, carry):
            top, total, out = carry
            page = jax.lax.dynamic_slice_in_dim(table, i * pages, pages)
            position = (i * pages * size + jnp.arange(pages * size)).reshape(pages, 1, 1, 1, size)
            seen = (position <= own[:, None]) & (position >= first[:, None])
            # Slots at or past `last` may hold anything: they must not reach a product as NaN.
            held = (position < last).reshape(pages, 1, size, 1)
            k, v = keys[page], jnp.where(held, values[page], 0)
            score = jnp.einsum("kgnd,pksd->pkgns", q, k, preferred_element_type=jnp.float32)
            score = jnp.where(seen, score, NEGATIVE)
            new = jnp.maximum(top, score.max((0, 4)))
            weight = jnp.exp(score - new[None, ..., None])
            scale = jnp.exp(top - new)
            part = jnp.einsum(
                "pkgns,pksd->kgnd", weight.astype(v.dtype), v, preferred_element_type=jnp.float32
            )
            return new, total * scale + weight.sum((0, 4)), out * scale[..., None] + part

        shape = (kv_heads, group, n)
        start = (jnp.full(shape, NEGATIVE), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
        chunks = jnp.where(last > first.min(), -(-last // (pages * size)), 0)
        _, total, out = jax.lax.fori_loop(first.min() // (pages * size), chunks, chunk, start)
        return (out / jnp.maximum(total, 1e-30)[..., None]).astype(q.dtype)

    return jax.lax.map(row, (q, table, first, query, last))


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
    return jnp.einsum("rkgs,rskd->rkgd", weight.astype(v.dtype), v, preferred_element_type=jnp.float32).astype(
        q.dtype
    )
