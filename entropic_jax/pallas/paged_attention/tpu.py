"""Paged attention on a TPU (Pallas Mosaic).

Pools stay in HBM; tiles of listed pages are copied to VMEM, a chunk of them while the one before is
attended to, across the borders of lists. The chunks of a list are dealt alternately to two grid steps, which
the two cores of a v4 or v5p run at once and a single core one after the other; each step keeps its share of
a list in one online softmax, and the two shares are merged at the end. Which share a chunk belongs to
depends on its list alone, so a row has the same bits whatever its neighbours. A head_dim that is no multiple
of 128 lanes is served where the page is one: XLA has the positions along the lanes then.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .quantised import Quantised
from .reference import LANES, NEGATIVE, Partial
from .split import lists_of, merge

CHUNK_BYTES = 1 << 21  # of K and V together, in one of the two slots of VMEM
BLOCK = 512  # positions per step of the softmax
SHARES = 2  # of each list
SCALARS = 1 << 19  # bytes of SMEM for lists; rows beyond go into another call


class Shape(NamedTuple):
    """What is fixed when the kernel is compiled."""

    lists: int
    most: int  # entries of a list
    per_row: int  # lists of a row
    heads: int  # of one list: all are fetched at once
    page: int
    head_dim: int
    pages: int  # of a chunk
    block: int  # pages per step of the softmax
    along: int  # the axis of a tile that counts positions, see `as_they_lie`
    soft_cap: float | None


class Item(NamedTuple):
    """A chunk of a list; past the last list there is none."""

    list: Any
    chunk: Any


def decode(q, keys, values, table, index, count, first, last, *, soft_cap: float | None = None) -> Partial:
    """See the package; scores are `soft_cap · tanh(score / soft_cap)` where that is given."""
    check(q, keys, values)
    rows, kv_heads, group, head_dim = q.shape
    size = keys.shape[2]
    sublanes = sublanes_of(q.dtype)
    lists = lists_of(table, index, count, first, last, size)
    _, per_row, most = lists.pages.shape
    heads = kv_heads // per_row
    tile = 2 * size * head_dim * keys.dtype.itemsize  # of one page and head
    if (
        heads > 1 and heads * tile > CHUNK_BYTES
    ):  # too many heads to fetch at once: each has a list of its own
        lists = jax.tree.map(lambda x: jnp.repeat(x, kv_heads, 1), lists)
        per_row, heads = kv_heads, 1
    block = max(1, min(BLOCK // size, most))
    pages = max(1, min(CHUNK_BYTES // (heads * tile), most) // block) * block
    along, (keys, values) = as_they_lie(keys, values)
    shape = Shape(rows * per_row, most, per_row, heads, size, head_dim, pages, block, along, soft_cap)

    q = jnp.pad(q, ((0, 0), (0, 0), (0, -group % sublanes), (0, 0)))
    at_once = SCALARS // (4 * per_row * (most + 4))  # rows
    if at_once == 0:
        raise NotImplementedError(f"{per_row} lists of {most} pages per row: {SCALARS} bytes are accepted")
    parts = []
    for start in range(0, rows, at_once):
        some = slice(start, start + at_once)
        mine = jax.tree.map(lambda x, some=some: x[some], lists)
        parts.append(_call(shape, q[some], keys, values, mine))
    out, log_sum, held = (jnp.concatenate(x) if len(x) > 1 else x[0] for x in zip(*parts, strict=True))
    out, log_sum = merge(out[..., :group, :], log_sum[..., :group], held)
    return Partial(out.astype(q.dtype), log_sum)


def check(q, keys, values) -> None:
    """Decline what the kernels for TPU do not serve."""
    size, head_dim = keys.shape[2:]
    quantised = isinstance(keys, Quantised)
    if q.dtype not in (jnp.float32, jnp.bfloat16) or {keys.dtype, values.dtype} != {
        keys.dtype if quantised else q.dtype
    }:
        raise NotImplementedError(
            f"dtypes {q.dtype}, {keys.dtype}, {values.dtype}: one of float32, bfloat16, or of pages of 8 bits"
        )
    if quantised and size % LANES:
        raise NotImplementedError(f"page_size {size} is no multiple of {LANES}: {keys.dtype}")
    if head_dim % LANES and size % LANES:
        raise NotImplementedError(
            f"head_dim {head_dim} and page_size {size}: neither is a multiple of {LANES}, "
            "and each call would copy the whole pool"
        )
    name, other = ("head_dim", head_dim) if head_dim % LANES else ("page_size", size)
    if other % sublanes_of(keys.dtype):
        least = sublanes_of(keys.dtype)
        raise NotImplementedError(f"{name} {other} is no multiple of {least}: {keys.dtype}")


def sublanes_of(dtype) -> int:
    """Rows of a tile of the registers."""
    return 32 // dtype.itemsize


def as_they_lie(keys, values):
    """Which axis of a tile counts positions, and the pools with tiles that are so.

    XLA pads no memory where it need not: of a head_dim that is no multiple of the lanes it puts the positions
    there. To say so is free, and to ask for the other order would be a copy of the pool.
    """
    along = int(keys.shape[3] % LANES != 0)
    flip = lambda x: x.swapaxes(2, 3) if along else x
    turn = lambda pool: pool._replace(tiles=flip(pool.tiles)) if isinstance(pool, Quantised) else flip(pool)
    return along, (turn(keys), turn(values))


def _call(shape: Shape, q, keys, values, lists):
    """The parts of some rows: out, log_sum and held, with axes `[rows, kv_heads, shares, …]`."""
    rows, kv_heads, group, head_dim = q.shape
    heads, per_row = shape.heads, shape.per_row
    shape = shape._replace(lists=rows * per_row)
    q = q.reshape(shape.lists, heads, group, head_dim)
    ends = jnp.stack([lists.begin, lists.stop, lists.low, lists.high])
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    each = lambda pool, what: jax.tree.map(what, pool)
    buffer = lambda x: pltpu.VMEM((2, shape.pages, heads, *x.shape[2:]), x.dtype)
    length = shape.pages * shape.page
    work = rows * kv_heads * shape.most * shape.page * head_dim
    out, log_sum = pl.pallas_call(
        partial(_kernel, shape),
        out_shape=(
            jax.ShapeDtypeStruct((shape.lists, SHARES, heads, group, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((shape.lists, SHARES, group, LANES), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(SHARES,),
            in_specs=[anywhere, each(keys, lambda _: anywhere), each(values, lambda _: anywhere)],
            out_specs=(anywhere, anywhere),
            scratch_shapes=[
                each(keys, buffer),
                each(values, buffer),
                pltpu.VMEM((2, heads, group, head_dim), q.dtype),
                pltpu.VMEM((heads, group, LANES), jnp.float32),
                pltpu.VMEM((heads, group, LANES), jnp.float32),
                pltpu.VMEM((heads, group, head_dim), jnp.float32),
                pltpu.VMEM((2, heads, group, head_dim), jnp.float32),
                pltpu.VMEM((2, group, LANES), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=4 * group * work,
            bytes_accessed=2 * work * keys.dtype.itemsize,
            transcendentals=group * work // head_dim,
        ),
        name=f"paged_decode_{heads}x{length}",
    )(lists.pages.reshape(-1), ends.reshape(-1), q, keys, values)
    chunks = -(-(lists.stop - lists.begin) // shape.pages)
    held = jnp.repeat(jnp.arange(SHARES) < chunks[..., None], heads, 1)  # [rows, kv_heads, shares]
    out = out.reshape(rows, per_row, SHARES, heads, group, head_dim).swapaxes(2, 3)
    log_sum = log_sum[..., :heads].reshape(rows, per_row, SHARES, group, heads).transpose(0, 1, 4, 2, 3)
    whole = (rows, kv_heads, SHARES, group)
    return out.reshape(*whole, head_dim), log_sum.reshape(whole), held


def _kernel(
    shape: Shape, pages, ends, q, keys, values, out, log_sum,
    k_buffer, v_buffer, q_buffer, top, total, sum_of, out_buffer, log_buffer, arrived, left,
):  # fmt: skip
    """One share of every list: an endless belt of chunks, with the next one under way."""
    share = pl.program_id(0)
    lists = shape.lists
    begin, stop, low, high = (lambda i, part=part: ends[part * lists + i] for part in range(4))

    def length(item: Item):
        """Pages in a chunk."""
        return jnp.minimum(stop(item.list) - begin(item.list) - item.chunk * shape.pages, shape.pages)

    def first_of(i):
        return Item(i, jax.lax.rem(share + i, SHARES))

    def skip(item: Item) -> Item:
        """The item itself, or the first one that there is behind it."""

        def absent(item):
            i = jnp.minimum(item.list, lists - 1)
            return (item.list < lists) & (item.chunk * shape.pages >= stop(i) - begin(i))

        return jax.lax.while_loop(absent, lambda item: first_of(item.list + 1), item)

    def copies(item: Item, slot, page):
        """The copies of one page of a chunk: K and V of the heads of the list, and their scales."""
        place = pages[item.list * shape.most + begin(item.list) + item.chunk * shape.pages + page]
        head = pl.ds(jax.lax.rem(item.list, shape.per_row) * shape.heads, shape.heads)
        copy = lambda pool, buffer: pltpu.make_async_copy(
            pool.at[place, head], buffer.at[slot, page], arrived.at[slot]
        )
        pairs = zip(jax.tree.leaves((keys, values)), jax.tree.leaves((k_buffer, v_buffer)), strict=True)
        return [copy(pool, buffer) for pool, buffer in pairs]

    def query(item: Item, slot):
        return pltpu.make_async_copy(q.at[item.list], q_buffer.at[slot], arrived.at[slot])

    def start(item: Item, slot):
        query(item, slot).start()

        @pl.loop(0, length(item))
        def _(page):
            for copy in copies(item, slot, page):
                copy.start()

    def emissions(i, part, slot):
        to = lambda buffer, result: pltpu.make_async_copy(buffer.at[slot], result.at[i, part], left.at[slot])
        return to(out_buffer, out), to(log_buffer, log_sum)

    def finish(slot):
        for copy in emissions(0, 0, slot):  # only its size matters
            copy.wait()

    def turn(state):
        item, slot, emitted = state
        coming = skip(Item(item.list, item.chunk + SHARES))

        @pl.when(coming.list < lists)
        def _():
            start(coming, _other(slot))

        _await(query(item, slot))

        @pl.loop(0, length(item))
        def _(page):
            for copy in copies(item, slot, page):
                _await(copy)

        whole = length(item)
        ends_here = begin(item.list) + item.chunk * shape.pages + whole >= stop(item.list)
        lowest = jnp.where(item.chunk == 0, low(item.list), 0)
        highest = (whole - 1) * shape.page + jnp.where(ends_here, high(item.list), shape.page)

        @pl.when(item.chunk < SHARES)
        def _():
            top[...] = jnp.full_like(top, NEGATIVE)
            total[...] = jnp.zeros_like(total)
            sum_of[...] = jnp.zeros_like(sum_of)

        here = lambda buffer: jax.tree.map(lambda x: x.at[slot], buffer)
        _attend(shape, lowest, highest, q_buffer.at[slot], here(k_buffer), here(v_buffer), top, total, sum_of)
        done = coming.list != item.list

        @pl.when(done)
        def _():
            to = jax.lax.rem(emitted, 2)

            @pl.when(emitted >= 2)
            def _():
                finish(to)

            _normalise(shape, top, total, sum_of, out_buffer.at[to], log_buffer.at[to])
            for copy in emissions(item.list, jax.lax.rem(item.chunk, SHARES), to):
                copy.start()

        return coming, _other(slot), emitted + done.astype(jnp.int32)

    item = skip(first_of(jnp.int32(0)))

    @pl.when(item.list < lists)
    def _():
        start(item, 0)

    state = (item, jnp.int32(0), jnp.int32(0))
    _, _, emitted = jax.lax.while_loop(lambda state: state[0].list < lists, turn, state)

    for back in (1, 2):

        @pl.when(emitted >= back)
        def _(back=back):
            finish(jax.lax.rem(emitted - back, 2))


def _other(slot):
    return 1 - slot


def _await(copy):
    copy.wait()


def _attend(shape: Shape, low, high, q, k, v, top, total, sum_of):
    """Take positions `low ≤ p < high` of a chunk into the softmax, block by block."""
    page, block = shape.page, shape.block
    positions = block * page

    @pl.loop(jax.lax.div(low, positions), jax.lax.div(high + positions - 1, positions))
    def _(step):
        start = step * positions
        edge = (start < low) | (start + positions > high)
        here = pl.ds(step * block, block)

        if v.dtype != jnp.int8:

            @pl.when(edge)
            def _():
                # Zero times what lies there must not be NaN.
                tiles = tiles_of(v)
                at = start + _positions((block, 1, *tiles.shape[2:]), 0, 2 + shape.along, page)
                seen = (at >= low) & (at < high)
                tiles[here] = jnp.where(seen, tiles[here].astype(jnp.float32), 0.0).astype(tiles.dtype)

        for head in range(shape.heads):
            wide = lambda x, head=head: joined(tiles_of(x)[here, head], shape.along).astype(q.dtype)
            score = product(q[head], wide(k), 1 - shape.along)
            at = start + jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
            seen = (at >= low) & (at < high)
            scale = partial(scaled, seen=seen, start=step * block, pages=block, head=head)
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
            part = product(scale(weight, v).astype(q.dtype), wide(v), shape.along)
            sum_of[head] = sum_of[head] * shrink[:, :1] + part


def tiles_of(pool):
    """The tiles of a buffer of pages, without their scales."""
    return pool.tiles if isinstance(pool, Quantised) else pool


def joined(tiles, along: int):
    """Tiles `[pages, …]` as one, along their axis of positions."""
    return jnp.concatenate(list(tiles), 1) if along else tiles.reshape(-1, tiles.shape[2])


def scaled(x, pool, seen, start, pages: int, head: int):
    """`x` `[…, positions]` times the scales of pages of a buffer from `start` on; 0 where not seen."""
    if not isinstance(pool, Quantised):
        return x
    return jnp.where(seen, x * jnp.concatenate([pool.scale[start + i, head] for i in range(pages)], 1), 0.0)


def _positions(shape, block_axis: int, slot_axis: int, page: int):
    iota = partial(jax.lax.broadcasted_iota, jnp.int32, shape)
    return iota(block_axis) * page + iota(slot_axis)


def product(a, b, axis: int):
    """A matrix product over axis 1 of a and the given axis of b; float32 to the last bits."""
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _normalise(shape: Shape, top, total, sum_of, out, log_sum):
    """The attention output of a share, and ln Σ exp(score): that of head h in lane h."""
    lane = jax.lax.broadcasted_iota(jnp.int32, log_sum.shape, 1)
    logs = jnp.zeros(log_sum.shape, jnp.float32)
    for head in range(shape.heads):
        out[head] = sum_of[head] / total[head][:, :1]
        logs = jnp.where(lane == head, top[head] + jnp.log(total[head]), logs)
    log_sum[...] = logs
