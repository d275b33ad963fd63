"""Tiles of paged attention on a TPU: what decode, prefill and write on a TPU have in common."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from .quantised import Quantised
from .reference import LANES

CHUNK_BYTES = 1 << 21  # of K and V together, in one of the two buffers in VMEM
BLOCK = 512  # positions per step of the softmax
SCALARS = 1 << 19  # bytes of SMEM for the work lists; more rows go into another call


def in_main_memory(pools: Any) -> Any:
    """The operands of a kernel, kept out of VMEM.

    Without it, XLA copies a pool that fits into VMEM there and back around the kernel, of which the kernel
    would have read a few pages.
    """
    return jax.tree.map(lambda x: pltpu.with_memory_space_constraint(x, pltpu.HBM), pools)


def check(q: jax.Array, keys: Any, values: Any) -> None:
    """Raise NotImplementedError for a case that the TPU kernels do not support.

    Args:
        q, keys, values: as for `decode` and `prefill`.
    """
    size, head_dim = keys.shape[2:]
    quantised = isinstance(keys, Quantised)
    expected = keys.dtype if quantised else q.dtype
    if q.dtype not in (jnp.float32, jnp.bfloat16) or {keys.dtype, values.dtype} != {expected}:
        raise NotImplementedError(
            f"dtypes {q.dtype}, {keys.dtype}, {values.dtype}: all float32, all bfloat16, or quantised pages"
        )
    if quantised and size % LANES:
        raise NotImplementedError(f"page_size {size} is not a multiple of {LANES}, which {keys.dtype} needs")
    if head_dim % LANES and size % LANES:
        raise NotImplementedError(
            f"head_dim {head_dim} and page_size {size}: neither is a multiple of {LANES}, "
            "and each call would copy the whole pool"
        )
    name, other = ("head_dim", head_dim) if head_dim % LANES else ("page_size", size)
    if other % (least := sublanes_of(keys.dtype)):
        raise NotImplementedError(f"{name} {other} is not a multiple of {least}, which {keys.dtype} needs")


def sublanes_of(dtype: Any) -> int:
    """Rows of a tile of the registers."""
    return 32 // dtype.itemsize


def pools_as_laid_out(keys: Any, values: Any) -> Any:
    """The axis of a tile that counts positions, and the pools with their axes in the order of memory.

    If head_dim is not a multiple of the lanes, XLA avoids padding by laying out the positions along the
    lanes. To swap the axes accordingly is free; the other order would cost a copy of the pool.
    """
    position_axis = int(keys.shape[3] % LANES != 0)

    def swap(x):
        return x.swapaxes(2, 3) if position_axis else x

    def as_laid_out(pool):
        return pool._replace(tiles=swap(pool.tiles)) if isinstance(pool, Quantised) else swap(pool)

    return position_axis, (as_laid_out(keys), as_laid_out(values))


def tiles_of(pool: Any) -> Any:
    """The tiles of a buffer of pages, without their scales."""
    return pool.tiles if isinstance(pool, Quantised) else pool


def joined(tiles: Any, position_axis: int) -> Any:
    """Tiles `[pages, …]` concatenated along their axis of positions."""
    return jnp.concatenate(list(tiles), 1) if position_axis else tiles.reshape(-1, tiles.shape[2])


def scaled(x: Any, pool: Any, seen: Any, start: Any, pages: int, head: int) -> Any:
    """Multiplies `x` by the scales of a buffer's pages.

    Args:
        x: `[…, positions]`.
        pool: buffer of pages; without scales unless it is `Quantised`.
        seen: bool, the positions that are attended to; x is 0 elsewhere.
        start: the first page.
        pages: how many.
        head: KV head.
    """
    if not isinstance(pool, Quantised):
        return x
    return jnp.where(seen, x * jnp.concatenate([pool.scale[start + i, head] for i in range(pages)], 1), 0.0)


def product(a: Any, b: Any, axis: int) -> Any:
    """A matrix product over axis 1 of a, in full precision for float32.

    Args:
        a, b: matrices.
        axis: the axis of b, over which it is summed.
    """
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
