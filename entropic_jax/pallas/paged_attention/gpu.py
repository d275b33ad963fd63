"""Paged attention on an NVIDIA Hopper GPU (Pallas Mosaic GPU, sm_90a).

A list of pages is cut into chunks; a fixed crew of thread blocks, one per multiprocessor, takes them in
turn. In a block one warpgroup does nothing but copy tiles of listed pages into shared memory (TMA), as far
ahead as there are slots; the others each take every other tile of the chunk into a softmax of their own
(wgmma, the heads of a group padded to 64 rows: it waits for memory all the same). Their results, one per
chunk and warpgroup, are merged outside. Where a chunk ends depends on the shapes alone, so a row has the
same bits whatever its neighbours.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .reference import NEGATIVE, Partial
from .split import lists_of, merge

BLOCKS = 132  # multiprocessors of an H100 or H200
TILE = 64  # positions that are copied at once, K and V
ROWS = 64  # of a wgmma; the heads of a group are as many or fewer
CHUNK = 512  # positions, at least
LISTED_CHUNK = 1024  # positions, at most, where most of a list may be empty
SHARED_BYTES = 200 * 1024  # of a thread block, of the 227 KiB that there are
LOG2_E = math.log2(math.e)
COLUMNS = 64  # that are changed or on their way out of shared memory at once
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
    plain: bool  # products and layouts as the interpreter knows them


def decode(
    q, keys, values, table, index, count, first, last, *, soft_cap: float | None = None, interpret=None
) -> Partial:
    """See the package; scores are `soft_cap · tanh(score / soft_cap)` where that is given.

    `interpret`: parameters of the GPU interpreter, to run on any platform.
    """
    rows, kv_heads, group, head_dim = q.shape
    size = keys.shape[2]
    if {q.dtype, keys.dtype, values.dtype} != {jnp.dtype("bfloat16")}:
        raise NotImplementedError(f"dtypes {q.dtype}, {keys.dtype}, {values.dtype}: bfloat16 is served")
    if head_dim not in (64, 128, 256):
        raise NotImplementedError(f"head_dim {head_dim}: 64, 128 and 256 are served")
    if size not in (8, 16, 32) and size % 64:
        raise NotImplementedError(f"page_size {size}: 8, 16, 32 and multiples of 64 are served")
    if group > ROWS:
        raise NotImplementedError(f"{group} heads per KV head: at most {ROWS} are served")

    lists = lists_of(table, index, count, first, last, size)
    crews = 1 if head_dim > 128 else 2  # a thread holds `head_dim / 2` numbers of the output
    fixed = crews * (ROWS * head_dim * 2 + ROWS * COLUMNS * 4)
    slots = (SHARED_BYTES - fixed) // (crews * TILE * head_dim * 2 * 2)
    shape = Shape(group, head_dim, size, crews, slots, kv_heads, soft_cap, interpret is not None)

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
    )(chunks.reshape(-1), total, lists.pages.reshape(-1), q, keys, values)
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
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    tiles = shape.crews * shape.slots
    copies = 2 * max(1, TILE // shape.page)
    return [
        plgpu.SMEM((tiles, TILE, shape.head_dim), jnp.bfloat16, transforms=tiled),  # K
        plgpu.SMEM((tiles, TILE, shape.head_dim), jnp.bfloat16, transforms=tiled),  # V
        plgpu.SMEM((shape.crews, ROWS, shape.head_dim), jnp.bfloat16, transforms=tiled),  # queries
        plgpu.SMEM((shape.crews, ROWS, COLUMNS), jnp.float32),  # output
        plgpu.SMEM((shape.crews, ROWS), jnp.float32),  # its log_sum
        plgpu.Barrier(num_arrivals=copies, num_barriers=tiles),
        plgpu.Barrier(num_barriers=tiles),
        plgpu.Barrier(num_barriers=shape.crews),
    ]


def _kernel(
    shape: Shape, chunks, total, pages, q, keys, values, out, log_sum,
    k_tiles, v_tiles, q_tiles, staged, staged_log, full, empty, q_full,
):  # fmt: skip
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
                        plgpu.copy_gmem_to_smem(keys.at[source], k_tiles.at[target], full.at[tile])
                        plgpu.copy_gmem_to_smem(values.at[source], v_tiles.at[target], full.at[tile])
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
                softmax = _attend(
                    shape, low - start, high - start, query, k_tiles.at[tile], v_tiles.at[tile], softmax
                )
                plgpu.barrier_arrive(empty.at[tile])
                return done + 1, *softmax

            done, top, sum_of, weighted = jax.lax.fori_loop(begin, end, step, (done, *_nothing(shape)))
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


def _nothing(shape: Shape):
    """The softmax of nothing: highest score and sum of weights of each row, and the weighted sum."""
    row, whole = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA
    return (
        _laid_out(shape, jnp.full((ROWS,), NEGATIVE, jnp.float32), row),
        _laid_out(shape, jnp.zeros((ROWS,), jnp.float32), row),
        _laid_out(shape, jnp.zeros((ROWS, shape.head_dim), jnp.float32), whole),
    )


def _attend(shape: Shape, low, high, q, k, v, softmax):
    """Take positions `low ≤ p < high` of a tile into the softmax; scores are in units of ln 2."""
    top, total, weighted = softmax

    @pl.when((low > 0) | (high < TILE))
    def _():
        # Zero times what lies there must not be NaN.
        at = _laid_out(shape, jax.lax.broadcasted_iota(jnp.int32, (TILE, COLUMNS), 0), plgpu.Layout.WGMMA)
        seen = (at >= low) & (at < high)
        for column in range(0, shape.head_dim, COLUMNS):
            part = v.at[:, pl.ds(column, COLUMNS)]
            part[...] = jnp.where(seen, part[...], jnp.zeros(at.shape, v.dtype))
        plgpu.commit_smem()

    score = _scores(shape, q, k)
    if shape.soft_cap is not None:
        # The tanh of the machine is coarse.
        score = shape.soft_cap - 2 * shape.soft_cap / (1.0 + jnp.exp2(score * (2 * LOG2_E / shape.soft_cap)))
    at = _laid_out(shape, jax.lax.broadcasted_iota(jnp.int32, score.shape, 1), plgpu.Layout.WGMMA)
    seen = (at >= low) & (at < high)
    score = jnp.where(seen, score * LOG2_E, NEGATIVE)
    wide = lambda x, like: jax.lax.broadcast_in_dim(x, like.shape, [0])
    new = jnp.maximum(top, score.max(axis=1))
    weight = jnp.where(seen, jnp.exp2(score - wide(new, score)), 0.0)
    shrink = jnp.exp2(top - new)
    total = total * shrink + weight.sum(axis=1)
    weighted = weighted * wide(shrink, weighted)
    return new, total, _add_product(shape, weighted, weight.astype(jnp.bfloat16), v)


def _laid_out(shape: Shape, x, layout):
    return x if shape.plain else plgpu.layout_cast(x, layout)


def _scores(shape: Shape, q, k):
    """The product of q and the transpose of k, both in shared memory."""
    if shape.plain:
        return jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)

    def multiply(result):
        plgpu.wgmma(result, q, plgpu.transpose_ref(k, (1, 0)))
        return result[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, TILE), jnp.float32))


def _add_product(shape: Shape, weighted, weight, v):
    """The sum and the product of weight, in registers, with v, in shared memory."""
    if shape.plain:
        return weighted + jnp.dot(weight, v[...], preferred_element_type=jnp.float32)
    return pl.run_state(lambda result: plgpu.wgmma(result, weight, v))(plgpu.ACC.init(weighted))
