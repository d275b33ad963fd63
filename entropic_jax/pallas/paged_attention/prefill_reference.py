"""Prefill attention in plain JAX: many queries per row, to all pages or to listed pages."""

from typing import Any

import jax
import jax.numpy as jnp

from . import quantised
from .quantised import gather
from .reference import CHUNK_POSITIONS, NEGATIVE, PartialAttention, capped, decode

FAR = 2**30  # a position beyond every query


def _of_all(q, keys, values, page_table, window_start, query_start, context_length, soft_cap):
    """Causal attention of several queries per row to all pages, with an online softmax over chunks of pages.

    See the package for the contract. Scores are kept as `[kv_heads, positions, queries]`, so that
    reductions over positions vectorise.
    """
    rows, kv_heads, group, n, head_dim = q.shape
    size, dtype = keys.shape[2], q.dtype
    pages = max(1, CHUNK_POSITIONS // size)
    page_table = jnp.pad(
        page_table, ((0, 0), (0, -page_table.shape[1] % pages)), constant_values=keys.shape[0] - 1
    )
    q = q.reshape(rows, kv_heads, group * n, head_dim).swapaxes(2, 3)

    def row(operands):
        q, page_table, window_start, query_start, context_length = operands
        own_position, first_seen = (jnp.tile(x, group) for x in (query_start + jnp.arange(n), window_start))

        def chunk(i, carry):
            top, total, out = carry
            page = jax.lax.dynamic_slice_in_dim(page_table, i * pages, pages)
            position = i * pages * size + jnp.arange(pages * size)[:, None]
            position = jnp.where(position < context_length, position, FAR)
            place = page * kv_heads + jnp.arange(kv_heads)[:, None]

            def flat(x):
                return gather(quantised.flat(x), place, dtype).reshape(kv_heads, pages * size, head_dim)

            # Slots past the context length may hold NaN, which must not reach a product, nor a query of the
            # padding, whose own position is past them.
            k, v = flat(keys), jnp.where(position < FAR, flat(values), 0)
            score = capped(jnp.matmul(k, q, preferred_element_type=jnp.float32), soft_cap)
            score = jnp.where((position <= own_position) & (position >= first_seen), score, NEGATIVE)
            new = jnp.maximum(top, score.max(1, keepdims=True))
            weight, scale = jnp.exp(score - new), jnp.exp(top - new)
            part = jnp.matmul(v.swapaxes(1, 2), weight.astype(v.dtype), preferred_element_type=jnp.float32)
            return new, total * scale + weight.sum(1, keepdims=True), out * scale + part

        blank = jnp.zeros((kv_heads, 1, group * n))
        start = (blank + NEGATIVE, blank, jnp.zeros((kv_heads, head_dim, group * n)))
        stop = jnp.where(context_length > window_start.min(), -(-context_length // (pages * size)), 0)
        top, total, out = jax.lax.fori_loop(window_start.min() // (pages * size), stop, chunk, start)
        # A query that sees nothing has weighted masked slots only: its maximum is still that of the mask.
        seen = top > NEGATIVE
        total = jnp.maximum(total, 1e-30)
        out = jnp.where(seen, out / total, 0.0)
        return out.swapaxes(1, 2).astype(dtype), jnp.where(seen, top + jnp.log(total), -jnp.inf)

    out, log_sum_exp = jax.lax.map(row, (q, page_table, window_start, query_start, context_length))
    log_sum_exp = log_sum_exp.reshape(rows, kv_heads, group, n)
    return PartialAttention(out.reshape(rows, kv_heads, group, n, head_dim), log_sum_exp)


def prefill(
    q: jax.Array,
    keys: Any,
    values: Any,
    page_table: jax.Array,
    page_list: jax.Array | None,
    num_pages: jax.Array | None,
    window_start: jax.Array,
    query_start: jax.Array,
    context_length: jax.Array,
    *,
    soft_cap: float | None = None,
) -> jax.Array:
    """See the package for the contract."""
    positions = (page_list, num_pages, window_start, query_start, context_length)
    return prefill_partial(q, keys, values, page_table, *positions, soft_cap=soft_cap).out


def prefill_partial(
    q: jax.Array,
    keys: Any,
    values: Any,
    page_table: jax.Array,
    page_list: jax.Array | None,
    num_pages: jax.Array | None,
    window_start: jax.Array,
    query_start: jax.Array,
    context_length: jax.Array,
    *,
    soft_cap: float | None = None,
) -> PartialAttention:
    """See `partial` for the contract."""
    positions = (window_start, query_start, context_length, soft_cap)
    if page_list is None:
        return _of_all(q, keys, values, page_table, *positions)
    return _of_listed(q, keys, values, page_table, page_list, num_pages, *positions)


def verify(
    q: jax.Array,
    keys: Any,
    values: Any,
    page_table: jax.Array,
    page_list: jax.Array | None,
    num_pages: jax.Array | None,
    window_start: jax.Array,
    query_start: jax.Array,
    context_length: jax.Array,
    *,
    soft_cap: float | None = None,
) -> jax.Array:
    """Every query is a row of `decode`. See the package for the contract."""
    rows, _, _, n, _ = q.shape
    each: Any = lambda x: None if x is None else jnp.repeat(x, n, 0)
    end = query_start[:, None] + jnp.arange(1, n + 1, dtype=jnp.int32)
    end = jnp.where(end <= context_length[:, None], end, 0)
    page_list, num_pages = each(page_list), each(num_pages)
    queries = jnp.moveaxis(q, 3, 1).reshape(rows * n, *q.shape[1:3], q.shape[4])
    part = decode(
        queries,
        keys,
        values,
        each(page_table),
        page_list,
        num_pages,
        window_start.reshape(-1),
        end.reshape(-1),
        soft_cap=soft_cap,
    )
    return jnp.moveaxis(part.out.reshape(rows, n, *part.out.shape[1:]), 1, 3)


def _of_listed(
    q, keys, values, page_table, page_list, num_pages, window_start, query_start, context_length, soft_cap
):
    """Causal attention of several queries per row; each (row, KV head) reads only its listed pages."""
    rows, kv_heads, group, n, head_dim = q.shape
    size, dtype = keys.shape[2], q.dtype
    pages = max(1, CHUNK_POSITIONS // size)
    page_list = jnp.pad(page_list, ((0, 0), (0, 0), (0, -page_list.shape[2] % pages)))
    q = q.reshape(rows * kv_heads, group * n, head_dim).swapaxes(1, 2)

    def attend_to_list(operands):
        list_number, q, page_list, num_pages = operands
        row, head = list_number // kv_heads, list_number % kv_heads
        pages_of_row, end = page_table[row], context_length[row]
        own_position, first_seen = (
            jnp.tile(x, group) for x in (query_start[row] + jnp.arange(n), window_start[row])
        )

        def chunk(i, carry):
            top, total, out = carry
            entry = jax.lax.dynamic_slice_in_dim(page_list, i * pages, pages)
            listed = i * pages + jnp.arange(pages) < num_pages
            page = jnp.where(listed, pages_of_row[entry], keys.shape[0] - 1)
            position = entry[:, None] * size + jnp.arange(size)
            position = jnp.where(listed[:, None] & (position < end), position, FAR).reshape(-1, 1)

            def flat(x):
                return gather(quantised.flat(x), page * kv_heads + head, dtype).reshape(-1, head_dim)

            # Slots that are not visible may hold NaN, which must not reach a product.
            k, v = flat(keys), jnp.where(position < FAR, flat(values), 0)
            score = capped(jnp.matmul(k, q, preferred_element_type=jnp.float32), soft_cap)
            score = jnp.where((position <= own_position) & (position >= first_seen), score, NEGATIVE)
            new = jnp.maximum(top, score.max(0, keepdims=True))
            weight, scale = jnp.exp(score - new), jnp.exp(top - new)
            part = jnp.matmul(v.T, weight.astype(v.dtype), preferred_element_type=jnp.float32)
            return new, total * scale + weight.sum(0, keepdims=True), out * scale + part

        blank = jnp.zeros((1, group * n))
        start = (blank + NEGATIVE, blank, jnp.zeros((head_dim, group * n)))
        stop = jnp.where(end > first_seen.min(), -(-num_pages // pages), 0)
        top, total, out = jax.lax.fori_loop(0, stop, chunk, start)
        # A query that sees nothing has weighted masked slots only: its maximum is still that of the mask.
        seen, total = top > NEGATIVE, jnp.maximum(total, 1e-30)
        out = jnp.where(seen, out / total, 0.0)
        return out.T.astype(dtype), jnp.where(seen, top + jnp.log(total), -jnp.inf)[0]

    list_number = jnp.arange(rows * kv_heads)
    out, log_sum_exp = jax.lax.map(
        attend_to_list, (list_number, q, page_list.reshape(rows * kv_heads, -1), num_pages.reshape(-1))
    )
    log_sum_exp = log_sum_exp.reshape(rows, kv_heads, group, n)
    return PartialAttention(out.reshape(rows, kv_heads, group, n, head_dim), log_sum_exp)
