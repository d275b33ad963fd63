"""What the kernels for GPU share: tiles of K and V in shared memory, and the softmax that takes them in."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .quantised import Quantised
from .reference import NEGATIVE

TILE = 64  # positions that are copied at once, K and V
ROWS = 64  # of a wgmma
SHARED_BYTES = 200 * 1024  # of a thread block, of the 227 KiB that there are
LOG2_E = math.log2(math.e)
COLUMNS = 64  # that are changed or on their way out of shared memory at once
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # of bfloat16


def check(q, keys, values) -> None:
    """Decline what the kernels for GPU do not serve."""
    group, (size, head_dim) = q.shape[2], keys.shape[2:]
    eight_bits = isinstance(keys, Quantised)
    wanted = keys.dtype if eight_bits else jnp.dtype("bfloat16")
    if q.dtype != jnp.bfloat16 or {keys.dtype, values.dtype} != {wanted}:
        raise NotImplementedError(
            f"dtypes {q.dtype}, {keys.dtype}, {values.dtype}: bfloat16 is served, of pages of 8 bits, too"
        )
    if head_dim not in (64, 128, 256):
        raise NotImplementedError(f"head_dim {head_dim}: 64, 128 and 256 are served")
    if size not in (8, 16, 32) and size % 64:
        raise NotImplementedError(f"page_size {size}: 8, 16, 32 and multiples of 64 are served")
    if eight_bits and size % TILE:
        raise NotImplementedError(f"page_size {size}: multiples of {TILE} are served of {keys.dtype}")
    if group > ROWS:
        raise NotImplementedError(f"{group} heads per KV head: at most {ROWS} are served")


def crews_of(head_dim: int) -> int:
    """Warpgroups that compute: a thread holds `head_dim / 2` numbers of the output."""
    return 1 if head_dim > 128 else 2


def slots_of(keys, crews: int, fixed: int) -> int:
    """How many tiles of K and V fit into shared memory beside `fixed` bytes of the kernel's own."""
    eight_bits, head_dim = isinstance(keys, Quantised), keys.shape[-1]
    wide = eight_bits * crews * 2 * TILE * head_dim * 2
    tile = 2 * TILE * (head_dim * keys.dtype.itemsize + eight_bits * 4)
    return (SHARED_BYTES - fixed - wide) // tile


def pools_of(keys, values) -> list[jax.Array]:
    """Keys and values, of 8 bits each followed by its scales `[pool, kv_heads, page_size]`."""
    if not isinstance(keys, Quantised):
        return [keys, values]
    scales = lambda pool: pool.scale.reshape(*pool.shape[:3])
    return [keys.tiles, scales(keys), values.tiles, scales(values)]


def tile_buffers(shape: Any, tiles: int) -> tuple[list, list]:
    """Shared memory for so many tiles of what `pools_of` gives, and for the tiles that crews have widened."""
    buffer = (tiles, TILE, shape.head_dim)
    if not quantised(shape):
        return [plgpu.SMEM(buffer, jnp.bfloat16, transforms=TILED)] * 2, []
    swizzle = min(shape.head_dim, 128)
    eights = (plgpu.TilingTransform((8, swizzle)), plgpu.SwizzleTransform(swizzle))
    kept = [plgpu.SMEM(buffer, shape.dtype, transforms=eights), plgpu.SMEM((tiles, TILE), jnp.float32)]
    return kept * 2, [plgpu.SMEM((shape.crews, *buffer[1:]), jnp.bfloat16, transforms=TILED)] * 2


def quantised(shape: Any) -> bool:
    """Whether tiles are of 8 bits."""
    return shape.dtype != jnp.bfloat16


def positions(shape: Any, size, axis: int):
    """The places along an axis of a product, or of a tile in shared memory."""
    return laid_out(shape, jax.lax.broadcasted_iota(jnp.int32, size, axis), plgpu.Layout.WGMMA)


