"""The online softmax of decode on a TPU: a chunk of pages in VMEM is taken into it block by block."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .reference import NEGATIVE
from .tpu_tile import joined, product, scaled, tiles_of


class Shape(NamedTuple):
    """The static parameters of the kernel."""

    lists: int
    max_listed: int  # entries of a list
    per_row: int  # lists of a row
    heads: int  # of one list; all are copied together
    page: int
    head_dim: int
    pages: int  # of a chunk
    block: int  # pages
    position_axis: int  # of a tile, see `pools_as_laid_out`
    together: int  # blocks in a step of the softmax while as many are left
    soft_cap: float | None


def attend_chunk(
    shape: Shape, low: Any, high: Any, q: Any, k: Any, v: Any, top: Any, total: Any, sum_of: Any
) -> None:
    """Update the online softmax with positions `low ≤ p < high` of a chunk, block by block.

    Several blocks are taken together while as many are left: a step waits for products that depend on each
    other, however many positions it has.

    Args:
        shape: the static parameters.
        low, high: the first position attended to, in the first page of the chunk, and one past the last.
        q: queries of the list, `[heads, group, head_dim]`.
        k, v: buffers of pages, `[pages, heads, …]`.
        top, total: the largest score and the sum of the weights, `[heads, group, lanes]`.
        sum_of: the weighted sum of the values, `[heads, group, head_dim]`.
    """
    page, positions = shape.page, shape.block * shape.page
    stop = jax.lax.div(high + positions - 1, positions)
    together = shape.together
    rounds = jax.lax.div(stop, together)

    def attend(step, blocks):
        block, start = blocks * shape.block, step * positions
        edge = (start < low) | (start + block * page > high)
        block_pages = pl.ds(step * shape.block, block)

        if v.dtype != jnp.int8:

            @pl.when(edge)
            def _():
                # Zero times a slot outside must not be NaN.
                tiles = tiles_of(v)
                at = start + _positions((block, 1, *tiles.shape[2:]), 0, 2 + shape.position_axis, page)
                seen = (at >= low) & (at < high)
                tiles[block_pages] = jnp.where(seen, tiles[block_pages].astype(jnp.float32), 0.0).astype(
                    tiles.dtype
                )

        for head in range(shape.heads):

            def wide(x, head=head):
                return joined(tiles_of(x)[block_pages, head], shape.position_axis).astype(q.dtype)

            score = product(q[head], wide(k), 1 - shape.position_axis)
            at = start + jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
            seen = (at >= low) & (at < high)
            scale = partial(scaled, seen=seen, start=step * shape.block, pages=block, head=head)
            score = scale(score, k)
            if shape.soft_cap is not None:
                score = shape.soft_cap * jnp.tanh(score / shape.soft_cap)
            score = jnp.where(seen, score, NEGATIVE)
            before = top[head]
            after = jnp.maximum(before, score.max(1, keepdims=True))
            weight = jnp.where(seen, jnp.exp(score - after[:, :1]), 0.0)
            shrink = jnp.exp(before - after)
            top[head] = after
            total[head] = total[head] * shrink + weight.sum(1, keepdims=True)
            part = product(scale(weight, v).astype(q.dtype), wide(v), shape.position_axis)
            sum_of[head] = sum_of[head] * shrink[:, :1] + part

    @pl.loop(0, rounds)
    def _(i):
        attend(i * together, together)

    if together > 1:

        @pl.loop(rounds * together, stop)
        def _(step):
            attend(step, 1)


def _positions(shape, block_axis: int, slot_axis: int, page: int):
    iota = partial(jax.lax.broadcasted_iota, jnp.int32, shape)
    return iota(block_axis) * page + iota(slot_axis)


def normalise(shape: Shape, top: Any, total: Any, sum_of: Any, out: Any, log_sum_exp: Any) -> None:
    """Write the output and the log-sum-exp of a part; that of head h goes to lane h.

    Args:
        shape: the static parameters.
        top, total, sum_of: as in `attend_chunk`.
        out: `[heads, group, head_dim]`, to write to.
        log_sum_exp: `[group, lanes]`, to write to.
    """
    lane = jax.lax.broadcasted_iota(jnp.int32, log_sum_exp.shape, 1)
    logs = jnp.zeros(log_sum_exp.shape, jnp.float32)
    for head in range(shape.heads):
        out[head] = sum_of[head] / total[head][:, :1]
        logs = jnp.where(lane == head, top[head] + jnp.log(total[head]), logs)
    log_sum_exp[...] = logs
