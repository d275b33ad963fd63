"""The write of one new position per row, and of the page summaries, in place, on a TPU (Pallas Mosaic).

    write((keys, values), (key_min, key_max, key_sum, value_norm), k, v, page, slot)

* keys, values `[pool, kv_heads, page_size, head_dim]`, the summaries as in `cache.Layer`,
* k, v `[rows, kv_heads, head_dim]` in the dtype of the pools; those of 8 bits store it quantised,
* page, slot int32 `[rows]`: where in the pool; a row whose page is the last of the pool, the bin, writes
  nothing. No two rows write to the same page otherwise.

Returns both tuples as written; slot 0 begins a page, whose summaries start anew. What the smallest copy
holds, a tile of rows of every head, is read, changed and written back; all rows are under way at once.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .quantised import Quantised, quantise, stored
from .tpu import LANES, check, sublanes_of, tiles_of

BUFFER_BYTES = 1 << 22  # of VMEM: as many rows at once


def write(tiles, summaries, k, v, page, slot):
    """See above."""
    keys, values = tiles
    *key_summaries, value_norm = summaries
    check(k, keys, values)
    rows, kv_heads, head_dim = k.shape
    if head_dim % LANES:
        raise NotImplementedError(
            f"head_dim {head_dim} is no multiple of {LANES}: XLA writes whole pages in place"
        )
    sublanes = sublanes_of(keys.dtype)
    key, value = stored(k, keys), stored(v, values)
    bytes_of_row = kv_heads * head_dim * (2 * sublanes * keys.dtype.itemsize + 3 * 4)
    at_once = max(1, min(rows, BUFFER_BYTES // bytes_of_row))
    padded = -rows % at_once
    bin_page = keys.shape[0] - 1
    pad = lambda x, value=0: jnp.pad(x, ((0, padded), *((0, 0),) * (x.ndim - 1)), constant_values=value)
    # As rows to be spread over the rows of a tile, their scales, and as what the summaries take in.
    new = [pad(x)[:, :, None] for x in (k, v)]
    scales = []
    if isinstance(keys, Quantised):
        parts = [quantise(x, keys.dtype) for x in (k, v)]
        new = [pad(tile)[:, :, None] for tile, _ in parts]
        new += [pad(scale)[:, :, None, None] for _, scale in parts]
        scales = [keys.scale, values.scale]
    new.append(pad(key))
    per_step = lambda x: pl.BlockSpec((at_once, *x.shape[1:]), lambda i, *_: (i, *(0,) * (x.ndim - 1)))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    pools = (tiles_of(keys), tiles_of(values), *scales, *key_summaries)
    tile = pltpu.VMEM((at_once, kv_heads, sublanes, head_dim), keys.dtype)
    scale = [pltpu.VMEM((at_once, *x.shape[1:]), x.dtype) for x in scales]
    summary = pltpu.VMEM((at_once, kv_heads, head_dim), jnp.float32)
    moved = pltpu.SemaphoreType.DMA((2, at_once))
    *written, key_min, key_max, key_sum = pl.pallas_call(
        partial(_kernel, at_once, bin_page),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=((rows + padded) // at_once,),
            in_specs=[*map(per_step, new), *[anywhere] * len(pools)],
            out_specs=[anywhere] * len(pools),
            scratch_shapes=[tile, tile, *scale, summary, summary, summary, moved],
        ),
        input_output_aliases={2 + len(new) + i: i for i in range(len(pools))},
        name="paged_write",
    )(pad(page, bin_page), pad(slot), *new, *pools)
    if scales:
        written = [Quantised(tiles, scale) for tiles, scale in zip(written[:2], written[2:], strict=True)]
    norm = jnp.linalg.norm(value, axis=-1)
    norm = jnp.where(slot[:, None] == 0, norm, jnp.maximum(value_norm[page], norm))
    return tuple(written), (key_min, key_max, key_sum, value_norm.at[page].set(norm))


def _kernel(at_once, bin_page, page, slot, *refs):
    *refs, moved = refs
    many = (len(refs) + 2) // 4  # pools: read, written and in VMEM; all but two summaries have something new
    new, pools, buffers = refs[: many - 2], refs[-2 * many : -many], refs[-many:]
    *new, key = new
    sublanes = buffers[0].shape[2]
    start = pl.program_id(0) * at_once

    def copies(i, back: bool):
        place, group = page[start + i], jax.lax.div(slot[start + i], sublanes) * sublanes
        for pool, buffer in zip(pools, buffers, strict=True):
            part = (place, slice(None), pl.ds(pl.multiple_of(group, sublanes), sublanes))
            there = pool.at[part] if buffer.shape[2:] == (sublanes, pool.shape[-1]) else pool.at[place]
            source, target = (buffer.at[i], there) if back else (there, buffer.at[i])
            yield pltpu.make_async_copy(source, target, moved.at[int(back), i])

    def each_row(do):
        @pl.loop(0, at_once)
        def _(i):
            @pl.when(page[start + i] != bin_page)
            def _():
                do(i)

    def fetch(i):
        for copy in copies(i, back=False):
            copy.start()

    def change(i):
        for copy in copies(i, back=False):
            _await(copy)
        # In a tile the slot is a row, among the scales of a page a column.
        at = jax.lax.rem(slot[start + i], sublanes), slot[start + i]
        for number, (buffer, x) in enumerate(zip(buffers, new, strict=False)):
            old, axis = buffer[i].astype(jnp.float32), 1 + number // 2
            mine = jax.lax.broadcasted_iota(jnp.int32, old.shape, axis) == at[axis - 1]
            buffer[i] = jnp.where(mine, x[i].astype(jnp.float32), old).astype(buffer.dtype)
        fresh = slot[start + i] == 0
        for buffer, fold in zip(buffers[-3:], (jnp.minimum, jnp.maximum, jnp.add), strict=True):
            # A page that begins holds what the last owner left, or NaN.
            buffer[i] = jnp.where(fresh, key[i], fold(buffer[i], key[i]))
        for copy in copies(i, back=True):
            copy.start()

    def finish(i):
        for copy in copies(i, back=True):
            _await(copy)

    for do in (fetch, change, finish):
        each_row(do)


def _await(copy):
    copy.wait()
