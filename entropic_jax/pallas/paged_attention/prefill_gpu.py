"""Causal attention of many queries per row to listed pages, on a Hopper GPU (Pallas Mosaic GPU, sm_90a).

The contract is that of `prefill_tpu`. A thread block takes a block of queries of one KV head, every head of
the group: one warpgroup copies tiles of the listed pages into shared memory (TMA), as far ahead as there are
slots; each of the others takes all of these tiles into the softmax of 64 pairs of a query and a head (wgmma).
A page is read for a block of queries if it is listed and one of them could see a position of it.
"""

import operator
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .gpu_tile import (
    ROWS,
    TILE,
    TILED,
    attend,
    check,
    crews_of,
    leave,
    nothing,
    pools_of,
    positions,
    quantised,
    slots_of,
    tile_buffers,
    zero,
)
from .split import ends_of

FAR = 2**30  # a position that nobody sees
MOST_SLOTS = 8


class Shape(NamedTuple):
    """What is fixed when the kernel is compiled."""

    kv_heads: int
    listed: bool
    per_row: int  # pages of a row
    most: int  # entries of a list
    group: int
    queries: int  # of a block
    blocks: int  # of queries
    page: int
    head_dim: int
    crews: int  # warpgroups that compute
    slots: int  # tiles that are in shared memory or on their way
    soft_cap: float | None
    dtype: Any  # of the tiles in the pools
    plain: bool  # products and layouts as the interpreter knows them


def prefill(
    q, keys, values, table, index, count, first, query, last, *, soft_cap: float | None = None, interpret=None
):
    """See above; `soft_cap` and `interpret` as in `gpu.decode`."""
    rows, kv_heads, group, n, head_dim = q.shape
    check(q[:, :, :, 0], keys, values)
    crews = crews_of(head_dim)
    height = crews * ROWS
    queries = height // group
    blocks = -(-n // queries)
    most = table.shape[1] if index is None else index.shape[2]
    slots = min(slots_of(keys, crews, height * (head_dim * 2 + 2 * 4)), MOST_SLOTS)
    shape = Shape(
        kv_heads,
        index is not None,
        table.shape[1],
        most,
        group,
        queries,
        blocks,
        keys.shape[2],
        head_dim,
        crews,
        slots,
        soft_cap,
        keys.dtype,
        interpret is not None,
    )
    padded = blocks * queries - n
    own = jnp.minimum(query[:, None] + jnp.arange(n), last[:, None] - 1)
    bounds = jnp.stack([first, own], 1).astype(jnp.int32)  # [rows, 2, n]: each query sees what is between
    bounds = jnp.pad(bounds, ((0, 0), (0, 0), (0, padded)), constant_values=-1)
    bounds = _blocked(shape, jnp.repeat(bounds, group, 2), -1).swapaxes(1, 2)  # [rows, blocks, 2, height]
    first = jnp.pad(first, ((0, 0), (0, padded)), mode="edge")
    begin, stop = ends_of(shape, index, count, first, query, last)
    q = jnp.pad(q.swapaxes(2, 3), ((0, 0), (0, 0), (0, padded), (0, 0), (0, 0)))
    q = q.reshape(rows * kv_heads, blocks, queries * group, head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, height - queries * group), (0, 0)))
    entries = jnp.zeros(1, jnp.int32) if index is None else index
    out = plgpu.kernel(
        partial(_kernel, shape),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(rows * kv_heads, blocks),
        grid_names=("list", "block"),
        num_threads=crews + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(shape),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_prefill",
    )(*(x.reshape(-1) for x in (table, entries, begin, stop)), last, bounds, q, *pools_of(keys, values))
    out = out[:, :, : queries * group].reshape(rows, kv_heads, blocks * queries, group, head_dim)
    return out[:, :, :n].swapaxes(2, 3)


def _blocked(shape: Shape, x, value):
    """From `[…, blocks · queries · group]` to `[…, blocks, height]`."""
    used = shape.queries * shape.group
    x = x.reshape(*x.shape[:-1], shape.blocks, used)
    widths = ((0, 0),) * (x.ndim - 1) + ((0, shape.crews * ROWS - used),)
    return jnp.pad(x, widths, constant_values=value)


