"""Write of one key and one value per row on a TPU (Pallas Mosaic), in place, with the page summaries.

The contract is that of `write` in the package's docstring; pools of 8 bits store the vectors quantised. A row
whose page is the last of the pool, the scratch page, writes nothing. Apart from that page, no two rows may
write to the same page. The kernel reads the smallest block that can be copied, a tile of rows of every head,
changes it and writes it back, for as many rows at the same time as VMEM holds.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .quantised import Quantised, quantise, stored
from .tpu_tile import LANES, check, in_main_memory, sublanes_of, tiles_of

BUFFER_BYTES = 1 << 22  # of VMEM for the rows that are written at the same time


def write(
    tiles: Any, summaries: Any, k: jax.Array, v: jax.Array, page: jax.Array, slot: jax.Array
) -> tuple[Any, Any]:
    """See the package for the contract."""
    keys, values = tiles
    *key_summaries, value_norm = summaries
    check(k, keys, values)
    rows, kv_heads, head_dim = k.shape
    if head_dim % LANES:
        raise NotImplementedError(
            f"head_dim {head_dim} is not a multiple of {LANES}: XLA writes whole pages in place"
        )
    sublanes = sublanes_of(keys.dtype)
    key, value = stored(k, keys), stored(v, values)
    bytes_of_row = kv_heads * head_dim * (2 * sublanes * keys.dtype.itemsize + 3 * 4)
    rows_per_step = max(1, min(rows, BUFFER_BYTES // bytes_of_row))
    padded = -rows % rows_per_step
    bin_page = keys.shape[0] - 1

    def pad(x, value=0):
        return jnp.pad(x, ((0, padded), *((0, 0),) * (x.ndim - 1)), constant_values=value)

    # The new rows of tiles, their scales, and the keys for the summaries.
    new = [pad(x)[:, :, None] for x in (k, v)]
    scales = []
    if isinstance(keys, Quantised):
        parts = [quantise(x, keys.dtype) for x in (k, v)]
        new = [pad(tile)[:, :, None] for tile, _ in parts]
        new += [pad(scale)[:, :, None, None] for _, scale in parts]
        scales = [keys.scale, values.scale]
    new.append(pad(key))

    def per_step(x):
        return pl.BlockSpec((rows_per_step, *x.shape[1:]), lambda i, *_: (i, *(0,) * (x.ndim - 1)))

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    pools = (tiles_of(keys), tiles_of(values), *scales, *key_summaries)
    tile = pltpu.VMEM((rows_per_step, kv_heads, sublanes, head_dim), keys.dtype)
    scale = [pltpu.VMEM((rows_per_step, *x.shape[1:]), x.dtype) for x in scales]
    summary = pltpu.VMEM((rows_per_step, kv_heads, head_dim), jnp.float32)
    semaphores = pltpu.SemaphoreType.DMA((2, rows_per_step))
    *written, key_min, key_max, key_sum = pl.pallas_call(
        partial(_kernel, rows_per_step, bin_page),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=((rows + padded) // rows_per_step,),
            in_specs=[*map(per_step, new), *[anywhere] * len(pools)],
            out_specs=[anywhere] * len(pools),
            scratch_shapes=[tile, tile, *scale, summary, summary, summary, semaphores],
        ),
        input_output_aliases={2 + len(new) + i: i for i in range(len(pools))},
        name="paged_write",
    )(pad(page, bin_page), pad(slot), *new, *in_main_memory(pools))
    if scales:
        written = [Quantised(tiles, scale) for tiles, scale in zip(written[:2], written[2:], strict=True)]
    norm = jnp.linalg.norm(value, axis=-1)
    norm = jnp.where(slot[:, None] == 0, norm, jnp.maximum(value_norm[page], norm))
    return tuple(written), (key_min, key_max, key_sum, value_norm.at[page].set(norm))


def _kernel(rows_per_step, bin_page, page, slot, *refs):
    *refs, semaphores = refs
    num_pools = (len(refs) + 2) // 4  # every pool is read, written and in VMEM
    new, pools, buffers = refs[: num_pools - 2], refs[-2 * num_pools : -num_pools], refs[-num_pools:]
    *new, key = new
    sublanes = buffers[0].shape[2]
    start = pl.program_id(0) * rows_per_step

    def copies(i, back: bool):
        page_number, group = page[start + i], jax.lax.div(slot[start + i], sublanes) * sublanes
        for pool, buffer in zip(pools, buffers, strict=True):
            part = (page_number, slice(None), pl.ds(pl.multiple_of(group, sublanes), sublanes))
            pool_part = (
                pool.at[part] if buffer.shape[2:] == (sublanes, pool.shape[-1]) else pool.at[page_number]
            )
            source, target = (buffer.at[i], pool_part) if back else (pool_part, buffer.at[i])
            yield pltpu.make_async_copy(source, target, semaphores.at[int(back), i])

    def each_row(phase):
        @pl.loop(0, rows_per_step)
        def _(i):
            @pl.when(page[start + i] != bin_page)
            def _():
                phase(i)

    def fetch(i):
        for copy in copies(i, back=False):
            copy.start()

    def change(i):
        for copy in copies(i, back=False):
            _wait(copy)
        # The slot is a row of a tile, and a column of the scales of a page.
        at = jax.lax.rem(slot[start + i], sublanes), slot[start + i]
        for number, (buffer, x) in enumerate(zip(buffers, new, strict=False)):
            old, axis = buffer[i].astype(jnp.float32), 1 + number // 2
            in_slot = jax.lax.broadcasted_iota(jnp.int32, old.shape, axis) == at[axis - 1]
            buffer[i] = jnp.where(in_slot, x[i].astype(jnp.float32), old).astype(buffer.dtype)
        begins_page = slot[start + i] == 0
        for buffer, fold in zip(buffers[-3:], (jnp.minimum, jnp.maximum, jnp.add), strict=True):
            # A page that begins holds what its last owner left, or NaN.
            buffer[i] = jnp.where(begins_page, key[i], fold(buffer[i], key[i]))
        for copy in copies(i, back=True):
            copy.start()

    def finish(i):
        for copy in copies(i, back=True):
            _wait(copy)

    for phase in (fetch, change, finish):
        each_row(phase)


def _wait(copy):
    copy.wait()
