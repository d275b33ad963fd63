"""Grouped matrix products on an NVIDIA Hopper GPU (Pallas Mosaic GPU, sm_90a): warp-specialised.

The rows of each group are copied to places that begin at a multiple of a tile's 64 rows, so that a tile has
rows of one group and its results are stored as a whole. A thread block multiplies a tile by a block of
columns of the group's matrix: one warpgroup copies both into shared memory (TMA), as far ahead as there are
slots, the other multiplies (wgmma). Narrow weights are widened in shared memory. The matrix of a group
without rows is not read, where XLA's grouped product on GPUs multiplies every row by every matrix.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..paged_attention.gpu_tile import ROWS, TILED, over_columns, release_tile, widen

DEPTH = 64  # inputs of a tile of rows, and of one of a weight
WIDTHS = (128, 64)  # columns of a block: the first that divides those of a matrix
SLOTS = 4  # in shared memory: two thread blocks fit on a multiprocessor
WEIGHT_DTYPES = ("bfloat16", "int8", "float8_e4m3fn")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The static parameters of the kernel."""

    steps: int  # tiles of inputs
    slots: int
    dtype: Any  # of the weight
    head_dim: int  # columns of a block, by the name that tiles of pages have for them
    interpreted: bool  # whether products and layouts are those of the interpreter


