"""Paged attention for decoding on a TPU (Pallas Mosaic): split-KV with double-buffered copies.

Page pools stay in HBM. The tiles of listed pages are copied to VMEM with double buffering: one chunk is
copied while the previous one is attended to, also from one list to the next. The chunks of a list are dealt
alternately to two grid steps, which the two cores of a v4 or v5p run at the same time and a single core one
after the other. Each grid step keeps its part of a list in one online softmax, and the two partial results
are merged at the end. The part that a chunk belongs to depends on its list alone, so a row has the same bits
whatever its neighbours. A head_dim that is not a multiple of 128 lanes is supported if the page size is one:
XLA then lays out the positions along the lanes.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .reference import LANES, NEGATIVE, PartialAttention
from .split_kv import merge_partials, work_lists
from .tpu_softmax import Shape, attend_chunk, normalise
from .tpu_tile import BLOCK, CHUNK_BYTES, SCALARS, check, in_main_memory, pools_as_laid_out, sublanes_of

UNROLLED = 4  # pages whose copies are started together
TOGETHER = 4  # blocks of a step of the softmax
PARTS = 2  # partial results of each list


# Tests replace these two to make faults.
def _other_slot(slot):
    """The slot that the next chunk is copied to."""
    return 1 - slot


def _wait(copy):
    copy.wait()


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
        lists=rows * per_row,
        max_listed=max_listed,
        per_row=per_row,
        heads=heads,
        page=size,
        head_dim=head_dim,
        pages=pages,
        block=block,
        position_axis=position_axis,
        together=max(1, min(TOGETHER, pages // block)),
        soft_cap=soft_cap,
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
        # A page's two copies are started in a third of the instructions without their checks of bounds. What
        # the lists hold is clamped instead; all other indices are bounded by construction.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), disable_bounds_checks=True),
        cost_estimate=pl.CostEstimate(
            flops=4 * group * work,
            bytes_accessed=2 * work * keys.dtype.itemsize,
            transcendentals=group * work // head_dim,
        ),
        name=f"paged_decode_{heads}x{length}",
    )(
        jnp.clip(lists.pages, 0, keys.shape[0] - 1).reshape(-1),
        ends.reshape(-1),
        q,
        *in_main_memory((keys, values)),
    )
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
        work.start_copies(item, 0)

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

    def start_copies(self, item: Item, slot) -> None:
        """Start the copies of a chunk: the queries; K and V of the list's heads, and their scales."""
        shape, refs = self.shape, self.refs
        self.query_copy(item, slot).start()
        first = item.list * shape.max_listed + self.begin(item.list) + item.chunk * shape.pages
        head = pl.ds(jax.lax.rem(item.list, shape.per_row) * shape.heads, shape.heads)
        pools, buffers = (refs.keys, refs.values), (refs.k_buffer, refs.v_buffer)
        pairs = list(zip(jax.tree.leaves(pools), jax.tree.leaves(buffers), strict=True))

        def start(page):
            place = refs.pages[first + page]
            for pool, buffer in pairs:
                source, target = pool.at[place, head], buffer.at[slot, page]
                pltpu.make_async_copy(source, target, refs.input_semaphore.at[slot]).start()

        num_pages = self.length(item)
        rounds = jax.lax.div(num_pages, UNROLLED)

        @pl.loop(0, rounds)
        def _(i):
            for j in range(UNROLLED):
                start(i * UNROLLED + j)

        pl.loop(rounds * UNROLLED, num_pages)(start)

    def wait_for_copies(self, item: Item, slot) -> None:
        """Wait for the copies of a chunk. A wait depends on the number of bytes alone, so few are needed."""
        shape, refs = self.shape, self.refs
        _wait(self.query_copy(item, slot))
        num_pages = self.length(item)
        for power in range(shape.pages.bit_length()):

            @pl.when((num_pages >> power) % 2 == 1)
            def _(pages=1 << power):
                for buffer in jax.tree.leaves((refs.k_buffer, refs.v_buffer)):
                    copied = buffer.at[slot, pl.ds(0, pages)]
                    _wait(pltpu.make_async_copy(copied, copied, refs.input_semaphore.at[slot]))

    def query_copy(self, item: Item, slot):
        """The copy of the queries of an item's list."""
        refs = self.refs
        return pltpu.make_async_copy(
            refs.q.at[item.list], refs.q_buffer.at[slot], refs.input_semaphore.at[slot]
        )

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
            self.start_copies(following, _other_slot(slot))

        self.wait_for_copies(item, slot)
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
        attend_chunk(shape, low, high, refs.q_buffer.at[slot], k, v, refs.top, refs.total, refs.sum_of)

    def write(self, item: Item, num_outputs) -> None:
        """Start to write the partial result of a list; one of two slots is free once its copies are done."""
        refs = self.refs
        to = jax.lax.rem(num_outputs, 2)

        @pl.when(num_outputs >= 2)
        def _():
            self.wait_for_outputs(to)

        normalise(
            self.shape, refs.top, refs.total, refs.sum_of, refs.out_buffer.at[to], refs.log_buffer.at[to]
        )
        for copy in self.output_copies(item.list, jax.lax.rem(item.chunk, PARTS), to):
            copy.start()
