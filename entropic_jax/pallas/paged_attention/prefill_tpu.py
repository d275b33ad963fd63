"""Causal attention of many queries per row to listed pages, on a TPU (Pallas Mosaic).

    prefill(q, keys, values, table, index, count, first, query, last)

* q `[rows, kv_heads, group, n, head_dim]`, scaled; query i of a row stands at position `query[row] + i`,
* keys, values, table, index, count, last as in `decode`; index None: every page,
* first int32 `[rows, n]`: the query sees positions from there to its own, of the listed pages, below `last`.

Returns the output in the shape of q; zeros for a query that sees nothing. A page is read for a block of
queries if it is listed and one of them could see a position of it.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .reference import NEGATIVE
from .split import ends_of
from .tpu import (
    BLOCK,
    CHUNK_BYTES,
    LANES,
    SCALARS,
    as_they_lie,
    check,
    joined,
    product,
    scaled,
    sublanes_of,
    tiles_of,
)

QUERIES = 512  # rows of a product: queries of a block times heads of a group


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
    pages: int  # of a chunk
    block: int  # pages per step of the softmax
    along: int  # the axis of a tile that counts positions, see `as_they_lie`
    soft_cap: float | None


def prefill(q, keys, values, table, index, count, first, query, last, *, soft_cap: float | None = None):
    """See above; `soft_cap` as in `decode`."""
    check(q, keys, values)
    rows, kv_heads, group, n, head_dim = q.shape
    size = keys.shape[2]
    sublanes = sublanes_of(q.dtype)
    queries = min(max(QUERIES // group // sublanes, 1) * sublanes, -(-n // sublanes) * sublanes)
    blocks = -(-n // queries)
    most = table.shape[1] if index is None else index.shape[2]
    block = max(1, min(BLOCK // size, most))
    chunk = CHUNK_BYTES // (2 * size * head_dim * keys.dtype.itemsize)
    pages = max(1, min(chunk, most) // block) * block
    along, (keys, values) = as_they_lie(keys, values)
    shape = Shape(
        kv_heads,
        index is not None,
        table.shape[1],
        most,
        group,
        queries,
        blocks,
        size,
        head_dim,
        pages,
        block,
        along,
        soft_cap,
    )
    padded = blocks * queries - n
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, padded), (0, 0)))
    first = jnp.pad(first, ((0, 0), (0, padded)), mode="edge")
    lists = 1 if index is None else kv_heads
    at_once = SCALARS // (4 * (table.shape[1] + lists * most + 2 * kv_heads * blocks + 2))  # rows
    if at_once == 0:
        raise NotImplementedError(f"{lists} lists of {most} pages per row: {SCALARS} bytes are accepted")
    parts = []
    for start in range(0, rows, at_once):
        some = slice(start, start + at_once)
        where = jax.tree.map(lambda x, some=some: x[some], (table, index, count, first, query, last))
        parts.append(_call(shape, q[some], keys, values, where))
    out = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    return out[..., :n, :]


def _call(shape: Shape, q, keys, values, where):
    table, index, count, first, query, last = where
    rows, kv_heads, group, n, head_dim = q.shape
    begin, stop = ends_of(shape, index, count, first, query, last)
    entries = jnp.zeros(1, jnp.int32) if index is None else index
    tile = pl.BlockSpec((1, group, shape.queries, head_dim), lambda i, block, *_: (i, 0, block, 0))
    column = pl.BlockSpec((1, shape.queries, LANES), lambda i, block, *_: (i // kv_heads, block, 0))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    each = lambda pool, what: jax.tree.map(what, pool)
    buffer = lambda x: pltpu.VMEM((2, shape.pages, 1, *x.shape[2:]), x.dtype)
    height = group * shape.queries
    work = rows * kv_heads * group * n * shape.most * shape.page
    out = pl.pallas_call(
        partial(_kernel, shape),
        out_shape=jax.ShapeDtypeStruct((rows * kv_heads, group, n, head_dim), q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(rows * kv_heads, shape.blocks),
            in_specs=[tile, column, each(keys, lambda _: anywhere), each(values, lambda _: anywhere)],
            out_specs=tile,
            scratch_shapes=[
                each(keys, buffer),
                each(values, buffer),
                pltpu.VMEM((height, LANES), jnp.float32),
                pltpu.VMEM((height, LANES), jnp.float32),
                pltpu.VMEM((height, head_dim), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * work * head_dim,  # half of the positions, on average
            bytes_accessed=work // group // shape.queries * head_dim * keys.dtype.itemsize,
            transcendentals=work // 2,
        ),
        name=f"paged_prefill_{group}x{shape.queries}",
    )(
        *(x.reshape(-1) for x in (table, entries, begin, stop)),
        query,
        last,
        q.reshape(rows * kv_heads, group, n, head_dim),
        jnp.broadcast_to(first[..., None], (*first.shape, LANES)),
        keys,
        values,
    )
    return out.reshape(q.shape)


def _kernel(
    shape: Shape, table, entries, begin, stop, query, last, q, first, keys, values, out,
    k_buffer, v_buffer, top, total, sum_of, arrived,
):  # fmt: skip
    """One block of queries, all heads of a group: over the chunks of its list, the next one under way."""
    i, block = pl.program_id(0), pl.program_id(1)
    row, head = jax.lax.div(i, shape.kv_heads), jax.lax.rem(i, shape.kv_heads)
    base = i * shape.most
    begin, stop = begin[i * shape.blocks + block], stop[i * shape.blocks + block]
    last = last[row]
    height = shape.group * shape.queries
    own = query[row] + block * shape.queries + _each(shape, (height, 1))
    since = jnp.concatenate([first[0][:, :1]] * shape.group, 0)

    def copies(chunk, slot, page):
        place = table[row * shape.per_row + _entry(shape, entries, base, chunk * shape.pages + page)]
        copy = lambda pool, buffer: pltpu.make_async_copy(
            pool.at[place, head], buffer.at[slot, page, 0], arrived.at[slot]
        )
        pairs = zip(jax.tree.leaves((keys, values)), jax.tree.leaves((k_buffer, v_buffer)), strict=True)
        return [copy(pool, buffer) for pool, buffer in pairs]

    def ends(chunk):
        """Of the pages of a chunk that are read."""
        start = chunk * shape.pages
        return jnp.maximum(begin - start, 0), jnp.minimum(stop - start, shape.pages)

    def start(chunk, slot):
        @pl.loop(*ends(chunk))
        def _(page):
            for copy in copies(chunk, slot, page):
                copy.start()

    top[...] = jnp.full_like(top, NEGATIVE)
    total[...] = jnp.zeros_like(total)
    sum_of[...] = jnp.zeros_like(sum_of)
    lead = jax.lax.div(begin, shape.pages)
    end = jnp.where(stop > begin, jax.lax.div(stop + shape.pages - 1, shape.pages), lead)

    @pl.when(end > lead)
    def _():
        start(lead, _slot(lead))

    @pl.loop(lead, end)
    def _(chunk):
        slot = _slot(chunk)

        @pl.when(chunk + 1 < end)
        def _():
            start(chunk + 1, _slot(chunk + 1))

        low, high = ends(chunk)

        @pl.loop(low, high)
        def _(page):
            for copy in copies(chunk, slot, page):
                _await(copy)

        @pl.loop(jax.lax.div(low, shape.block), jax.lax.div(high + shape.block - 1, shape.block))
        def _(step):
            here = pl.ds(step * shape.block, shape.block)
            at = chunk * shape.pages + step * shape.block  # first entry
            position = _position(shape, entries, base, at, begin, stop)
            _clear(shape, entries, base, at, begin, stop, last, tiles_of(v_buffer).at[slot, here])
            k, v = (jax.tree.map(lambda x: x.at[slot], buffer) for buffer in (k_buffer, v_buffer))
            wide = lambda x: joined(tiles_of(x)[here, 0], shape.along).astype(q.dtype)
            score = product(q[0].reshape(height, shape.head_dim), wide(k), 1 - shape.along)
            seen = (position >= since) & (position <= own) & (position < last)
            scale = partial(scaled, seen=seen, start=step * shape.block, pages=shape.block, head=0)
            score = scale(score, k)
            if shape.soft_cap is not None:
                score = shape.soft_cap * jnp.tanh(score / shape.soft_cap)
            score = jnp.where(seen, score, NEGATIVE)
            before = top[...]
            after = jnp.maximum(before, score.max(1, keepdims=True))
            weight = jnp.where(seen, jnp.exp(score - after[:, :1]), 0.0)
            shrink = jnp.exp(before - after)
            top[...] = after
            total[...] = total[...] * shrink + weight.sum(1, keepdims=True)
            part = product(scale(weight, v).astype(q.dtype), wide(v), shape.along)
            sum_of[...] = sum_of[...] * shrink[:, :1] + part

    divisor = total[...][:, :1]
    result = sum_of[...] / jnp.where(divisor == 0, 1.0, divisor)
    out[0] = result.astype(out.dtype).reshape(shape.group, shape.queries, shape.head_dim)


def _slot(chunk):
    return jax.lax.rem(chunk, 2)


def _await(copy):
    copy.wait()


def _each(shape: Shape, size):
    """Which query of its block each row of a product is."""
    return jax.lax.rem(jax.lax.broadcasted_iota(jnp.int32, size, 0), shape.queries)


def _entry(shape: Shape, entries, base, i):
    """Which page of the row the i-th of a list is."""
    return entries[base + jnp.minimum(i, shape.most - 1)] if shape.listed else i


def _position(shape: Shape, entries, base, at, begin, stop):
    """Positions of a block of pages, int32 `[1, block · page]`; −1 on a page that is not read."""
    slot = jax.lax.broadcasted_iota(jnp.int32, (1, shape.block * shape.page), 1)
    position = jnp.full_like(slot, -1)
    for i in range(shape.block):
        start = _entry(shape, entries, base, at + i) * shape.page
        mine = (slot >= i * shape.page) & (slot < (i + 1) * shape.page) & (at + i >= begin) & (at + i < stop)
        position = jnp.where(mine, start + slot - i * shape.page, position)
    return position


def _clear(shape: Shape, entries, base, at, begin, stop, last, v):
    """Zero what was not read, or lies past the end: zero times it must not be NaN."""
    if v.dtype == jnp.int8:
        return

    @pl.loop(0, shape.block)
    def _(i):
        held = last - _entry(shape, entries, base, at + i) * shape.page
        held = jnp.where((at + i >= begin) & (at + i < stop), held, 0)

        @pl.when(held < shape.page)
        def _():
            seen = jax.lax.broadcasted_iota(jnp.int32, v.shape[2:], shape.along) < held
            v[i, 0] = jnp.where(seen, v[i, 0].astype(jnp.float32), 0.0).astype(v.dtype)
