"""Observation window: the newest queries of a row and their attention, by which cache entries are ranked."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from ..state.cache import ModelShape
from .policies import LayerQueries


class Window(NamedTuple):
    """The newest queries of one layer, oldest first."""

    q: jax.Array  # [rows, kv_heads, group, window, head_dim], scaled
    num_queries: jax.Array  # int32 [rows], how many of them are valid; the last ones


def empty_window(shape: ModelShape, rows: int, window: int, dtype: jax.typing.DTypeLike) -> Window:
    """A window of `window` queries, none of them valid.

    Args:
        shape: sizes of the model.
        rows: number of rows of the batch.
        window: queries that it holds.
        dtype: the dtype of the queries.
    """
    group = shape.heads // shape.kv_heads
    return Window(
        jnp.zeros((rows, shape.kv_heads, group, window, shape.head_dim), dtype), jnp.zeros(rows, jnp.int32)
    )


def update_window(window: Window, queries: LayerQueries) -> Window:
    """The window after these queries."""
    size = window.q.shape[3]
    num_new = queries.valid.sum(1, dtype=jnp.int32)
    both = jnp.concatenate([window.q, queries.q.astype(window.q.dtype)], 3)
    index = (num_new[:, None] + jnp.arange(size))[:, None, None, :, None]
    return Window(jnp.take_along_axis(both, index, 3), jnp.minimum(window.num_queries + num_new, size))


def window_attention(window: Window, keys: jax.Array, length: jax.Array) -> jax.Array:
    """Exact, causal attention of the window's queries, mean over queries and group.

    Args:
        window: the queries; the newest is at position `length − 1`.
        keys: `[rows, kv_heads, positions, head_dim]`; arbitrary at and after `length`.
        length: int32 `[rows]`, positions held.

    Returns:
        float32 `[rows, kv_heads, positions]`; sums to 1 over positions.
    """
    size, positions = window.q.shape[3], keys.shape[2]

    def per_row(operands):
        q, num_queries, keys, length = operands
        held = jnp.arange(positions) < length
        query_position = length - size + jnp.arange(size)
        valid = jnp.arange(size) >= size - num_queries
        visible = (jnp.arange(positions) <= query_position[:, None]) & valid[:, None]
        keys = jnp.where(held[:, None], keys, 0)  # unused memory may hold NaN
        logits = jnp.einsum("kgwd,ksd->kgws", q, keys, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(visible, logits, -1e30), -1)
        total = jnp.where(visible, weights, 0.0).sum((1, 2))
        return total / (jnp.maximum(num_queries, 1) * q.shape[1]).astype(jnp.float32)

    return jax.lax.map(per_row, (*window, keys, length))


def pool_scores(scores: jax.Array, size: int, kind: Literal["mean", "max"], length: jax.Array) -> jax.Array:
    """Replaces each position's score by the mean or maximum over its neighbourhood.

    Args:
        scores: `[rows, kv_heads, positions]`.
        size: positions of a neighbourhood, odd.
        kind: "mean" or "max". The mean divides by `size` at the ends too, as if zeros followed.
        length: int32 `[rows]`; later positions count as 0.

    Returns:
        `[rows, kv_heads, positions]`.
    """
    inside = jnp.arange(scores.shape[-1]) < length[:, None, None]
    scores = jnp.where(inside, scores, 0.0)
    reduce = {"mean": jax.lax.add, "max": jax.lax.max}[kind]
    out = jax.lax.reduce_window(scores, 0.0, reduce, (1, 1, size), (1, 1, 1), "SAME")
    return out / size if kind == "mean" else out


def keep_newest(scores: jax.Array, num_newest: int, length: jax.Array) -> jax.Array:
    """Sets the scores of the newest positions to +∞, and those at and after `length` to −∞.

    Args:
        scores: float32 `[rows, kv_heads, positions]`.
        num_newest: positions that are kept whatever their score.
        length: int32 `[rows]`, positions that each row holds.
    """
    position = jnp.arange(scores.shape[-1])
    scores = jnp.where(position >= length[:, None, None] - num_newest, jnp.inf, scores)
    return jnp.where(position < length[:, None, None], scores, -jnp.inf)
