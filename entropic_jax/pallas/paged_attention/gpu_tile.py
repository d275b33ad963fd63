"""Tiles of the GPU kernels: K and V in shared memory, and the online softmax over them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .quantised import Quantised
from .reference import NEGATIVE

TILE = 64  # positions of K and V that are copied together
ROWS = 64  # of a wgmma
SHARED_BYTES = 200 * 1024  # of shared memory for a thread block, which has 227 KiB
LOG2_E = math.log2(math.e)
COLUMNS = 64  # that are modified in, or copied out of, shared memory together
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # of bfloat16


def check(q: Any, keys: Any, values: Any) -> None:
    """Raise NotImplementedError for a case that the GPU kernels do not support.

    Args:
        q, keys, values: as for `decode` and `prefill`.
    """
    group, (size, head_dim) = q.shape[2], keys.shape[2:]
    is_quantised = isinstance(keys, Quantised)
    tile_dtype = keys.dtype if is_quantised else jnp.dtype("bfloat16")
    if q.dtype != jnp.bfloat16 or {keys.dtype, values.dtype} != {tile_dtype}:
        raise NotImplementedError(
            f"dtypes {q.dtype}, {keys.dtype}, {values.dtype}: only bfloat16 is supported, and quantised pages"
        )
    if head_dim not in (64, 128, 256):
        raise NotImplementedError(f"head_dim {head_dim}: only 64, 128 and 256 are supported")
    if size not in (8, 16, 32) and size % 64:
        raise NotImplementedError(f"page_size {size}: only 8, 16, 32 and multiples of 64 are supported")
    if is_quantised and size % TILE:
        raise NotImplementedError(
            f"page_size {size}: only multiples of {TILE} are supported for {keys.dtype}"
        )
    if group > ROWS:
        raise NotImplementedError(f"{group} heads per KV head: at most {ROWS} are supported")


def num_consumers(head_dim: int) -> int:
    """The number of consumer warpgroups: each thread holds `head_dim / 2` numbers of the output."""
    return 1 if head_dim > 128 else 2


def num_tile_slots(keys: Any, consumers: int, fixed: int) -> int:
    """How many tiles of K and V fit into shared memory.

    Args:
        keys: page pool.
        consumers: warpgroups that widen tiles of their own.
        fixed: bytes of the other buffers.
    """
    is_quantised, head_dim = isinstance(keys, Quantised), keys.shape[-1]
    widened_tiles = is_quantised * consumers * 2 * TILE * head_dim * 2
    tile = 2 * TILE * (head_dim * keys.dtype.itemsize + is_quantised * 4)
    return (SHARED_BYTES - fixed - widened_tiles) // tile


def copied_arrays(keys: Any, values: Any) -> list[jax.Array]:
    """The arrays to copy tiles from: keys and values, each followed by its scales if it is quantised."""
    if not isinstance(keys, Quantised):
        return [keys, values]
    scales = lambda pool: pool.scale.reshape(*pool.shape[:3])
    return [keys.tiles, scales(keys), values.tiles, scales(values)]


def tile_buffers(shape: Any, tiles: int) -> tuple[list, list]:
    """Shared memory for tiles of the `copied_arrays`, and for the tiles that each consumer widens."""
    buffer = (tiles, TILE, shape.head_dim)
    if not quantised(shape):
        return [plgpu.SMEM(buffer, jnp.bfloat16, transforms=TILED)] * 2, []
    swizzle = min(shape.head_dim, 128)
    eights = (plgpu.TilingTransform((8, swizzle)), plgpu.SwizzleTransform(swizzle))
    stored_tiles = [
        plgpu.SMEM(buffer, shape.dtype, transforms=eights),
        plgpu.SMEM((tiles, TILE), jnp.float32),
    ]
    return stored_tiles * 2, [plgpu.SMEM((shape.consumers, *buffer[1:]), jnp.bfloat16, transforms=TILED)] * 2


def quantised(shape: Any) -> bool:
    """Whether tiles have 8 bits."""
    return shape.dtype != jnp.bfloat16


def positions(shape: Any, size: Any, axis: int) -> Any:
    """Indices along an axis of a product, or of a tile in shared memory.

    Args:
        shape: the static parameters of the kernel.
        size: the size of the tile, rows and columns.
        axis: the axis that the indices count along.
    """
    return _cast_layout(shape, jax.lax.broadcasted_iota(jnp.int32, size, axis), plgpu.Layout.WGMMA)


def empty_softmax(shape: Any) -> Any:
    """The initial state of an online softmax: maximum and total of each row, and the weighted sum."""
    row, full_layout = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA
    return (
        _cast_layout(shape, jnp.full((ROWS,), NEGATIVE, jnp.float32), row),
        _cast_layout(shape, jnp.zeros((ROWS,), jnp.float32), row),
        _cast_layout(shape, jnp.zeros((ROWS, shape.head_dim), jnp.float32), full_layout),
    )


def attend(
    shape: Any, q: Any, tiles: Any, widened_tiles: Any, softmax: Any, *, seen: Any, edge: Any, clear: Any
) -> Any:
    """Update an online softmax with a tile of K and V; scores are in units of ln 2.

    Args:
        shape: the static parameters of the kernel.
        q: queries `[ROWS, head_dim]` in shared memory.
        tiles: the tiles of the `copied_arrays`, in shared memory.
        widened_tiles: buffers for widened tiles of K and V, see `tile_buffers`.
        softmax: its state, see `empty_softmax`.
        seen: `seen(size, axis)` says which positions, on that axis of an array, are attended to.
        edge: bool scalar, whether other positions may hold NaN.
        clear: `clear(v)` zeroes those positions of a tile of V.
    """
    top, total, weighted = softmax
    k, v = tiles[0], tiles[len(tiles) // 2]
    if quantised(shape):
        for narrow_tile, wide_tile in zip((k, v), widened_tiles, strict=True):
            widen(shape, narrow_tile, wide_tile)
        k, v = widened_tiles

    pl.when(edge)(lambda: clear(v))
    score = _scores(shape, q, k)
    if quantised(shape):
        score = score * over_columns(shape, tiles[1], score.shape)
    if shape.soft_cap is not None:
        # The tanh instruction is not precise enough.
        score = shape.soft_cap - 2 * shape.soft_cap / (1.0 + jnp.exp2(score * (2 * LOG2_E / shape.soft_cap)))
    mask = seen(score.shape, 1)
    score = jnp.where(mask, score * LOG2_E, NEGATIVE)
    over_rows = lambda x, like: jax.lax.broadcast_in_dim(x, like.shape, [0])
    new = jnp.maximum(top, score.max(axis=1))
    weight = jnp.where(mask, jnp.exp2(score - over_rows(new, score)), 0.0)
    shrink = jnp.exp2(top - new)
    total = total * shrink + weight.sum(axis=1)
    weighted = weighted * over_rows(shrink, weighted)
    if quantised(shape):
        weight = jnp.where(mask, weight * over_columns(shape, tiles[3], weight.shape), 0.0)
    return new, total, _add_product(shape, weighted, weight.astype(jnp.bfloat16), v)


def release_tile(shape: Any, empty: Any) -> None:
    """Return a tile to the producer warpgroup, by its barrier."""
    if shape.interpreted or quantised(shape):
        plgpu.commit_smem()  # loads read it, not products alone, and a copy could overtake them
    plgpu.barrier_arrive(empty)


def zero_outside(shape: Any, v: Any, is_inside: Any) -> None:
    """Zero a tile of V elsewhere: a weight of zero times NaN would be NaN.

    Args:
        shape: the static parameters of the kernel.
        v: tile of V in shared memory.
        is_inside: `is_inside(size, axis)` says which positions are attended to.
    """
    size = (TILE, COLUMNS)
    inside = is_inside(size, 0)
    for column in range(0, shape.head_dim, COLUMNS):
        part = v.at[:, pl.ds(column, COLUMNS)]
        part[...] = jnp.where(inside, part[...], jnp.zeros(size, v.dtype))
    plgpu.commit_smem()


def widen(shape: Any, narrow_tile: Any, wide_tile: Any) -> None:
    """Convert a tile of 8 bits to one of bfloat16.

    Args:
        shape: the static parameters of the kernel.
        narrow_tile: the tile of 8 bits, in shared memory.
        wide_tile: is filled, in shared memory.
    """
    width = min(shape.head_dim, 128)
    for column in range(0, shape.head_dim, width):
        part = narrow_tile.at[:, pl.ds(column, width)]
        # In this layout a thread holds the elements that it has of a product once they are twice as wide.
        x = part[...] if shape.interpreted else plgpu.load(part, (), layout=plgpu.Layout.WGMMA_UPCAST_2X)
        x = x.astype(jnp.bfloat16) if shape.dtype == jnp.int8 else x.astype(jnp.float32).astype(jnp.bfloat16)
        wide_tile[:, pl.ds(column, width)] = _cast_layout(shape, x, plgpu.Layout.WGMMA)
    plgpu.commit_smem()


def over_columns(shape: Any, scale: Any, size: Any) -> Any:
    """The scales of a tile, in shared memory, broadcast over the rows of a product.

    Args:
        shape: the static parameters of the kernel.
        scale: a number per column.
        size: the size of the product, rows and columns.
    """
    layout = plgpu.Layout.WGMMA.reduce(0)
    scale = scale[...] if shape.interpreted else plgpu.load(scale, (), layout=layout)
    return jax.lax.broadcast_in_dim(scale, size, [1])


def _cast_layout(shape: Any, x: Any, layout: Any) -> Any:
    return x if shape.interpreted else plgpu.layout_cast(x, layout)


def _scores(shape: Any, q: Any, k: Any) -> Any:
    """The product of q and the transpose of k, both in shared memory."""
    if shape.interpreted:
        return jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)

    def multiply(result):
        plgpu.wgmma(result, q, plgpu.transpose_ref(k, (1, 0)))
        return result[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, TILE), jnp.float32))


def _add_product(shape: Any, weighted: Any, weight: Any, v: Any) -> Any:
    """The sum and the product of weight, in registers, with v, in shared memory."""
    if shape.interpreted:
        return weighted + jnp.dot(weight, v[...], preferred_element_type=jnp.float32)
    return pl.run_state(lambda result: plgpu.wgmma(result, weight, v))(plgpu.ACC.init(weighted))
