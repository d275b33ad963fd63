"""The write of one new position per row, and of the page summaries, in place, on a TPU (Pallas Mosaic).

    write((keys, values), (key_min, key_max, key_sum, value_norm), k, v, page, slot)

* keys, values `[pool, kv_heads, page_size, head_dim]`, the summaries as in `cache.Layer`,
* k, v `[rows, kv_heads, head_dim]` in the dtype of the pools,
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

from .tpu import check, sublanes_of

BUFFER_BYTES = 1 << 22  # of VMEM: as many rows at once


def write(tiles, summaries, k, v, page, slot):
    """See above."""
    keys, values = tiles
    *key_summaries, value_norm = summaries
    check(k, keys, values)
    rows, kv_heads, head_dim = k.shape
    sublanes = sublanes_of(k.dtype)
    bytes_of_row = kv_heads * head_dim * (2 * sublanes * k.dtype.itemsize + 3 * 4)
    at_once = max(1, min(rows, BUFFER_BYTES // bytes_of_row))
    padded = -rows % at_once
    bin_page = keys.shape[0] - 1
    pad = lambda x, value=0: jnp.pad(x, ((0, padded), *((0, 0),) * (x.ndim - 1)), constant_values=value)
    # As rows to be spread over the rows of a tile, and as what the summaries take in.
    new = (pad(k)[:, :, None], pad(v)[:, :, None], pad(k).astype(jnp.float32))
    per_step = lambda x: pl.BlockSpec((at_once, *x.shape[1:]), lambda i, *_: (i, *(0,) * (x.ndim - 1)))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    pools = (keys, values, *key_summaries)
    tile = pltpu.VMEM((at_once, kv_heads, sublanes, head_dim), k.dtype)
    summary = pltpu.VMEM((at_once, kv_heads, head_dim), jnp.float32)
    *written, key_min, key_max, key_sum = pl.pallas_call(
        partial(_kernel, at_once, bin_page),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=((rows + padded) // at_once,),
            in_specs=[*map(per_step, new), *[anywhere] * len(pools)],
            out_specs=[anywhere] * len(pools),
            scratch_shapes=[tile, tile, summary, summary, summary, pltpu.SemaphoreType.DMA((2, at_once))],
        ),
        input_output_aliases={2 + len(new) + i: i for i in range(len(pools))},
        name="paged_write",
    )(pad(page, bin_page), pad(slot), *new, *pools)
    norm = jnp.linalg.norm(v.astype(jnp.float32), axis=-1)
    norm = jnp.where(slot[:, None] == 0, norm, jnp.maximum(value_norm[page], norm))
    return tuple(written), (key_min, key_max, key_sum, value_norm.at[page].set(norm))


def _kernel(at_once, bin_page, page, slot, k, v, key, *refs):
    pools, buffers, moved = refs[5:10], refs[10:15], refs[15]
    sublanes = buffers[0].shape[2]
    start = pl.program_id(0) * at_once

    def copies(i, back: bool):
        place, group = page[start + i], jax.lax.div(slot[start + i], sublanes) * sublanes
        for pool, buffer in zip(pools, buffers, strict=True):
            part = (place, slice(None), pl.ds(pl.multiple_of(group, sublanes), sublanes))
            there = pool.at[part] if len(pool.shape) == 4 else pool.at[place]
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
        at = jax.lax.rem(slot[start + i], sublanes)
        for buffer, new in zip(buffers[:2], (k, v), strict=True):
            old = buffer[i].astype(jnp.float32)
            mine = jax.lax.broadcasted_iota(jnp.int32, old.shape, 1) == at
            buffer[i] = jnp.where(mine, new[i].astype(jnp.float32), old).astype(buffer.dtype)
        fresh = slot[start + i] == 0
        for buffer, fold in zip(buffers[2:], (jnp.minimum, jnp.maximum, jnp.add), strict=True):
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
