"""Prefill attention on an NVIDIA Hopper GPU (Pallas Mosaic GPU, sm_90a): warp-specialised.

The contract is that of `prefill` in the package's docstring. A thread block computes a block of queries of
one KV head, with all heads of the group. One producer warpgroup copies tiles of the listed pages into shared
memory (TMA), as far ahead as there are slots; each consumer warpgroup takes all of these tiles into the
online softmax of 64 pairs of a query and a head (wgmma). A page is read for a block of queries if it is
listed and one of the queries could see a position of it.
"""

import operator
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .gpu_tile import (
    LOG2_E,
    ROWS,
    TILE,
    TILED,
    attend,
    check,
    copied_arrays,
    empty_softmax,
    num_consumers,
    num_tile_slots,
    positions,
    quantised,
    release_tile,
    tile_buffers,
    zero_outside,
)
from .reference import PartialAttention
from .split_kv import PrefillShape, entry_ranges

FAR = 2**30  # a position beyond every query
MOST_SLOTS = 8


@dataclass(frozen=True, kw_only=True)
class Shape(PrefillShape):
    """The static parameters of the kernel."""

    consumers: int  # warpgroups that compute; one more copies
    slots: int  # tiles in shared memory
    dtype: Any  # of the tiles in the pools
    partial: bool  # whether the log-sum-exp is an output
    interpreted: bool  # whether products and layouts are those of the interpreter


class QueryBlock(NamedTuple):
    """A block of queries of one list, and the entries of that list that it reads."""

    list_number: Any
    block: Any
    row: Any
    head: Any
    low: Any  # the first entry
    high: Any  # one past the last
    steps: Any  # tiles


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
    interpret: Any = None,
) -> jax.Array:
    """The contract is in the package's docstring; `soft_cap` and `interpret` as in `gpu.decode`.

    Args:
        soft_cap: if given, scores are soft_cap · tanh(score / soft_cap).
        interpret: parameters of the GPU interpreter, to run on any platform.
    """
    lists, positions = (page_list, num_pages), (window_start, query_start, context_length)
    return _prefill(q, keys, values, page_table, lists, positions, soft_cap, interpret, False)[0]


def prefill_partial(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    page_table: jax.Array,
    page_list: jax.Array | None,
    num_pages: jax.Array | None,
    window_start: jax.Array,
    query_start: jax.Array,
    context_length: jax.Array,
    *,
    soft_cap: float | None = None,
    interpret: Any = None,
) -> PartialAttention:
    """`prefill` with its log-sum-exp; arguments as there.

    Args:
        soft_cap: if given, scores are soft_cap · tanh(score / soft_cap).
        interpret: parameters of the GPU interpreter, to run on any platform.
    """
    lists, positions = (page_list, num_pages), (window_start, query_start, context_length)
    return PartialAttention(
        *_prefill(q, keys, values, page_table, lists, positions, soft_cap, interpret, True)
    )


def _prefill(q, keys, values, page_table, lists, positions, soft_cap, interpret, partial_) -> Any:
    """The output, and with `partial_` the log-sum-exp."""
    (page_list, num_pages), (window_start, query_start, context_length) = lists, positions
    rows, kv_heads, group, n, head_dim = q.shape
    check(q[:, :, :, 0], keys, values)
    consumers = num_consumers(head_dim)
    height = consumers * ROWS
    queries = height // group
    blocks = -(-n // queries)
    max_listed = page_table.shape[1] if page_list is None else page_list.shape[2]
    slots = min(num_tile_slots(keys, consumers, height * (head_dim * 2 + 2 * 4)), MOST_SLOTS)
    shape = Shape(
        kv_heads=kv_heads,
        listed=page_list is not None,
        per_row=page_table.shape[1],
        max_listed=max_listed,
        group=group,
        queries=queries,
        blocks=blocks,
        page=keys.shape[2],
        head_dim=head_dim,
        soft_cap=soft_cap,
        consumers=consumers,
        slots=slots,
        dtype=keys.dtype,
        partial=partial_,
        interpreted=interpret is not None,
    )
    padded = blocks * queries - n
    own_position = jnp.minimum(query_start[:, None] + jnp.arange(n), context_length[:, None] - 1)
    bounds = jnp.stack([window_start, own_position], 1).astype(
        jnp.int32
    )  # [rows, 2, n]: what each query sees is between
    bounds = jnp.pad(bounds, ((0, 0), (0, 0), (0, padded)), constant_values=-1)
    bounds = _blocked(shape, jnp.repeat(bounds, group, 2), -1).swapaxes(1, 2)  # [rows, blocks, 2, height]
    window_start = jnp.pad(window_start, ((0, 0), (0, padded)), mode="edge")
    begin, stop = entry_ranges(shape, page_list, num_pages, window_start, query_start, context_length)
    q = jnp.pad(q.swapaxes(2, 3), ((0, 0), (0, 0), (0, padded), (0, 0), (0, 0)))
    q = q.reshape(rows * kv_heads, blocks, queries * group, head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, height - queries * group), (0, 0)))
    entries = jnp.zeros(1, jnp.int32) if page_list is None else page_list
    outputs = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    outputs += [jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32)] * shape.partial
    out = plgpu.kernel(
        partial(_kernel, shape),
        out_type=tuple(outputs),
        grid=(rows * kv_heads, blocks),
        grid_names=("list", "block"),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(shape),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_prefill",
    )(
        *(x.reshape(-1) for x in (page_table, entries, begin, stop)),
        context_length,
        bounds,
        q,
        *copied_arrays(keys, values),
    )

    def by_head(x):
        x = x[:, :, : queries * group].reshape(rows, kv_heads, blocks * queries, group, *x.shape[3:])
        return x[:, :, :n].swapaxes(2, 3)

    return [by_head(x) for x in out]


