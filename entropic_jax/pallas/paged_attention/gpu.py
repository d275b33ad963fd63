"""Paged attention on an NVIDIA Hopper GPU (Pallas Mosaic GPU, sm_90a).

A list of pages is cut into chunks; a fixed crew of thread blocks, one per multiprocessor, takes them in
turn. In a block one warpgroup does nothing but copy tiles of listed pages into shared memory (TMA), as far
ahead as there are slots; the others each take every other tile of the chunk into a softmax of their own
(wgmma, the heads of a group padded to 64 rows: it waits for memory all the same). Their results, one per
chunk and warpgroup, are merged outside. Where a chunk ends depends on the shapes alone, so a row has the
same bits whatever its neighbours. Tiles of 8 bits are copied as they are and widened by whoever
computes, in shared memory; scales multiply scores and weights.
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
from .reference import Partial
from .split import lists_of, merge

BLOCKS = 132  # multiprocessors of an H100 or H200
CHUNK = 512  # positions, at least
LISTED_CHUNK = 1024  # positions, at most, where most of a list may be empty
FIELDS = 6  # of a chunk: see `_chunks`


class Shape(NamedTuple):
    """What is fixed when the kernel is compiled."""

    group: int
    head_dim: int
    page: int
    crews: int  # warpgroups that compute
    slots: int  # tiles of each that are in shared memory or on their way
    kv_heads: int
    soft_cap: float | None
    dtype: Any  # of the tiles in the pools
    plain: bool  # products and layouts as the interpreter knows them


def decode(
    q, keys, values, table, index, count, first, last, *, soft_cap: float | None = None, interpret=None
) -> Partial:
    """See the package; scores are `soft_cap · tanh(score / soft_cap)` where that is given.

    `interpret`: parameters of the GPU interpreter, to run on any platform.
    """
    rows, kv_heads, group, head_dim = q.shape
    size = keys.shape[2]
    check(q, keys, values)
    lists = lists_of(table, index, count, first, last, size)
    crews = crews_of(head_dim)
    fixed = crews * (ROWS * head_dim * 2 + ROWS * COLUMNS * 4)
    slots = slots_of(keys, crews, fixed) // crews
    plain = interpret is not None
    shape = Shape(group, head_dim, size, crews, slots, kv_heads, soft_cap, keys.dtype, plain)

    step = max(crews * TILE, size)
    span = lists.pages.shape[2] * size
    length = max(CHUNK, span * kv_heads // (2 * BLOCKS))
    length = -(-min(length, LISTED_CHUNK if index is not None else length) // step) * step
    most = -(-span // length)
    chunks, total, held = _chunks(lists, kv_heads, length // size, most, size)
    q = q.reshape(rows * kv_heads, group, head_dim)
    q = jnp.pad(q, ((0, 0), (0, -group % 8), (0, 0)))
    out, log_sum = plgpu.kernel(
        partial(_kernel, shape),
        out_type=(
            jax.ShapeDtypeStruct((rows * kv_heads * most, crews, group, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((rows * kv_heads * most, crews, ROWS), jnp.float32),
        ),
        grid=(BLOCKS if interpret is None else 2,),
        grid_names=("block",),
        num_threads=crews + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(shape),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_decode",
    )(chunks.reshape(-1), total, lists.pages.reshape(-1), q, *pools_of(keys, values))
    parts = (rows, kv_heads, most * crews)
    out = out.reshape(*parts, group, head_dim)
    log_sum = log_sum.reshape(*parts, ROWS)[..., :group]
    out, log_sum = merge(out, log_sum, jnp.repeat(held, crews, 2))
    return Partial(out.astype(q.dtype), log_sum)


def _chunks(lists, kv_heads: int, pages: int, most: int, size: int):
    """The chunks that there are, first in an array of all that there could be.

    Returns int32 `[rows · kv_heads · most, FIELDS]`, their number int32 `[1]`, which of `most` a list has.
    The fields: row and KV head; number within the list; place of its first page among all lists; pages; first
    and one past the last position attended to, within the chunk.
    """
    rows, per_row, entries = lists.pages.shape
    base = jnp.arange(rows * per_row, dtype=jnp.int32).reshape(rows, per_row) * entries
    every = lambda x: jnp.broadcast_to(x, (rows, kv_heads)).reshape(-1)
    begin, stop, low, high, base = map(every, (lists.begin, lists.stop, lists.low, lists.high, base))
    number = jnp.maximum(-(-(stop - begin) // pages), 0)
    end = jnp.cumsum(number, dtype=jnp.int32)
    place = jnp.arange(rows * kv_heads * most, dtype=jnp.int32)
    owner = jnp.searchsorted(end, place, side="right", method="scan_unrolled").astype(jnp.int32)
    owner = jnp.minimum(owner, rows * kv_heads - 1)
    begin, stop, low, high, base, before = (x[owner] for x in (begin, stop, low, high, base, end - number))
    chunk = place - before
    start = begin + chunk * pages
    length = jnp.minimum(stop - start, pages)
    low = jnp.where(chunk == 0, low, 0)
    high = (length - 1) * size + jnp.where(start + length == stop, high, size)
    fields = jnp.stack([owner, chunk + owner * most, base + start, length, low, high], 1)
    held = jnp.arange(most) < number[:, None]
    return fields, end[-1:], held.reshape(rows, kv_heads, most)


def _scratch(shape: Shape) -> list:
    tiles = shape.crews * shape.slots
    kept, wide = tile_buffers(shape, tiles)
    return [
        *kept,
        plgpu.SMEM((shape.crews, ROWS, shape.head_dim), jnp.bfloat16, transforms=TILED),  # queries
        plgpu.SMEM((shape.crews, ROWS, COLUMNS), jnp.float32),  # output
        plgpu.SMEM((shape.crews, ROWS), jnp.float32),  # its log_sum
        plgpu.Barrier(num_arrivals=len(kept) * max(1, TILE // shape.page), num_barriers=tiles),
        plgpu.Barrier(num_barriers=tiles),
        plgpu.Barrier(num_barriers=shape.crews),
        *wide,
    ]


def _kernel(shape: Shape, chunks, total, pages, q, *refs):
    many = 4 if quantised(shape) else 2
    pools, (out, log_sum), tiles = refs[:many], refs[many : many + 2], refs[many + 2 : 2 * many + 2]
    q_tiles, staged, staged_log, full, empty, q_full, *wide = refs[2 * many + 2 :]
    crew = jax.lax.axis_index("warpgroup")
    block = jax.lax.axis_index("block")
    blocks = jax.lax.axis_size("block")
    mine = jax.lax.div(total[0] - block + blocks - 1, blocks)
    chunk_of = lambda i: [chunks[(block + i * blocks) * FIELDS + field] for field in range(FIELDS)]
    positions = shape.crews * TILE  # of a step: one tile for each crew

    def steps_of(low, high):
        return jax.lax.div(low, positions), jax.lax.div(high + positions - 1, positions)

    @pl.when(crew == shape.crews)
    def _copy():
        plgpu.set_max_registers(40 if shape.crews == 2 else 24, action="decrease")

        def take(i, done):
            owner, _, start, length, low, high = chunk_of(i)
            head = jax.lax.rem(owner, shape.kv_heads)
            begin, end = steps_of(low, high)

            def step(s, done):
                slot = jax.lax.rem(done, shape.slots)
                for c in range(shape.crews):
                    tile = c * shape.slots + slot

                    @pl.when(done >= shape.slots)
                    def _(tile=tile):
                        plgpu.barrier_wait(empty.at[tile])

                    for page, offset, to in _sources(shape, (s * shape.crews + c) * TILE, length):
                        size = min(TILE, shape.page)
                        source = (pages[start + page], head, pl.ds(offset, size))
                        target = (tile, pl.ds(to, size))
                        for pool, buffer in zip(pools, tiles, strict=True):
                            plgpu.copy_gmem_to_smem(pool.at[source], buffer.at[target], full.at[tile])
                return done + 1

            return jax.lax.fori_loop(begin, end, step, done)

        done = jax.lax.fori_loop(0, mine, take, jnp.int32(0))
        for back in range(shape.slots):
            for c in range(shape.crews):

                @pl.when(done > back)
                def _(back=back, c=c):
                    plgpu.barrier_wait(empty.at[c * shape.slots + jax.lax.rem(done - 1 - back, shape.slots)])

    @pl.when(crew < shape.crews)
    def _compute():
        plgpu.set_max_registers(232 if shape.crews == 2 else 240, action="increase")
        query = q_tiles.at[crew]

        def take(i, done):
            owner, place, _, _, low, high = chunk_of(i)
            # The other rows stay as they are: no row of a product depends on another.
            some = pl.ds(0, q.shape[1])
            plgpu.copy_gmem_to_smem(q.at[owner], q_tiles.at[crew, some], q_full.at[crew])
            _await(q_full.at[crew])
            begin, end = steps_of(low, high)

            def step(s, state):
                done, *softmax = state
                tile = crew * shape.slots + jax.lax.rem(done, shape.slots)
                _await(full.at[tile])
                start = (s * shape.crews + crew) * TILE
                here = [x.at[tile] for x in tiles], [x.at[crew] for x in wide]
                softmax = attend(shape, query, *here, softmax, **_between(shape, low - start, high - start))
                leave(shape, empty.at[tile])
                return done + 1, *softmax

            done, top, sum_of, weighted = jax.lax.fori_loop(begin, end, step, (done, *nothing(shape)))
            some = sum_of == 0.0  # false for NaN: it must reach the result
            scale = jnp.where(some, 0.0, 1.0 / sum_of)
            weighted = weighted * jax.lax.broadcast_in_dim(scale, weighted.shape, [0])
            staged_log[crew] = jnp.where(some, -jnp.inf, (top + jnp.log2(sum_of)) / LOG2_E)
            for column in range(0, shape.head_dim, COLUMNS):
                staged[crew] = weighted[:, column : column + COLUMNS]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    staged.at[crew, pl.ds(0, shape.group)], out.at[place, crew, :, pl.ds(column, COLUMNS)]
                )
                if column == 0:
                    plgpu.copy_smem_to_gmem(staged_log.at[crew], log_sum.at[place, crew])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return done

        jax.lax.fori_loop(0, mine, take, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def _await(arrival):
    plgpu.barrier_wait(arrival)


def _sources(shape: Shape, start, length):
    """Page, slot within it and place in the tile of each copy that fills the tile from `start` on.

    Past the last page of a chunk that page is copied again: no other may be read.
    """
    if shape.page >= TILE:
        page = jnp.minimum(jax.lax.div(start, shape.page), length - 1)
        return [(page, jax.lax.rem(start, shape.page), 0)]
    pages = range(TILE // shape.page)
    return [(jnp.minimum(jax.lax.div(start, shape.page) + i, length - 1), 0, i * shape.page) for i in pages]


def _between(shape: Shape, low, high):
    """Of a tile, which positions are attended to: `low ≤ p < high`; the others may hold NaN."""

    def seen(size, axis):
        at = positions(shape, size, axis)
        return (at >= low) & (at < high)

    edge = (low > 0) | (high < TILE)
    return {"seen": seen, "edge": edge, "clear": lambda v: zero(shape, v, seen)}