def grouped_matmul(
    x: jax.Array,
    sizes: jax.Array,
    weights: tuple[jax.Array, ...],
    scales: tuple[jax.Array, ...],
    first: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """The contract is in the package's docstring.

    Args:
        x: the rows.
        sizes: rows of each group.
        weights: stacks of matrices.
        scales: the scales of narrow ones.
        first: the matrix of the first group.
        interpret: parameters of the GPU interpreter, to run on any platform.
    """
    for weight in weights:
        check(x, weight)
    rows = x.shape[0]
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts, tiles = ends - sizes, -(-sizes // ROWS)
    tile_ends = jnp.cumsum(tiles, dtype=jnp.int32)
    most = min(sizes.shape[0], rows) + rows // ROWS
    number = jnp.minimum(jnp.arange(most, dtype=jnp.int32), jnp.maximum(tile_ends[-1] - 1, 0))
    group = _count(tile_ends, number)
    source = starts[group] + ROWS * (number - tile_ends[group] + tiles[group])
    places = x[jnp.minimum(source[:, None] + jnp.arange(ROWS), rows - 1)]
    matrix = group + first
    in_use = jnp.arange(most) < tile_ends[-1]
    results = []
    for weight, scale in zip(weights, scales or [None] * len(weights), strict=True):
        of_tiles = [] if scale is None else [scale[matrix]]
        results.append(_products(places, matrix, in_use.astype(jnp.int32), weight, of_tiles, interpret))
    row = jnp.arange(rows, dtype=jnp.int32)
    of_row = _count(ends, row)
    place = ROWS * (tile_ends[of_row] - tiles[of_row]) + row - starts[of_row]
    return tuple(result.reshape(most * ROWS, -1)[place] for result in results)


def _count(ends: jax.Array, number: jax.Array) -> jax.Array:
    """The group that each number belongs to; numbers behind the last group count as the last one's."""
    return jnp.minimum(jnp.sum(ends[:, None] <= number, axis=0, dtype=jnp.int32), ends.shape[0] - 1)


def check(x: jax.Array, weight: jax.Array) -> None:
    """Raise NotImplementedError for operands that the kernel does not multiply.

    Args:
        x: the rows.
        weight: a stack of matrices.
    """
    if x.dtype != jnp.bfloat16 or weight.dtype.name not in WEIGHT_DTYPES:
        accepted = ", ".join(WEIGHT_DTYPES)
        raise NotImplementedError(
            f"{x.dtype} times {weight.dtype}: only bfloat16 times one of {accepted} is supported"
        )
    if weight.ndim != 3:
        raise NotImplementedError("only stacks [matrices, inputs, outputs] are supported")
    inputs, outputs = weight.shape[1:]
    if inputs % DEPTH or outputs % WIDTHS[-1]:
        raise NotImplementedError(
            f"{inputs} inputs and {outputs} outputs: only multiples of {DEPTH} are supported"
        )


def _products(places, matrix, in_use, weight, scales, interpret) -> jax.Array:
    """The products of all tiles, `[tiles, ROWS, outputs]`.

    Args:
        places: the tiles of rows, `[tiles, ROWS, inputs]`.
        matrix: the number of the matrix of each tile.
        in_use: int32, above 0 for tiles that have rows.
        weight: a stack of matrices.
        scales: empty, or the scales of each tile's matrix, `[tiles, outputs]`.
        interpret: see `grouped_matmul`.
    """
    tiles, _, inputs = places.shape
    shape = Shape(
        steps=inputs // DEPTH,
        slots=min(SLOTS, inputs // DEPTH),
        dtype=weight.dtype,
        head_dim=next(width for width in WIDTHS if weight.shape[2] % width == 0),
        interpreted=interpret is not None,
    )
    narrow, width = weight.dtype != jnp.bfloat16, shape.head_dim
    eights = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width))
    wide = plgpu.SMEM((DEPTH, width), jnp.bfloat16, transforms=TILED)
    return plgpu.kernel(
        partial(_kernel, shape, len(scales)),
        out_type=jax.ShapeDtypeStruct((tiles, ROWS, weight.shape[2]), places.dtype),
        grid=(tiles, weight.shape[2] // width),
        grid_names=("tile", "block"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((shape.slots, ROWS, DEPTH), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((shape.slots, DEPTH, width), weight.dtype, transforms=eights if narrow else TILED),
            plgpu.SMEM((ROWS, width), jnp.bfloat16, transforms=TILED),  # results
            plgpu.Barrier(num_arrivals=2, num_barriers=shape.slots),
            plgpu.Barrier(num_arrivals=1, num_barriers=shape.slots),
            *([wide, plgpu.SMEM((width,), jnp.float32), plgpu.Barrier(num_arrivals=1)] if narrow else []),
        ],
        interpret=interpret,
        kernel_name="grouped_matmul",
    )(matrix, in_use, places, weight, *scales)


def _kernel(shape: Shape, num_scales: int, matrix, in_use, places, weight, *refs):
    scales, (out, x_tiles, weight_tiles, result, full, empty, *widened) = refs[:num_scales], refs[num_scales:]
    warpgroup = jax.lax.axis_index("warpgroup")
    tile, block = jax.lax.axis_index("tile"), jax.lax.axis_index("block")
    width = shape.head_dim
    columns = pl.ds(block * width, width)
    in_use = in_use[tile] > 0

    @pl.when(in_use & (warpgroup == 1))
    def _produce():
        @pl.loop(0, shape.steps)
        def _(step):
            slot = jax.lax.rem(step, shape.slots)

            @pl.when(step >= shape.slots)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            inputs = pl.ds(step * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(places.at[tile, :, inputs], x_tiles.at[slot], full.at[slot])
            part = weight.at[matrix[tile], inputs, columns]
            plgpu.copy_gmem_to_smem(part, weight_tiles.at[slot], full.at[slot])

        for slot in range(shape.slots):  # until all have been read
            plgpu.barrier_wait(empty.at[slot])

    @pl.when(in_use & (warpgroup == 0))
    def _multiply():
        if widened:
            plgpu.copy_gmem_to_smem(scales[0].at[tile, columns], widened[1], widened[2])

        def step(number, sums):
            slot = jax.lax.rem(number, shape.slots)
            plgpu.barrier_wait(full.at[slot])
            w = weight_tiles.at[slot]
            if widened:
                widen(shape, w, widened[0])
                w = widened[0]
            sums = _add_product(shape, sums, x_tiles.at[slot], w)
            release_tile(shape, empty.at[slot])
            return sums

        zeros = jnp.zeros((ROWS, width), jnp.float32)
        zeros = zeros if shape.interpreted else plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
        sums = jax.lax.fori_loop(0, shape.steps, step, zeros)
        if widened:
            plgpu.barrier_wait(widened[2])
            sums = sums * over_columns(shape, widened[1], sums.shape)
        result[...] = sums.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, out.at[tile, :, columns])
        plgpu.wait_smem_to_gmem(0)


def _add_product(shape: Shape, sums: Any, x: Any, weight: Any) -> Any:
    """The sums and the product of a tile of rows with one of a weight, both in shared memory."""
    if shape.interpreted:
        return sums + jnp.dot(x[...], weight[...], preferred_element_type=jnp.float32)
    return pl.run_state(lambda result: plgpu.wgmma(result, x, weight))(plgpu.ACC.init(sums))
