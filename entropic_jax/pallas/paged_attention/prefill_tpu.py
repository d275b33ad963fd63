"""Prefill attention on a TPU (Pallas Mosaic): causal attention of blocks of queries to listed pages.

The contract is that of `prefill` in the package's docstring. The tiles of a list are copied to VMEM in chunks
with double buffering, and each block of queries keeps an online softmax. A page is read for a block of
queries if it is listed and one of the queries could see a position of it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .reference import NEGATIVE, PartialAttention
from .split_kv import PrefillShape, entry_ranges
from .tpu_tile import (
    BLOCK,
    CHUNK_BYTES,
    LANES,
    SCALARS,
    check,
    in_main_memory,
    joined,
    pools_as_laid_out,
    product,
    scaled,
    sublanes_of,
    tiles_of,
)

QUERIES = 512  # rows of a product: queries of a block times heads of a group


@dataclass(frozen=True, kw_only=True)
class Shape(PrefillShape):
    """The static parameters of the kernel."""

    pages: int  # of a chunk
    block: int  # pages per step of the softmax
    position_axis: int  # of a tile, see `pools_as_laid_out`
    partial: bool  # whether the log-sum-exp is an output


class ListedPages(NamedTuple):
    """The entries of a page list that a block of queries reads."""

    entries: Any  # of all lists
    base: Any  # the place of the list among them
    begin: Any  # the first entry to read
    stop: Any  # one past the last


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
) -> jax.Array:
    """The contract is in the package's docstring; `soft_cap` as in `tpu.decode`.

    Args:
        soft_cap: if given, scores are soft_cap · tanh(score / soft_cap).
    """
    lists, positions = (page_list, num_pages), (window_start, query_start, context_length)
    return _prefill(q, keys, values, page_table, lists, positions, soft_cap, False)[0]


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
) -> PartialAttention:
    """`prefill` with its log-sum-exp; arguments as there.

    Args:
        soft_cap: if given, scores are soft_cap · tanh(score / soft_cap).
    """
    lists, positions = (page_list, num_pages), (window_start, query_start, context_length)
    return PartialAttention(*_prefill(q, keys, values, page_table, lists, positions, soft_cap, True))


def _prefill(q, keys, values, page_table, lists, positions, soft_cap, partial) -> list[jax.Array]:
    """The output, and with `partial` the log-sum-exp."""
    (page_list, num_pages), (window_start, query_start, context_length) = lists, positions
    check(q, keys, values)
    rows, kv_heads, group, n, head_dim = q.shape
    size = keys.shape[2]
    sublanes = sublanes_of(q.dtype)
    queries = min(max(QUERIES // group // sublanes, 1) * sublanes, -(-n // sublanes) * sublanes)
    blocks = -(-n // queries)
    max_listed = page_table.shape[1] if page_list is None else page_list.shape[2]
    block = max(1, min(BLOCK // size, max_listed))
    chunk = CHUNK_BYTES // (2 * size * head_dim * keys.dtype.itemsize)
    pages = max(1, min(chunk, max_listed) // block) * block
    position_axis, (keys, values) = pools_as_laid_out(keys, values)
    shape = Shape(
        kv_heads=kv_heads,
        listed=page_list is not None,
        per_row=page_table.shape[1],
        max_listed=max_listed,
        group=group,
        queries=queries,
        blocks=blocks,
        page=size,
        head_dim=head_dim,
        soft_cap=soft_cap,
        pages=pages,
        block=block,
        position_axis=position_axis,
        partial=partial,
    )
    padded = blocks * queries - n
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, padded), (0, 0)))
    window_start = jnp.pad(window_start, ((0, 0), (0, padded)), mode="edge")
    lists = 1 if page_list is None else kv_heads
    rows_per_call = SCALARS // (
        4 * (page_table.shape[1] + lists * max_listed + 2 * kv_heads * blocks + 2)
    )  # rows
    if rows_per_call == 0:
        raise NotImplementedError(
            f"{lists} lists of {max_listed} pages per row: {SCALARS} bytes are accepted"
        )
    parts = []
    for start in range(0, rows, rows_per_call):
        batch = slice(start, start + rows_per_call)
        positions = jax.tree.map(
            lambda x, batch=batch: x[batch],
            (page_table, page_list, num_pages, window_start, query_start, context_length),
        )
        parts.append(_call(shape, q[batch], keys, values, positions))
    together = [jnp.concatenate(x) if len(x) > 1 else x[0] for x in zip(*parts, strict=True)]
    return [together[0][..., :n, :], *(x[..., :n] for x in together[1:])]


def _call(shape: Shape, q, keys, values, positions):
    page_table, page_list, num_pages, window_start, query_start, context_length = positions
    rows, kv_heads, group, n, head_dim = q.shape
    begin, stop = entry_ranges(shape, page_list, num_pages, window_start, query_start, context_length)
    entries = jnp.zeros(1, jnp.int32) if page_list is None else page_list
    tile, log_sum_exps = (
        pl.BlockSpec((1, group, shape.queries, width), lambda i, block, *_: (i, 0, block, 0))
        for width in (head_dim, LANES)
    )
    # A log-sum-exp has the lanes of a register, which costs less than to transpose it.
    outputs = [jax.ShapeDtypeStruct((rows * kv_heads, group, n, head_dim), q.dtype)]
    outputs += [jax.ShapeDtypeStruct((rows * kv_heads, group, n, LANES), jnp.float32)] * shape.partial
    column = pl.BlockSpec((1, shape.queries, LANES), lambda i, block, *_: (i // kv_heads, block, 0))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    each = lambda pool, what: jax.tree.map(what, pool)

    def buffer(x):
        return pltpu.VMEM((2, shape.pages, 1, *x.shape[2:]), x.dtype)

    height = group * shape.queries
    work = rows * kv_heads * group * n * shape.max_listed * shape.page
    out, *logs = pl.pallas_call(
        partial(_kernel, shape),
        out_shape=outputs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(rows * kv_heads, shape.blocks),
            in_specs=[tile, column, each(keys, lambda _: anywhere), each(values, lambda _: anywhere)],
            out_specs=[tile, log_sum_exps][: len(outputs)],
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
            flops=2 * work * head_dim,  # half of the positions are visible, on average
            bytes_accessed=work // group // shape.queries * head_dim * keys.dtype.itemsize,
            transcendentals=work // 2,
        ),
        name=f"paged_prefill_{group}x{shape.queries}",
    )(
        *(x.reshape(-1) for x in (page_table, entries, begin, stop)),
        query_start,
        context_length,
        q.reshape(rows * kv_heads, group, n, head_dim),
        jnp.broadcast_to(window_start[..., None], (*window_start.shape, LANES)),
        *in_main_memory((keys, values)),
    )
    return [out.reshape(q.shape), *(x[..., 0].reshape(q.shape[:-1]) for x in logs)]


def _kernel(
    shape: Shape, page_table, entries, begin, stop, query_start, context_length, q, window_start, keys,
    values, out, *rest,
):  # fmt: skip
    """One block of queries, all heads of a group, over the chunks of its list with double buffering."""
    *log_sum_exp, k_buffer, v_buffer, top, total, sum_of, input_semaphore = rest
    i, block = pl.program_id(0), pl.program_id(1)
    row, head = jax.lax.div(i, shape.kv_heads), jax.lax.rem(i, shape.kv_heads)
    base = i * shape.max_listed
    begin, stop = begin[i * shape.blocks + block], stop[i * shape.blocks + block]
    listed = ListedPages(entries, base, begin, stop)
    context_length = context_length[row]
    height = shape.group * shape.queries
    own_position = query_start[row] + block * shape.queries + _each(shape, (height, 1))
    window_start_of_row = jnp.concatenate([window_start[0][:, :1]] * shape.group, 0)

    def copies(chunk, slot, page):
        place = page_table[row * shape.per_row + _entry(shape, listed, chunk * shape.pages + page)]
        pairs = zip(jax.tree.leaves((keys, values)), jax.tree.leaves((k_buffer, v_buffer)), strict=True)
        moves = ((pool.at[place, head], buffer.at[slot, page, 0]) for pool, buffer in pairs)
        return [pltpu.make_async_copy(*pair, input_semaphore.at[slot]) for pair in moves]

    def ends(chunk):
        """The range of the pages in a chunk that are read."""
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
        start(lead, _buffer_slot(lead))

    @pl.loop(lead, end)
    def _(chunk):
        slot = _buffer_slot(chunk)

        @pl.when(chunk + 1 < end)
        def _():
            start(chunk + 1, _buffer_slot(chunk + 1))

        low, high = ends(chunk)

        @pl.loop(low, high)
        def _(page):
            for copy in copies(chunk, slot, page):
                _wait(copy)

        @pl.loop(jax.lax.div(low, shape.block), jax.lax.div(high + shape.block - 1, shape.block))
        def _(step):
            window, buffers = (window_start_of_row, own_position, context_length), (k_buffer, v_buffer)
            _attend(shape, listed, chunk, step, window, q, buffers, slot, top, total, sum_of)

    divisor = total[...][:, :1]
    result = sum_of[...] / jnp.where(divisor == 0, 1.0, divisor)
    out[0] = result.astype(out.dtype).reshape(shape.group, shape.queries, shape.head_dim)
    for to in log_sum_exp:
        sums = total[...]
        logs = jnp.where(sums == 0, -jnp.inf, top[...] + jnp.log(jnp.where(sums == 0, 1.0, sums)))
        to[0] = logs.reshape(shape.group, shape.queries, LANES)


def _attend(shape: Shape, listed: ListedPages, chunk, step, window, q, buffers, slot, top, total, sum_of):
    """Update the online softmax with one step of a chunk: `shape.block` pages."""
    window_start, own_position, context_length = window
    block_pages = pl.ds(step * shape.block, shape.block)
    at = chunk * shape.pages + step * shape.block  # first entry
    position = _position(shape, listed, at)
    _clear(shape, listed, at, context_length, tiles_of(buffers[1]).at[slot, block_pages])
    k, v = (jax.tree.map(lambda x: x.at[slot], buffer) for buffer in buffers)

    def wide(x):
        return joined(tiles_of(x)[block_pages, 0], shape.position_axis).astype(q.dtype)

    queries = q[0].reshape(shape.group * shape.queries, shape.head_dim)
    score = product(queries, wide(k), 1 - shape.position_axis)
    seen = (position >= window_start) & (position <= own_position) & (position < context_length)
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
    part = product(scale(weight, v).astype(q.dtype), wide(v), shape.position_axis)
    sum_of[...] = sum_of[...] * shrink[:, :1] + part


def _buffer_slot(chunk):
    return jax.lax.rem(chunk, 2)


def _wait(copy):
    copy.wait()


def _each(shape: Shape, size):
    """The number of the query in its block, for each row of a product."""
    return jax.lax.rem(jax.lax.broadcasted_iota(jnp.int32, size, 0), shape.queries)


def _entry(shape: Shape, listed: ListedPages, i):
    """The page of the row that entry i of its list stands for."""
    return listed.entries[listed.base + jnp.minimum(i, shape.max_listed - 1)] if shape.listed else i


def _position(shape: Shape, listed: ListedPages, at):
    """Positions of a block of pages, int32 `[1, block · page]`; −1 on a page that is not read."""
    slot = jax.lax.broadcasted_iota(jnp.int32, (1, shape.block * shape.page), 1)
    position = jnp.full_like(slot, -1)
    for i in range(shape.block):
        start = _entry(shape, listed, at + i) * shape.page
        in_page = (
            (slot >= i * shape.page)
            & (slot < (i + 1) * shape.page)
            & (at + i >= listed.begin)
            & (at + i < listed.stop)
        )
        position = jnp.where(in_page, start + slot - i * shape.page, position)
    return position


def _clear(shape: Shape, listed: ListedPages, at, context_length, v):
    """Zero the slots that were not read or are past the context length: zero times them must not be NaN."""
    if v.dtype == jnp.int8:
        return

    @pl.loop(0, shape.block)
    def _(i):
        filled = context_length - _entry(shape, listed, at + i) * shape.page
        filled = jnp.where((at + i >= listed.begin) & (at + i < listed.stop), filled, 0)

        @pl.when(filled < shape.page)
        def _():
            seen = jax.lax.broadcasted_iota(jnp.int32, v.shape[2:], shape.position_axis) < filled
            v[i, 0] = jnp.where(seen, v[i, 0].astype(jnp.float32), 0.0).astype(v.dtype)
