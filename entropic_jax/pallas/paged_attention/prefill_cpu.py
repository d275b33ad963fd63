"""Prefill attention on a CPU: the kernel of verification, over blocks of the queries of a row.

Each block is a row of its own to the kernel, so that threads share the queries of one prompt, and every query
has the bits that decoding it gives.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...cpu_runtime import check_prefill
from .cpu import MAX_QUERIES, verify
from .cpu_page import PIECE

MOST_PARTIALS = 1 << 26  # bytes of partial results, which the kernel keeps until a call ends


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
    """Like `cpu.verify`, for any number of queries; see the package for the contract."""
    rows, kv_heads, group, n, head_dim = q.shape
    check_prefill(rows * n)
    blocks = -(-n // MAX_QUERIES)
    padding = blocks * MAX_QUERIES - n
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, padding), (0, 0)))
    q = q.reshape(rows, kv_heads, group, blocks, MAX_QUERIES, head_dim)
    q = jnp.moveaxis(q, 3, 1).reshape(rows * blocks, kv_heads, group, MAX_QUERIES, head_dim)
    first = jnp.pad(window_start, ((0, 0), (0, padding))).reshape(-1, MAX_QUERIES)
    start = (query_start[:, None] + MAX_QUERIES * jnp.arange(blocks, dtype=jnp.int32)).reshape(-1)
    table, end = jnp.repeat(page_table, blocks, 0), jnp.repeat(context_length, blocks, 0)
    lists: tuple[Any, Any] = (None, None)
    if page_list is not None and num_pages is not None:
        lists = jnp.repeat(page_list, blocks, 0), jnp.repeat(num_pages, blocks, 0)

    def attend(operands: Any) -> jax.Array:
        q, table, (listed, number), first, start, end = operands
        return verify(q, keys, values, table, listed, number, first, start, end, soft_cap=soft_cap)

    pieces = -(-page_table.shape[1] * keys.shape[2] // PIECE)
    partials = pieces * kv_heads * MAX_QUERIES * group * (head_dim + 2) * 4  # bytes of a block
    out = in_parts(attend, (q, table, lists, first, start, end), max(1, MOST_PARTIALS // partials))
    out = jnp.moveaxis(out.reshape(rows, blocks, kv_heads, group, MAX_QUERIES, head_dim), 1, 3)
    return out.reshape(rows, kv_heads, group, blocks * MAX_QUERIES, head_dim)[:, :, :, :n]


def in_parts(function: Callable[[Any], jax.Array], operands: Any, size: int) -> jax.Array:
    """A function of rows, called for some of them at a time.

    Args:
        function: The function, of a pytree of arrays `[rows, …]`; its result is `[rows, …]`, too.
        operands: The arrays.
        size: Rows of a call, at most.
    """
    rows = jax.tree.leaves(operands)[0].shape[0]
    if rows <= size:
        return function(operands)
    parts = -(-rows // size)

    def divided(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, parts * size - rows)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(parts, size, *x.shape[1:])

    out = jax.lax.map(function, jax.tree.map(divided, operands))
    return out.reshape(parts * size, *out.shape[2:])[:rows]
