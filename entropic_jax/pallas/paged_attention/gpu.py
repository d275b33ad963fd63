"""Paged attention for decoding on an NVIDIA Hopper GPU (Pallas Mosaic GPU, sm_90a): split-KV.

Each list of pages is split into chunks. A fixed number of thread blocks, one per multiprocessor, processes
the chunks in a round-robin order. The warpgroups of a block are specialised. One producer warpgroup copies
the tiles of listed pages into shared memory (TMA), as far ahead as there are slots. Each consumer warpgroup
takes every other tile of the chunk into an online softmax of its own (wgmma, with the heads of a group padded
to 64 rows, as it waits for memory anyway). The partial results, one per chunk and consumer, are merged
outside of the kernel. Where a chunk ends depends on the shapes alone, so a row has the same bits whatever its
neighbours. Quantised tiles are copied as they are and widened in shared memory by the consumers; their scales
multiply scores and weights.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .gpu_tile import (
    COLUMNS,
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
from .split_kv import merge_partials, work_lists

BLOCKS = 132  # multiprocessors of an H100 or H200
MIN_CHUNK = 512  # positions
MAX_LISTED_CHUNK = 1024  # positions, where most of a list may be empty
FIELDS = 6  # of a chunk, see `_chunks`


class Shape(NamedTuple):
    """The static parameters of the kernel."""

    group: int
    head_dim: int
    page: int
    consumers: int  # warpgroups that compute; one more copies
    slots: int  # tiles of each consumer in shared memory
    kv_heads: int
    soft_cap: float | None
    dtype: Any  # of the tiles in the pools
    interpreted: bool  # whether products and layouts are those of the interpreter


def decode(
    q: jax.Array,
    keys: Any,
    values: Any,
    page_table: jax.Array,
    page_list: jax.Array | None,
    num_pages: jax.Array | None,
    window_start: jax.Array,
    context_length: jax.Array,
    *,
    soft_cap: float | None = None,
    interpret: Any = None,
) -> PartialAttention:
    """See the package for the contract.

    Args:
        soft_cap: if given, scores are soft_cap · tanh(score / soft_cap).
        interpret: parameters of the GPU interpreter, to run on any platform.
    """
    rows, kv_heads, group, head_dim = q.shape
    size = keys.shape[2]
    check(q, keys, values)
    lists = work_lists(page_table, page_list, num_pages, window_start, context_length, size)
    consumers = num_consumers(head_dim)
    fixed = consumers * (ROWS * head_dim * 2 + ROWS * COLUMNS * 4)
    slots = num_tile_slots(keys, consumers, fixed) // consumers
    interpreted = interpret is not None
    shape = Shape(group, head_dim, size, consumers, slots, kv_heads, soft_cap, keys.dtype, interpreted)

    step = max(consumers * TILE, size)
    span = lists.pages.shape[2] * size
    length = max(MIN_CHUNK, span * kv_heads // (2 * BLOCKS))
    length = -(-min(length, MAX_LISTED_CHUNK if page_list is not None else length) // step) * step
    max_chunks = -(-span // length)
    chunks, total, written = _chunks(lists, kv_heads, length // size, max_chunks, size)
    q = q.reshape(rows * kv_heads, group, head_dim)
    q = jnp.pad(q, ((0, 0), (0, -group % 8), (0, 0)))
    out, log_sum_exp = plgpu.kernel(
        partial(_kernel, shape),
        out_type=(
            jax.ShapeDtypeStruct((rows * kv_heads * max_chunks, consumers, group, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((rows * kv_heads * max_chunks, consumers, ROWS), jnp.float32),
        ),
        grid=(BLOCKS if interpret is None else 2,),
        grid_names=("block",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(shape),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_decode",
    )(chunks.reshape(-1), total, lists.pages.reshape(-1), q, *copied_arrays(keys, values))
    parts = (rows, kv_heads, max_chunks * consumers)
    out = out.reshape(*parts, group, head_dim)
    log_sum_exp = log_sum_exp.reshape(*parts, ROWS)[..., :group]
    out, log_sum_exp = merge_partials(out, log_sum_exp, jnp.repeat(written, consumers, 2))
    return PartialAttention(out.astype(q.dtype), log_sum_exp)


def _chunks(lists, kv_heads: int, pages: int, max_chunks: int, size: int):
    """The chunks of all lists, at the start of an array with room for as many as there can be.

    Returns:
        The chunks, int32 `[rows · kv_heads · max_chunks, FIELDS]`; their number, int32 `[1]`; and which
        chunks of each list exist, bool `[rows, kv_heads, max_chunks]`. The fields of a chunk are the number
        of its list; the place of its output; the place of its first page among all lists; its number of
        pages; and the first position attended to and one past the last, within the chunk.
    """
    rows, per_row, entries = lists.pages.shape
    base = jnp.arange(rows * per_row, dtype=jnp.int32).reshape(rows, per_row) * entries
    per_list = lambda x: jnp.broadcast_to(x, (rows, kv_heads)).reshape(-1)
    begin, stop, low, high, base = map(per_list, (lists.begin, lists.stop, lists.low, lists.high, base))
    number = jnp.maximum(-(-(stop - begin) // pages), 0)
    end = jnp.cumsum(number, dtype=jnp.int32)
    output_number = jnp.arange(rows * kv_heads * max_chunks, dtype=jnp.int32)
    list_number = jnp.searchsorted(end, output_number, side="right", method="scan_unrolled").astype(jnp.int32)
    list_number = jnp.minimum(list_number, rows * kv_heads - 1)
    begin, stop, low, high, base, before = (
        x[list_number] for x in (begin, stop, low, high, base, end - number)
    )
    chunk = output_number - before
    start = begin + chunk * pages
    length = jnp.minimum(stop - start, pages)
    low = jnp.where(chunk == 0, low, 0)
    high = (length - 1) * size + jnp.where(start + length == stop, high, size)
    fields = jnp.stack([list_number, chunk + list_number * max_chunks, base + start, length, low, high], 1)
    written = jnp.arange(max_chunks) < number[:, None]
    return fields, end[-1:], written.reshape(rows, kv_heads, max_chunks)


def _scratch(shape: Shape) -> list:
    tiles = shape.consumers * shape.slots
    kept, widened_tiles = tile_buffers(shape, tiles)
    return [
        *kept,
        plgpu.SMEM((shape.consumers, ROWS, shape.head_dim), jnp.bfloat16, transforms=TILED),  # queries
        plgpu.SMEM((shape.consumers, ROWS, COLUMNS), jnp.float32),  # output
        plgpu.SMEM((shape.consumers, ROWS), jnp.float32),  # its log-sum-exp
        plgpu.Barrier(num_arrivals=len(kept) * max(1, TILE // shape.page), num_barriers=tiles),
        plgpu.Barrier(num_barriers=tiles),
        plgpu.Barrier(num_barriers=shape.consumers),
        *widened_tiles,
    ]


def _kernel(shape: Shape, chunks, total, pages, q, *refs):
    num_pools = 4 if quantised(shape) else 2
    pools, (out, log_sum_exp), tiles = (
        refs[:num_pools],
        refs[num_pools : num_pools + 2],
        refs[num_pools + 2 : 2 * num_pools + 2],
    )
    q_tiles, staged, staged_log, full, empty, q_full, *widened_tiles = refs[2 * num_pools + 2 :]
    warpgroup = jax.lax.axis_index("warpgroup")
    block = jax.lax.axis_index("block")
    blocks = jax.lax.axis_size("block")
    num_chunks = jax.lax.div(total[0] - block + blocks - 1, blocks)

    def chunk_of(i):
        return [chunks[(block + i * blocks) * FIELDS + field] for field in range(FIELDS)]

    @pl.when(warpgroup == shape.consumers)
    def _produce():
        plgpu.set_max_registers(40 if shape.consumers == 2 else 24, action="decrease")
        _copy_tiles(shape, num_chunks, chunk_of, pages, pools, tiles, full, empty)

    @pl.when(warpgroup < shape.consumers)
    def _consume():
        plgpu.set_max_registers(232 if shape.consumers == 2 else 240, action="increase")

        def attend_chunk(i, num_steps):
            list_number, output_number, _, _, low, high = chunk_of(i)
            # The padding rows keep what they hold: no row of a product depends on another.
            group_rows = pl.ds(0, q.shape[1])
            plgpu.copy_gmem_to_smem(
                q.at[list_number], q_tiles.at[warpgroup, group_rows], q_full.at[warpgroup]
            )
            _wait(q_full.at[warpgroup])
            buffers = q_tiles.at[warpgroup], tiles, widened_tiles
            num_steps, *softmax = _attend_tiles(shape, warpgroup, low, high, num_steps, buffers, full, empty)
            place = output_number, warpgroup
            _write_result(shape, softmax, place, staged, staged_log, out, log_sum_exp)
            return num_steps

        jax.lax.fori_loop(0, num_chunks, attend_chunk, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def _step_range(shape: Shape, low, high):
    """The steps of a chunk that hold positions `low ≤ p < high`; a step has a tile for each consumer."""
    positions = shape.consumers * TILE
    return jax.lax.div(low, positions), jax.lax.div(high + positions - 1, positions)


def _copy_tiles(shape: Shape, num_chunks, chunk_of, pages, pools, tiles, full, empty):
    """Copy the tiles of all chunks of a thread block, as far ahead as there are slots."""

    def copy_chunk(i, num_steps):
        list_number, _, start, length, low, high = chunk_of(i)
        head = jax.lax.rem(list_number, shape.kv_heads)
        begin, end = _step_range(shape, low, high)

        def step(s, num_steps):
            slot = jax.lax.rem(num_steps, shape.slots)
            for c in range(shape.consumers):
                tile = c * shape.slots + slot

                @pl.when(num_steps >= shape.slots)
                def _(tile=tile):
                    plgpu.barrier_wait(empty.at[tile])

                for page, offset, to in _sources(shape, (s * shape.consumers + c) * TILE, length):
                    size = min(TILE, shape.page)
                    source = (pages[start + page], head, pl.ds(offset, size))
                    target = (tile, pl.ds(to, size))
                    for pool, buffer in zip(pools, tiles, strict=True):
                        plgpu.copy_gmem_to_smem(pool.at[source], buffer.at[target], full.at[tile])
            return num_steps + 1

        return jax.lax.fori_loop(begin, end, step, num_steps)

    num_steps = jax.lax.fori_loop(0, num_chunks, copy_chunk, jnp.int32(0))
    for back in range(shape.slots):
        for c in range(shape.consumers):

            @pl.when(num_steps > back)
            def _(back=back, c=c):
                plgpu.barrier_wait(empty.at[c * shape.slots + jax.lax.rem(num_steps - 1 - back, shape.slots)])


def _attend_tiles(shape: Shape, warpgroup, low, high, num_steps, buffers, full, empty):
    """The online softmax of a consumer over its tiles of a chunk; returns the step count, then its state."""
    query, tiles, widened_tiles = buffers
    begin, end = _step_range(shape, low, high)

    def step(s, state):
        num_steps, *softmax = state
        tile = warpgroup * shape.slots + jax.lax.rem(num_steps, shape.slots)
        _wait(full.at[tile])
        start = (s * shape.consumers + warpgroup) * TILE
        tile_refs = [x.at[tile] for x in tiles], [x.at[warpgroup] for x in widened_tiles]
        softmax = attend(shape, query, *tile_refs, softmax, **_visible(shape, low - start, high - start))
        release_tile(shape, empty.at[tile])
        return num_steps + 1, *softmax

    return jax.lax.fori_loop(begin, end, step, (num_steps, *empty_softmax(shape)))


def _write_result(shape: Shape, softmax, place, staged, staged_log, out, log_sum_exp):
    """Normalise the state of a softmax, and copy it to its place in memory by way of shared memory."""
    top, sum_of, weighted = softmax
    output_number, warpgroup = place
    is_empty = sum_of == 0.0  # false for NaN, which must reach the result
    scale = jnp.where(is_empty, 0.0, 1.0 / sum_of)
    weighted = weighted * jax.lax.broadcast_in_dim(scale, weighted.shape, [0])
    staged_log[warpgroup] = jnp.where(is_empty, -jnp.inf, (top + jnp.log2(sum_of)) / LOG2_E)
    for column in range(0, shape.head_dim, COLUMNS):
        staged[warpgroup] = weighted[:, column : column + COLUMNS]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            staged.at[warpgroup, pl.ds(0, shape.group)],
            out.at[output_number, warpgroup, :, pl.ds(column, COLUMNS)],
        )
        if column == 0:
            plgpu.copy_smem_to_gmem(staged_log.at[warpgroup], log_sum_exp.at[output_number, warpgroup])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _wait(arrival):
    plgpu.barrier_wait(arrival)


def _sources(shape: Shape, start, length):
    """The page, its slot, and the place in the tile, of each copy that fills the tile from `start` on.

    Past the last page of a chunk that page is copied again, as no other page may be read.
    """
    if shape.page >= TILE:
        page = jnp.minimum(jax.lax.div(start, shape.page), length - 1)
        return [(page, jax.lax.rem(start, shape.page), 0)]
    pages = range(TILE // shape.page)
    return [(jnp.minimum(jax.lax.div(start, shape.page) + i, length - 1), 0, i * shape.page) for i in pages]


def _visible(shape: Shape, low, high):
    """Which positions of a tile are attended to: `low ≤ p < high`. The others may hold NaN."""

    def seen(size, axis):
        at = positions(shape, size, axis)
        return (at >= low) & (at < high)

    edge = (low > 0) | (high < TILE)
    return {"seen": seen, "edge": edge, "clear": lambda v: zero_outside(shape, v, seen)}