def _blocked(shape: Shape, x, value):
    """Reshapes `[…, blocks · queries · group]` to `[…, blocks, height]`."""
    used = shape.queries * shape.group
    x = x.reshape(*x.shape[:-1], shape.blocks, used)
    widths = ((0, 0),) * (x.ndim - 1) + ((0, shape.consumers * ROWS - used),)
    return jnp.pad(x, widths, constant_values=value)


def _scratch(shape: Shape) -> list:
    stored_tiles, widened_tiles = tile_buffers(shape, shape.slots)
    return [
        *stored_tiles,
        plgpu.SMEM(
            (shape.consumers, ROWS, shape.head_dim), jnp.bfloat16, transforms=TILED
        ),  # queries, output
        plgpu.SMEM((shape.consumers, 2, ROWS), jnp.int32),  # their windows
        plgpu.Barrier(num_arrivals=len(stored_tiles) * max(1, TILE // shape.page), num_barriers=shape.slots),
        plgpu.Barrier(num_arrivals=shape.consumers, num_barriers=shape.slots),
        plgpu.Barrier(num_arrivals=2, num_barriers=shape.consumers),  # the queries are copied
        plgpu.Barrier(num_arrivals=shape.consumers),  # slots past the context are zero
        *([plgpu.SMEM((shape.consumers, ROWS), jnp.float32)] * shape.partial),  # log-sum-exps
        *widened_tiles,
    ]


def _kernel(shape: Shape, page_table, entries, begin, stop, context_length, bounds, q, *refs):
    num_pools = 4 if quantised(shape) else 2
    pools, (out, *logs), refs = _parted(refs, num_pools, 1 + shape.partial)
    tiles, (q_tiles, limits, full, empty, queries_copied, cleared), refs = _parted(refs, num_pools, 6)
    staged_logs, widened_tiles = refs[: len(logs)], refs[len(logs) :]
    warpgroup = jax.lax.axis_index("warpgroup")
    i, block = jax.lax.axis_index("list"), jax.lax.axis_index("block")
    block = shape.blocks - 1 - block  # the last blocks see most, and start first
    row, head = jax.lax.div(i, shape.kv_heads), jax.lax.rem(i, shape.kv_heads)
    low, high = begin[i * shape.blocks + block], stop[i * shape.blocks + block]
    per_tile, per_page = max(1, TILE // shape.page), max(1, shape.page // TILE)
    steps = jax.lax.div(jnp.maximum(high - low, 0) * per_page + per_tile - 1, per_tile)
    work = QueryBlock(i, block, row, head, low, high, steps)

    @pl.when(warpgroup == shape.consumers)
    def _produce():
        plgpu.set_max_registers(40 if shape.consumers == 2 else 24, action="decrease")
        _copy_tiles(shape, work, page_table, entries, pools, tiles, full, empty)

    @pl.when(warpgroup < shape.consumers)
    def _consume():
        plgpu.set_max_registers(232 if shape.consumers == 2 else 240, action="increase")
        group_rows = pl.ds(warpgroup * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(
            q.at[i, block, group_rows], q_tiles.at[warpgroup], queries_copied.at[warpgroup]
        )
        plgpu.copy_gmem_to_smem(
            bounds.at[row, block, :, group_rows], limits.at[warpgroup], queries_copied.at[warpgroup]
        )
        _wait(queries_copied.at[warpgroup])
        of_rows = plgpu.Layout.WGMMA.reduce(1)
        since, own_position = (
            limits[warpgroup, k]
            if shape.interpreted
            else plgpu.load(limits.at[warpgroup, k], (), layout=of_rows)
            for k in range(2)
        )
        window = since, own_position, context_length[row]
        buffers = q_tiles.at[warpgroup], tiles, [x.at[warpgroup] for x in widened_tiles]
        top, total, weighted = _attend_tiles(
            shape, work, entries, window, buffers, full, empty, cleared, warpgroup
        )
        is_empty = total == 0.0  # false for NaN, which must reach the result
        scale = jnp.where(is_empty, 0.0, 1.0 / total)
        weighted = weighted * jax.lax.broadcast_in_dim(scale, weighted.shape, [0])
        q_tiles[warpgroup] = weighted.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_tiles.at[warpgroup], out.at[i, block, group_rows])
        for staged, to in zip(staged_logs, logs, strict=True):
            staged[warpgroup] = jnp.where(is_empty, -jnp.inf, (top + jnp.log2(total)) / LOG2_E)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged.at[warpgroup], to.at[i, block, group_rows])
        plgpu.wait_smem_to_gmem(0)


def _parted(refs, first, second):
    """The first references, the next ones, and the rest."""
    return refs[:first], refs[first : first + second], refs[first + second :]


def _entry(shape: Shape, work: QueryBlock, entries, j):
    """The page of the row that entry j of its list stands for."""
    return entries[work.list_number * shape.max_listed + j] if shape.listed else j


def _sources(shape: Shape, work: QueryBlock, s):
    """The entry of the list, the slot of its page, and the place in the tile, of each part of tile s."""
    per_tile, per_page = max(1, TILE // shape.page), max(1, shape.page // TILE)
    if per_page > 1:
        return [(work.low + jax.lax.div(s, per_page), jax.lax.rem(s, per_page) * TILE, 0)]
    return [(work.low + s * per_tile + k, 0, k * shape.page) for k in range(per_tile)]


def _copy_tiles(shape: Shape, work: QueryBlock, page_table, entries, pools, tiles, full, empty):
    """Copy the tiles of the list into shared memory, as far ahead as there are slots."""

    @pl.loop(0, work.steps)
    def _(s):
        slot = jax.lax.rem(s, shape.slots)

        @pl.when(s >= shape.slots)
        def _():
            plgpu.barrier_wait(empty.at[slot])

        for j, offset, to in _sources(shape, work, s):
            # Past the last page that page is copied again, as no other page may be read.
            page = page_table[
                work.row * shape.per_row + _entry(shape, work, entries, jnp.minimum(j, work.high - 1))
            ]
            size = min(TILE, shape.page)
            for pool, buffer in zip(pools, tiles, strict=True):
                part = pool.at[page, work.head, pl.ds(offset, size)]
                plgpu.copy_gmem_to_smem(part, buffer.at[slot, pl.ds(to, size)], full.at[slot])

    for back in range(shape.slots):

        @pl.when(work.steps > back)
        def _(back=back):
            plgpu.barrier_wait(empty.at[jax.lax.rem(work.steps - 1 - back, shape.slots)])


def _attend_tiles(shape: Shape, work: QueryBlock, entries, window, buffers, full, empty, cleared, warpgroup):
    """The online softmax of a consumer over all tiles of the list."""
    since, own_position, end = window
    query, tiles, widened_tiles = buffers

    def step(s, softmax):
        slot = jax.lax.rem(s, shape.slots)
        # For each part of the tile, the position that the tile's first slot would have.
        starts = [
            jnp.where(
                j < work.high, _entry(shape, work, entries, jnp.minimum(j, work.high - 1)) * shape.page, FAR
            )
            + offset
            - to
            for j, offset, to in _sources(shape, work, s)
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
            return (at >= over(since)) & (at <= over(own_position))

        def clear(v):
            written = lambda size, axis: position(size, axis) < end
            if widened_tiles:  # a tile of this consumer alone
                zero_outside(shape, v, written)
            else:  # a tile that all consumers read
                pl.when(warpgroup == 0)(lambda: zero_outside(shape, v, written))
                _arrive_and_wait(cleared)

        ends = [start + (k + 1) * min(TILE, shape.page) for k, start in enumerate(starts)]
        edge = reduce(operator.or_, [x > end for x in ends])
        _wait(full.at[slot])
        tile_refs = [x.at[slot] for x in tiles], widened_tiles
        softmax = attend(shape, query, *tile_refs, softmax, seen=seen, edge=edge, clear=clear)
        release_tile(shape, empty.at[slot])
        return tuple(softmax)

    return jax.lax.fori_loop(0, work.steps, step, empty_softmax(shape))


def _wait(arrival):
    plgpu.barrier_wait(arrival)


def _arrive_and_wait(barrier):
    """Wait until every consumer has arrived."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
