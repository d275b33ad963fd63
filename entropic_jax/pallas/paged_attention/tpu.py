"""Paged attention for decoding on a TPU (Pallas Mosaic): split-KV with double-buffered copies.

Page pools stay in HBM. The tiles of listed pages are copied to VMEM with double buffering: one chunk is
copied while the previous one is attended to, also from one list to the next. The chunks of a list are dealt
alternately to two grid steps, which the two cores of a v4 or v5p run at the same time and a single core one
after the other. Each grid step keeps its part of a list in one online softmax, and the two partial results
are merged at the end. The part that a chunk belongs to depends on its list alone, so a row has the same bits
whatever its neighbours. A head_dim that is not a multiple of 128 lanes is supported if the page size is one:
XLA then lays out the positions along the lanes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .reference import LANES, NEGATIVE, PartialAttention
from .split_kv import merge_partials, work_lists
from .tpu_tile import (
    BLOCK,
    CHUNK_BYTES,
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

PARTS = 2  # partial results of each list
_other_slot = lambda slot: 1 - slot  # that the next chunk is copied to
_wait = lambda copy: copy.wait()


class Shape(NamedTuple):
    """The static parameters of the kernel."""

    lists: int
    max_listed: int  # entries of a list
    per_row: int  # lists of a row
    heads: int  # of one list; all are copied together
    page: int
    head_dim: int
    pages: int  # of a chunk
    block: int  # pages per step of the softmax
    position_axis: int  # of a tile, see `pools_as_laid_out`
    soft_cap: float | None


class Item(NamedTuple):
    """A chunk of a list; a list number past the last one means that there is none."""

    list: Any
    chunk: Any


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
) -> PartialAttention:
    """The contract is in the package's docstring; `soft_cap` c: scores are c · tanh(score / c)."""
    check(q, keys, values)
    rows, kv_heads, group, head_dim = q.shape
    size = keys.shape[2]
    sublanes = sublanes_of(q.dtype)
    lists = work_lists(page_table, page_list, num_pages, window_start, context_length, size)
    _, per_row, max_listed = lists.pages.shape
    heads = kv_heads // per_row
    tile = 2 * size * head_dim * keys.dtype.itemsize  # of one page and head
    if (
        heads > 1 and heads * tile > CHUNK_BYTES
    ):  # too many heads to copy at once: each gets a list of its own
        lists = jax.tree.map(lambda x: jnp.repeat(x, kv_heads, 1), lists)
        per_row, heads = kv_heads, 1
    block = max(1, min(BLOCK // size, max_listed))
    pages = max(1, min(CHUNK_BYTES // (heads * tile), max_listed) // block) * block
    position_axis, (keys, values) = pools_as_laid_out(keys, values)
    shape = Shape(
        rows * per_row, max_listed, per_row, heads, size, head_dim, pages, block, position_axis, soft_cap
    )

    q = jnp.pad(q, ((0, 0), (0, 0), (0, -group % sublanes), (0, 0)))
    rows_per_call = SCALARS // (4 * per_row * (max_listed + 4))  # rows
    if rows_per_call == 0:
        raise NotImplementedError(
            f"{per_row} lists of {max_listed} pages per row: {SCALARS} bytes are accepted"
        )
    parts = []
    for start in range(0, rows, rows_per_call):
        batch = slice(start, start + rows_per_call)
        row_lists = jax.tree.map(lambda x, batch=batch: x[batch], lists)
        parts.append(_call(shape, q[batch], keys, values, row_lists))
    out, log_sum_exp, written = (jnp.concatenate(x) if len(x) > 1 else x[0] for x in zip(*parts, strict=True))
    out, log_sum_exp = merge_partials(out[..., :group, :], log_sum_exp[..., :group], written)
    return PartialAttention(out.astype(q.dtype), log_sum_exp)


def _call(shape: Shape, q, keys, values, lists):
    """Partial results of a batch of rows: out, log_sum_exp, written; axes `[rows, kv_heads, PARTS, …]`."""
    rows, kv_heads, group, head_dim = q.shape
    heads, per_row = shape.heads, shape.per_row
    shape = shape._replace(lists=rows * per_row)
    q = q.reshape(shape.lists, heads, group, head_dim)
    ends = jnp.stack([lists.begin, lists.stop, lists.low, lists.high])
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    each = lambda pool, spec_fn: jax.tree.map(spec_fn, pool)
    buffer = lambda x: pltpu.VMEM((2, shape.pages, heads, *x.shape[2:]), x.dtype)
    length = shape.pages * shape.page
    work = rows * kv_heads * shape.max_listed * shape.page * head_dim
    out, log_sum_exp = pl.pallas_call(
        partial(_kernel, shape),
        out_shape=(
            jax.ShapeDtypeStruct((shape.lists, PARTS, heads, group, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((shape.lists, PARTS, group, LANES), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(PARTS,),
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
    )(lists.pages.reshape(-1), ends.reshape(-1), q, *in_main_memory((keys, values)))
    chunks = -(-(lists.stop - lists.begin) // shape.pages)
    written = jnp.repeat(jnp.arange(PARTS) < chunks[..., None], heads, 1)  # [rows, kv_heads, PARTS]
    out = out.reshape(rows, per_row, PARTS, heads, group, head_dim).swapaxes(2, 3)
    log_sum_exp = (
        log_sum_exp[..., :heads].reshape(rows, per_row, PARTS, group, heads).transpose(0, 1, 4, 2, 3)
    )
    sizes = (rows, kv_heads, PARTS, group)
    return out.reshape(*sizes, head_dim), log_sum_exp.reshape(sizes), written


def _kernel(shape: Shape, *refs: Any) -> None:
    """One part of every list: its chunks in a row, with the copies of the next chunk in progress."""
    work = _Part(shape, _Refs(*refs), pl.program_id(0))
    lists = shape.lists
    item = work.skip(work.first_of(jnp.int32(0)))

    @pl.when(item.list < lists)
    def _():
        work.for_copies(item, 0, lambda copy: copy.start())

    state = (item, jnp.int32(0), jnp.int32(0))
    _, _, num_outputs = jax.lax.while_loop(lambda state: state[0].list < lists, work.step, state)

    for back in (1, 2):

        @pl.when(num_outputs >= back)
        def _(back=back):
            work.wait_for_outputs(jax.lax.rem(num_outputs - back, 2))


class _Refs(NamedTuple):
    """Scalars, operands, results and scratch of the kernel; `_call` says their shapes."""

    pages: Any  # scalars: the lists, one after the other
    ends: Any  # scalars: first and last entry, first and last position of every list
    q: Any
    keys: Any
    values: Any
    out: Any
    log_sum_exp: Any
    k_buffer: Any
    v_buffer: Any
    q_buffer: Any
    top: Any  # of the online softmax, as are the two below
    total: Any
    sum_of: Any
    out_buffer: Any
    log_buffer: Any
    input_semaphore: Any
    output_semaphore: Any


@dataclass(frozen=True)
class _Part:
    """One grid step: the order of its chunks, their copies, and their attention."""

    shape: Shape
    refs: _Refs
    part: Any

    def _end(self, field: int, i):
        return self.refs.ends[field * self.shape.lists + i]

    def begin(self, i):
        return self._end(0, i)

    def stop(self, i):
        return self._end(1, i)

    def length(self, item: Item):
        """The number of pages in a chunk."""
        listed = self.stop(item.list) - self.begin(item.list)
        return jnp.minimum(listed - item.chunk * self.shape.pages, self.shape.pages)

    def first_of(self, i) -> Item:
        """The first chunk of list i that belongs to this part."""
        return Item(i, jax.lax.rem(self.part + i, PARTS))

    def skip(self, item: Item) -> Item:
        """The item itself if it exists, or else the next one that does."""
        lists = self.shape.lists

        def absent(item):
            i = jnp.minimum(item.list, lists - 1)
            return (item.list < lists) & (item.chunk * self.shape.pages >= self.stop(i) - self.begin(i))

        return jax.lax.while_loop(absent, lambda item: self.first_of(item.list + 1), item)

    def page_copies(self, item: Item, slot, page) -> list[Any]:
        """The copies for one page of a chunk: K and V of the list's heads, and their scales."""
        shape, refs = self.shape, self.refs
        entry = item.list * shape.max_listed + self.begin(item.list) + item.chunk * shape.pages + page
        place = refs.pages[entry]
        head = pl.ds(jax.lax.rem(item.list, shape.per_row) * shape.heads, shape.heads)
        pools, buffers = (refs.keys, refs.values), (refs.k_buffer, refs.v_buffer)
        pairs = zip(jax.tree.leaves(pools), jax.tree.leaves(buffers), strict=True)
        moves = ((pool.at[place, head], buffer.at[slot, page]) for pool, buffer in pairs)
        return [pltpu.make_async_copy(*pair, refs.input_semaphore.at[slot]) for pair in moves]

    def query_copy(self, item: Item, slot):
        """The copy of the queries of an item's list."""
        refs = self.refs
        return pltpu.make_async_copy(
            refs.q.at[item.list], refs.q_buffer.at[slot], refs.input_semaphore.at[slot]
        )

    def for_copies(self, item: Item, slot, act: Callable) -> None:
        """Start the copies of a chunk, or wait for them."""
        act(self.query_copy(item, slot))

        @pl.loop(0, self.length(item))
        def _(page):
            for copy in self.page_copies(item, slot, page):
                act(copy)

    def output_copies(self, i, part, slot) -> tuple[Any, Any]:
        """The copies of the partial result of list i to the results of the kernel."""
        refs = self.refs

        def copy(buffer, result):
            return pltpu.make_async_copy(buffer.at[slot], result.at[i, part], refs.output_semaphore.at[slot])

        return copy(refs.out_buffer, refs.out), copy(refs.log_buffer, refs.log_sum_exp)

    def wait_for_outputs(self, slot) -> None:
        """Wait until the partial result in a slot is written."""
        for copy in self.output_copies(0, 0, slot):  # waiting depends on the size alone
            _wait(copy)

    def step(self, state):
        """Attend to a chunk while the next one is copied; at the end of a list, write its partial result."""
        item, slot, num_outputs = state
        following = self.skip(Item(item.list, item.chunk + PARTS))

        @pl.when(following.list < self.shape.lists)
        def _():
            self.for_copies(following, _other_slot(slot), lambda copy: copy.start())

        self.for_copies(item, slot, _wait)
        self.attend(item, slot)
        done = following.list != item.list

        @pl.when(done)
        def _():
            self.write(item, num_outputs)

        return following, _other_slot(slot), num_outputs + done.astype(jnp.int32)

    def attend(self, item: Item, slot) -> None:
        """Take a chunk into the online softmax, which the first chunk of a part begins anew."""
        shape, refs = self.shape, self.refs
        num_pages = self.length(item)
        stop = self.begin(item.list) + item.chunk * shape.pages + num_pages
        ends_here = stop >= self.stop(item.list)
        low = jnp.where(item.chunk == 0, self._end(2, item.list), 0)
        high = (num_pages - 1) * shape.page + jnp.where(ends_here, self._end(3, item.list), shape.page)

        @pl.when(item.chunk < PARTS)
        def _():
            refs.top[...] = jnp.full_like(refs.top, NEGATIVE)
            refs.total[...] = jnp.zeros_like(refs.total)
            refs.sum_of[...] = jnp.zeros_like(refs.sum_of)

        k, v = (jax.tree.map(lambda x: x.at[slot], buffer) for buffer in (refs.k_buffer, refs.v_buffer))
        _attend(shape, low, high, refs.q_buffer.at[slot], k, v, refs.top, refs.total, refs.sum_of)

    def write(self, item: Item, num_outputs) -> None:
        """Start to write the partial result of a list; one of two slots is free once its copies are done."""
        refs = self.refs
        to = jax.lax.rem(num_outputs, 2)

        @pl.when(num_outputs >= 2)
        def _():
            self.wait_for_outputs(to)

        _normalise(
            self.shape, refs.top, refs.total, refs.sum_of, refs.out_buffer.at[to], refs.log_buffer.at[to]
        )
        for copy in self.output_copies(item.list, jax.lax.rem(item.chunk, PARTS), to):
            copy.start()


def _attend(shape: Shape, low, high, q, k, v, top, total, sum_of):
    """Update the online softmax with positions `low ≤ p < high` of a chunk, block by block."""
    page, block = shape.page, shape.block
    positions = block * page

    @pl.loop(jax.lax.div(low, positions), jax.lax.div(high + positions - 1, positions))
    def _(step):
        start = step * positions
        edge = (start < low) | (start + positions > high)
        block_pages = pl.ds(step * block, block)

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
            part = product(scale(weight, v).astype(q.dtype), wide(v), shape.position_axis)
            sum_of[head] = sum_of[head] * shrink[:, :1] + part


def _positions(shape, block_axis: int, slot_axis: int, page: int):
    iota = partial(jax.lax.broadcasted_iota, jnp.int32, shape)
    return iota(block_axis) * page + iota(slot_axis)


def _normalise(shape: Shape, top, total, sum_of, out, log_sum_exp):
    """Write the output and the log-sum-exp of a part; that of head h goes to lane h."""
    lane = jax.lax.broadcasted_iota(jnp.int32, log_sum_exp.shape, 1)
    logs = jnp.zeros(log_sum_exp.shape, jnp.float32)
    for head in range(shape.heads):
        out[head] = sum_of[head] / total[head][:, :1]
        logs = jnp.where(lane == head, top[head] + jnp.log(total[head]), logs)
    log_sum_exp[...] = logs