def _scratch(shape: Shape) -> list:
    kept, wide = tile_buffers(shape, shape.slots)
    return [
        *kept,
        plgpu.SMEM((shape.crews, ROWS, shape.head_dim), jnp.bfloat16, transforms=TILED),  # queries, output
        plgpu.SMEM((shape.crews, 2, ROWS), jnp.int32),  # what they see
        plgpu.Barrier(num_arrivals=len(kept) * max(1, TILE // shape.page), num_barriers=shape.slots),
        plgpu.Barrier(num_arrivals=shape.crews, num_barriers=shape.slots),
        plgpu.Barrier(num_arrivals=2, num_barriers=shape.crews),  # queries are here
        plgpu.Barrier(num_arrivals=shape.crews),  # what is not real is zero
        *wide,
    ]


def _kernel(shape: Shape, table, entries, begin, stop, last, bounds, q, *refs):
    many = 4 if quantised(shape) else 2
    pools, out, tiles = refs[:many], refs[many], refs[many + 1 : 2 * many + 1]
    q_tiles, limits, full, empty, arrived, cleared, *wide = refs[2 * many + 1 :]
    crew = jax.lax.axis_index("warpgroup")
    i, block = jax.lax.axis_index("list"), jax.lax.axis_index("block")
    block = shape.blocks - 1 - block  # the last ones see most: who starts late should be done soon
    row, head = jax.lax.div(i, shape.kv_heads), jax.lax.rem(i, shape.kv_heads)
    low, high = begin[i * shape.blocks + block], stop[i * shape.blocks + block]
    per_tile, per_page = max(1, TILE // shape.page), max(1, shape.page // TILE)
    steps = jax.lax.div(jnp.maximum(high - low, 0) * per_page + per_tile - 1, per_tile)

    def entry(j):
        """Which page of the row the j-th of the list is."""
        return entries[i * shape.most + j] if shape.listed else j

    def sources(s):
        """Place in the list, slot within the page, and place in the tile of each part of a tile."""
        if per_page > 1:
            return [(low + jax.lax.div(s, per_page), jax.lax.rem(s, per_page) * TILE, 0)]
        return [(low + s * per_tile + k, 0, k * shape.page) for k in range(per_tile)]

    @pl.when(crew == shape.crews)
    def _copy():
        plgpu.set_max_registers(40 if shape.crews == 2 else 24, action="decrease")

        @pl.loop(0, steps)
        def _(s):
            slot = jax.lax.rem(s, shape.slots)

            @pl.when(s >= shape.slots)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            for j, offset, to in sources(s):
                # Past the last page that page is copied again: no other may be read.
                page = table[row * shape.per_row + entry(jnp.minimum(j, high - 1))]
                size = min(TILE, shape.page)
                for pool, buffer in zip(pools, tiles, strict=True):
                    part = pool.at[page, head, pl.ds(offset, size)]
                    plgpu.copy_gmem_to_smem(part, buffer.at[slot, pl.ds(to, size)], full.at[slot])

        for back in range(shape.slots):

            @pl.when(steps > back)
            def _(back=back):
                plgpu.barrier_wait(empty.at[jax.lax.rem(steps - 1 - back, shape.slots)])

    @pl.when(crew < shape.crews)
    def _compute():
        plgpu.set_max_registers(232 if shape.crews == 2 else 240, action="increase")
        mine = pl.ds(crew * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(q.at[i, block, mine], q_tiles.at[crew], arrived.at[crew])
        plgpu.copy_gmem_to_smem(bounds.at[row, block, :, mine], limits.at[crew], arrived.at[crew])
        _await(arrived.at[crew])
        of_rows = plgpu.Layout.WGMMA.reduce(1)
        since, own = (
            limits[crew, k] if shape.plain else plgpu.load(limits.at[crew, k], (), layout=of_rows)
            for k in range(2)
        )
        end = last[row]

        def step(s, softmax):
            slot = jax.lax.rem(s, shape.slots)
            # Of each part of the tile, the position of its first slot were it at the tile's.
            starts = [
                jnp.where(j < high, entry(jnp.minimum(j, high - 1)) * shape.page, FAR) + offset - to
                for j, offset, to in sources(s)
            ]

            def position(size, axis):
                place = positions(shape, size, axis)
                at = place + starts[0]
                for k, start in enumerate(starts[1:], 1):
                    at = jnp.where(place >= k * shape.page, place + start, at)
                return at

            def seen(size, axis):
                at = position(size, axis)
                over = lambda x: jax.lax.broadcast_in_dim(x, size, [0])
                return (at >= over(since)) & (at <= over(own))

            def clear(v):
                held = lambda size, axis: position(size, axis) < end
                if wide:  # a tile of the crew's own
                    zero(shape, v, held)
                else:  # one that all crews read
                    pl.when(crew == 0)(lambda: zero(shape, v, held))
                    _meet(cleared)

            ends = [start + (k + 1) * min(TILE, shape.page) for k, start in enumerate(starts)]
            edge = reduce(operator.or_, [x > end for x in ends])
            here = [x.at[slot] for x in tiles], [x.at[crew] for x in wide]
            _await(full.at[slot])
            softmax = attend(shape, q_tiles.at[crew], *here, softmax, seen=seen, edge=edge, clear=clear)
            leave(shape, empty.at[slot])
            return tuple(softmax)

        _, total, weighted = jax.lax.fori_loop(0, steps, step, nothing(shape))
        some = total == 0.0  # false for NaN: it must reach the result
        scale = jnp.where(some, 0.0, 1.0 / total)
        weighted = weighted * jax.lax.broadcast_in_dim(scale, weighted.shape, [0])
        q_tiles[crew] = weighted.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_tiles.at[crew], out.at[i, block, mine])
        plgpu.wait_smem_to_gmem(0)


def _await(arrival):
    plgpu.barrier_wait(arrival)


def _meet(barrier):
    """Go on when every crew has come here."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