def nothing(shape: Any):
    """The softmax of nothing: highest score and sum of weights of each row, and the weighted sum."""
    row, whole = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA
    return (
        laid_out(shape, jnp.full((ROWS,), NEGATIVE, jnp.float32), row),
        laid_out(shape, jnp.zeros((ROWS,), jnp.float32), row),
        laid_out(shape, jnp.zeros((ROWS, shape.head_dim), jnp.float32), whole),
    )


def attend(shape: Any, q, tiles, wide, softmax, *, seen, edge, clear):
    """Take a tile of K and V into the softmax of the queries; scores are in units of ln 2.

    q `[ROWS, head_dim]` in shared memory, as are the tiles and the buffers to widen them in, see
    `tile_buffers`. `seen(size, axis)` says which positions, on that axis of an array, are attended to. The
    scalar `edge` says whether there are others that may hold NaN; `clear(v)` makes them zero then.
    """
    top, total, weighted = softmax
    k, v = tiles[0], tiles[len(tiles) // 2]
    if quantised(shape):
        for eight, sixteen in zip((k, v), wide, strict=True):
            widen(shape, eight, sixteen)
        k, v = wide

    pl.when(edge)(lambda: clear(v))
    score = scores(shape, q, k)
    if quantised(shape):
        score = score * over_columns(shape, tiles[1], score.shape)
    if shape.soft_cap is not None:
        # The tanh of the machine is coarse.
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
    return new, total, add_product(shape, weighted, weight.astype(jnp.bfloat16), v)


def leave(shape: Any, empty) -> None:
    """Give a tile back to whoever copies, by its barrier."""
    if shape.plain or quantised(shape):
        plgpu.commit_smem()  # it was read by loads, not by products alone, and copies overtake these
    plgpu.barrier_arrive(empty)


def zero(shape: Any, v, held) -> None:
    """Zero a tile of V where it is not `held(size, axis)`: a weight of zero times NaN would be NaN."""
    size = (TILE, COLUMNS)
    real = held(size, 0)
    for column in range(0, shape.head_dim, COLUMNS):
        part = v.at[:, pl.ds(column, COLUMNS)]
        part[...] = jnp.where(real, part[...], jnp.zeros(size, v.dtype))
    plgpu.commit_smem()


def widen(shape: Any, eight, sixteen) -> None:
    """Copy a tile of 8 bits into one of bfloat16, both in shared memory."""
    width = min(shape.head_dim, 128)
    for column in range(0, shape.head_dim, width):
        part = eight.at[:, pl.ds(column, width)]
        # The layout in which a thread has what it will have of a product, when that is twice as wide.
        x = part[...] if shape.plain else plgpu.load(part, (), layout=plgpu.Layout.WGMMA_UPCAST_2X)
        x = x.astype(jnp.bfloat16) if shape.dtype == jnp.int8 else x.astype(jnp.float32).astype(jnp.bfloat16)
        sixteen[:, pl.ds(column, width)] = laid_out(shape, x, plgpu.Layout.WGMMA)
    plgpu.commit_smem()


def over_columns(shape: Any, scale, size):
    """The scales of a tile, in shared memory, over the columns of a product."""
    layout = plgpu.Layout.WGMMA.reduce(0)
    scale = scale[...] if shape.plain else plgpu.load(scale, (), layout=layout)
    return jax.lax.broadcast_in_dim(scale, size, [1])


def laid_out(shape: Any, x, layout):
    return x if shape.plain else plgpu.layout_cast(x, layout)


def scores(shape: Any, q, k):
    """The product of q and the transpose of k, both in shared memory."""
    if shape.plain:
        return jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)

    def multiply(result):
        plgpu.wgmma(result, q, plgpu.transpose_ref(k, (1, 0)))
        return result[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, TILE), jnp.float32))


def add_product(shape: Any, weighted, weight, v):
    """The sum and the product of weight, in registers, with v, in shared memory."""
    if shape.plain:
        return weighted + jnp.dot(weight, v[...], preferred_element_type=jnp.float32)
    return pl.run_state(lambda result: plgpu.wgmma(result, weight, v))(plgpu.ACC.init(weighted))
