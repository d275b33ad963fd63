"""The newest queries of a row, and what they attend to: the window through which entries are ranked."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..cache import ModelShape
from .method import Scene


class Window(NamedTuple):
    """The newest queries that a layer has seen, oldest first."""

    q: jax.Array  # [rows, kv_heads, group, window, head_dim], scaled
    seen: jax.Array  # int32 [rows], how many of them are real


def empty(shape: ModelShape, rows: int, window: int, dtype) -> Window:
    """No queries yet."""
    group = shape.heads // shape.kv_heads
    return Window(
        jnp.zeros((rows, shape.kv_heads, group, window, shape.head_dim), dtype), jnp.zeros(rows, jnp.int32)
    )


def slide(window: Window, scene: Scene) -> Window:
    """The window after the queries of the scene."""
    size = window.q.shape[3]
    count = scene.asked.sum(1, dtype=jnp.int32)
    both = jnp.concatenate([window.q, scene.q.astype(window.q.dtype)], 3)
    take = (count[:, None] + jnp.arange(size))[:, None, None, :, None]
    return Window(jnp.take_along_axis(both, take, 3), jnp.minimum(window.seen + count, size))


def attention(window: Window, keys: jax.Array, length: jax.Array) -> jax.Array:
    """What the queries of the window attend to, float32 `[rows, kv_heads, positions]`.

    keys `[rows, kv_heads, positions, head_dim]`, of which `length` `[rows]` are held; the newest query stands
    at `length − 1`. The mean over queries and group of exact, causal attention: sums to 1.
    """
    size, positions = window.q.shape[3], keys.shape[2]

    def row(operands):
        q, seen, keys, length = operands
        held = jnp.arange(positions) < length
        own = length - size + jnp.arange(size)
        visible = (jnp.arange(positions) <= own[:, None]) & (jnp.arange(size) >= size - seen)[:, None]
        keys = jnp.where(held[:, None], keys, 0)  # what is not held may be anything
        score = jnp.einsum("kgwd,ksd->kgws", q, keys, preferred_element_type=jnp.float32)
        share = jax.nn.softmax(jnp.where(visible, score, -1e30), -1)
        share = jnp.where(visible, share, 0.0).sum((1, 2))
        return share / (jnp.maximum(seen, 1) * q.shape[1]).astype(jnp.float32)

    return jax.lax.map(row, (*window, keys, length))


def pooled(score: jax.Array, size: int, kind: str, length: jax.Array) -> jax.Array:
    """Each position's `mean` or `max` over the `size` (odd) positions around it, of those before `length`.

    The mean divides by `size` at the ends, too, as if zeros followed.
    """
    inside = jnp.arange(score.shape[-1]) < length[:, None, None]
    score = jnp.where(inside, score, 0.0)
    reduce = {"mean": jax.lax.add, "max": jax.lax.max}[kind]
    out = jax.lax.reduce_window(score, 0.0, reduce, (1, 1, size), (1, 1, 1), "SAME")
    return out / size if kind == "mean" else out


def newest(score: jax.Array, count: int, length: jax.Array) -> jax.Array:
    """The score with that of the `count` newest positions at +∞ and that of positions not held at −∞."""
    position = jnp.arange(score.shape[-1])
    score = jnp.where(position >= length[:, None, None] - count, jnp.inf, score)
    return jnp.where(position < length[:, None, None], score, -jnp.inf)
