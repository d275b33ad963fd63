"""Paged attention of many queries per row in plain JAX: all pages, or those that are listed."""

import jax
import jax.numpy as jnp

from . import quantised
from .quantised import gather
from .reference import CHUNK_POSITIONS, NEGATIVE

FAR = 2**30  # a position that nobody sees


def of_all(q, keys, values, table, first, query, last):
    """Causal attention of several queries per row, with the softmax kept online over chunks of pages.

    q `[rows, kv_heads, group, n, head_dim]`, scaled. Query i of a row stands at position `query + i` and
    sees positions from `first[row, i]` to its own; nothing at or past `last` is read into the result.
    Scores are kept as `[kv_heads, positions, queries]`: reductions over positions then vectorise.
    """
    rows, kv_heads, group, n, head_dim = q.shape
    size, dtype = keys.shape[2], q.dtype
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
            place = page * kv_heads + jnp.arange(kv_heads)[:, None]
            flat = lambda x: gather(quantised.flat(x), place, dtype).reshape(kv_heads, pages * size, head_dim)
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
        return (out / jnp.maximum(total, 1e-30)).swapaxes(1, 2).astype(dtype)

    out = jax.lax.map(row, (q, table, first, query, last))
    return out.reshape(rows, kv_heads, group, n, head_dim)


def prefill(q, keys, values, table, index, count, first, query, last):
    """See the package."""
    if index is not None:
        return of_listed(q, keys, values, table, index, count, first, query, last)
    return of_all(q, keys, values, table, first, query, last)


def of_listed(q, keys, values, table, index, count, first, query, last):
    """The same of listed pages: each (row, KV head) reads its own list, and no more."""
    rows, kv_heads, group, n, head_dim = q.shape
    size, dtype = keys.shape[2], q.dtype
    pages = max(1, CHUNK_POSITIONS // size)
    index = jnp.pad(index, ((0, 0), (0, 0), (0, -index.shape[2] % pages)))
    q = q.reshape(rows * kv_heads, group * n, head_dim).swapaxes(1, 2)

    def one(operands):
        owner, q, index, count = operands
        row, head = owner // kv_heads, owner % kv_heads
        mine, end = table[row], last[row]
        own, first_seen = (jnp.tile(x, group) for x in (query[row] + jnp.arange(n), first[row]))

        def chunk(i, carry):
            top, total, out = carry
            entry = jax.lax.dynamic_slice_in_dim(index, i * pages, pages)
            listed = i * pages + jnp.arange(pages) < count
            page = jnp.where(listed, mine[entry], keys.shape[0] - 1)
            position = entry[:, None] * size + jnp.arange(size)
            position = jnp.where(listed[:, None] & (position < end), position, FAR).reshape(-1, 1)
            flat = lambda x: gather(quantised.flat(x), page * kv_heads + head, dtype).reshape(-1, head_dim)
            # Slots that are not seen may hold anything: they must not reach a product as NaN.
            k, v = flat(keys), jnp.where(position < FAR, flat(values), 0)
            score = jnp.matmul(k, q, preferred_element_type=jnp.float32)
            score = jnp.where((position <= own) & (position >= first_seen), score, NEGATIVE)
            new = jnp.maximum(top, score.max(0, keepdims=True))
            weight, scale = jnp.exp(score - new), jnp.exp(top - new)
            part = jnp.matmul(v.T, weight.astype(v.dtype), preferred_element_type=jnp.float32)
            return new, total * scale + weight.sum(0, keepdims=True), out * scale + part

        blank = jnp.zeros((1, group * n))
        start = (blank + NEGATIVE, blank, jnp.zeros((head_dim, group * n)))
        stop = jnp.where(end > first_seen.min(), -(-count // pages), 0)
        top, total, out = jax.lax.fori_loop(0, stop, chunk, start)
        # A query that has seen nothing has weighed masked slots: its top is still that of a mask.
        out = jnp.where(top > NEGATIVE, out / jnp.maximum(total, 1e-30), 0.0)
        return out.T.astype(dtype)

    owner = jnp.arange(rows * kv_heads)
    out = jax.lax.map(one, (owner, q, index.reshape(rows * kv_heads, -1), count.reshape(-1)))
    return out.reshape(rows, kv_heads, group, n, head_dim)
