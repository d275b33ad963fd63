"""Grouped matrix products on a TPU (Pallas Mosaic): each matrix of a group with rows is read once.

Rows lie in tiles. A *visit* is a group and a tile that holds some of its rows; visits are in the order of the
rows. A step of the grid multiplies all rows of a tile by a block of columns of a group's matrix and keeps the
rows of the group. Visits of a tile follow each other, so its results stay in VMEM until the last of them; so
do those of a group, whose block of columns is copied once for all of its tiles. Which matrix a visit reads is
known before the kernel starts (scalar prefetch), so copies are under way while the visit before is computed,
and a program that scans over layers passes all layers' matrices without a copy.

A group of a few rows, as in decoding, is bound by reading its matrix: a tile of 128 rows takes a v5e about
half as long to multiply as the matrix takes to arrive, by arithmetic. Narrow weights are widened in VMEM.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...mesh.devices import default_device
from ..topk_entropy.reference import exactly

LANES, SUBLANES = 128, 8
ROW_STEP = 32  # rows of a tile are a multiple of it, whatever the dtype
PACKED = "uint8"  # two numbers of 4 bits, of an even input and of the next one
WEIGHT_DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", PACKED)


class Blocks(NamedTuple):
    """Sizes by which the kernel fits into VMEM."""

    rows: int = 128  # of a tile of x
    weight_bytes: int = 2**22  # of the blocks of all weights that a step reads, widened
    vmem_bytes: int = 48 * 2**20


SMALL = Blocks(rows=32, vmem_bytes=16 * 2**20)
SMALL_VMEM = ("TPU v2", "TPU v3", "TPU v4")


def blocks() -> Blocks:
    """The sizes for the default device."""
    return SMALL if default_device().device_kind in SMALL_VMEM else Blocks()


class Visits(NamedTuple):
    """Pairs of a group and a tile of rows that holds some of its rows; int32 `[visits]`."""

    matrix: jax.Array
    tile: jax.Array
    start: jax.Array  # first row of the group
    end: jax.Array  # row behind its last; `start` in a place behind the last visit


def grouped_matmul(
    x: jax.Array,
    sizes: jax.Array,
    weights: tuple[jax.Array, ...],
    scales: tuple[jax.Array, ...],
    first: jax.Array,
) -> tuple[jax.Array, ...]:
    """The contract is in the package's docstring."""
    (rows, inputs), outputs = x.shape, weights[0].shape[-1]
    check(x, weights)
    fits = blocks()
    width = block_width(outputs, fits.weight_bytes // (inputs * x.dtype.itemsize * len(weights)))
    height = min(fits.rows, -(-rows // ROW_STEP) * ROW_STEP)
    tiles = pl.cdiv(rows, height)
    visits = visits_of(sizes, height, tiles, first)
    steps = visits.tile.shape[0]
    packed = weights[0].dtype.name == PACKED
    if packed:
        x = jnp.concatenate([x[:, ::2], x[:, 1::2]], axis=1)
    else:
        # A vector per matrix lies in memory as the kernel reads it only where it is taken out of its stack.
        scales = tuple(scale[visits.matrix][:, None] for scale in scales)
    x_spec = pl.BlockSpec((height, inputs), lambda n, v, matrix, tile, *_: (tile[v], 0))
    of_matrix = lambda n, v, matrix, *_: (matrix[v], 0, n)
    weight_spec = pl.BlockSpec((None, weights[0].shape[1], width), of_matrix)
    # XLA stores columns that do not fill the lanes the other way round, so this moves nothing.
    transposed = outputs % LANES != 0
    if transposed:
        weights = tuple(weight.swapaxes(1, 2) for weight in weights)
        weight_spec = pl.BlockSpec((None, width, inputs), lambda n, v, matrix, *_: (matrix[v], n, 0))
    groups = scales[0].shape[1] if scales else 0
    scale_spec = pl.BlockSpec((None, groups, width), of_matrix if packed else lambda n, v, *_: (v, 0, n))
    out_spec = pl.BlockSpec((height, width), lambda n, v, matrix, tile, *_: (tile[v], n))
    results = pl.pallas_call(
        partial(multiply, len(weights), len(scales), transposed),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(pl.cdiv(outputs, width), steps),
            in_specs=[x_spec, *[weight_spec] * len(weights), *[scale_spec] * len(scales)],
            out_specs=[out_spec] * len(weights),
        ),
        out_shape=[jax.ShapeDtypeStruct((tiles * height, outputs), x.dtype)] * len(weights),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=fits.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * steps * height * inputs * outputs * len(weights),
            bytes_accessed=sum(min(sizes.shape[0], rows) * w[0].size * w.dtype.itemsize for w in weights)
            + (len(weights) + 1) * x.size * x.dtype.itemsize,
            transcendentals=0,
        ),
        name="grouped_matmul",
    )(*visits, jnp.pad(x, ((0, tiles * height - rows), (0, 0))), *weights, *scales)
    return tuple(result[:rows] for result in results)


def block_width(outputs: int, most: int) -> int:
    """Columns of a block: all of them, or a multiple of the lanes, of which the last block may have fewer.

    A multiple that divides all is preferred if it is not much smaller. Raises NotImplementedError where not
    even the lanes are filled.

    >>> block_width(768, 400), block_width(96, 400), block_width(2880, 364)
    (384, 96, 256)

    Args:
        outputs: columns of a matrix.
        most: columns that a block may have.
    """
    if outputs <= most:
        return outputs
    largest = most // LANES * LANES
    if largest == 0:
        raise NotImplementedError(f"{LANES} columns take more memory than a block may have")
    divisors = (n for n in range(LANES, largest + 1, LANES) if outputs % n == 0)
    return max((n for n in divisors if 2 * n >= largest), default=largest)


def check(x: jax.Array, weights: tuple[jax.Array, ...]) -> None:
    """Raise NotImplementedError for operands that the kernel does not multiply.

    Args:
        x: the rows.
        weights: the stacks of matrices.
    """
    dtypes, shapes = {w.dtype.name for w in weights}, {w.shape[1:] for w in weights}
    if x.dtype.name not in ("float32", "bfloat16") or not dtypes <= {*WEIGHT_DTYPES}:
        names, accepted = ", ".join(sorted(dtypes)), ", ".join(WEIGHT_DTYPES)
        raise NotImplementedError(
            f"{x.dtype} times {names}: only float32 or bfloat16 times one of {accepted} is supported"
        )
    if len(shapes) > 1 or any(w.ndim != 3 for w in weights):
        raise NotImplementedError("only stacks [matrices, inputs, outputs] of the same shape are supported")
    inputs, outputs = x.shape[1], weights[0].shape[2]
    if dtypes == {PACKED} and (inputs % (2 * LANES) or outputs % LANES):
        raise NotImplementedError(
            f"{inputs} inputs and {outputs} outputs of packed weights: only multiples of {2 * LANES} and of "
            f"{LANES} are supported"
        )
    if inputs % LANES and outputs % LANES:  # which XLA may store with the matrices along the lanes
        raise NotImplementedError(
            f"{inputs} inputs and {outputs} outputs: one of them must be a multiple of {LANES}"
        )
    step = ROW_STEP if min(w.dtype.itemsize for w in weights) == 1 else SUBLANES
    if inputs % step or outputs % step:
        raise NotImplementedError(
            f"{inputs} inputs and {outputs} outputs: only multiples of {step} are supported"
        )


def visits_of(sizes: jax.Array, height: int, tiles: int, first: jax.Array) -> Visits:
    """The visits, in the order of the rows; places behind the last repeat it, with no rows.

    Args:
        sizes: int32 `[groups]`, rows of each group.
        height: rows of a tile.
        tiles: number of tiles.
        first: the matrix of the first group.
    """
    groups = sizes.shape[0]
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts = ends - sizes
    first_tile = starts // height
    per_group = jnp.where(sizes > 0, (ends - 1) // height - first_tile + 1, 0)
    visit_ends = jnp.cumsum(per_group, dtype=jnp.int32)
    total = visit_ends[-1]
    most = min(groups, height * tiles) + tiles - 1
    place = jnp.arange(most, dtype=jnp.int32)
    number = jnp.minimum(place, jnp.maximum(total - 1, 0))
    group = jnp.minimum(jnp.sum(visit_ends[:, None] <= number, axis=0, dtype=jnp.int32), groups - 1)
    tile = first_tile[group] + number - (visit_ends[group] - per_group[group])
    end = jnp.where(place < total, ends[group], starts[group])
    return Visits(group + first, jnp.clip(tile, 0, tiles - 1), starts[group], end)


def multiply(
    num_weights: int,
    num_scales: int,
    transposed: bool,
    matrix: Any,
    tile: Any,
    start: Any,
    end: Any,
    x: Any,
    *refs: Any,
) -> None:
    """One step of the grid: a tile of rows times a block of columns of the matrix of a group.

    Args:
        num_weights: the number of weights.
        num_scales: the number of scales, 0 or as many.
        transposed: whether blocks of weights are `[width, inputs]`.
        matrix: see `Visits`; in SMEM, as those that follow.
        tile: see `Visits`.
        start: see `Visits`.
        end: see `Visits`.
        x: the tile of rows, `[height, inputs]`.
        *refs: the block of each weight, `[inputs, width]`; of its scales, `[1, width]`; of its result.
    """
    weights, scales = refs[:num_weights], refs[num_weights : num_weights + num_scales]
    results, visit = refs[num_weights + num_scales :], pl.program_id(1)

    @pl.when(end[visit] > start[visit])
    def of_group() -> None:
        for number, (weight, result) in enumerate(zip(weights, results, strict=True)):
            if weight.dtype == jnp.uint8:
                product = product_of_packed(x, weight, scales[number])
            else:
                product = dot(x[...], weight[...].astype(x.dtype), transposed)
                product = product * scales[number][...] if scales else product
            row = tile[visit] * x.shape[0] + lax.broadcasted_iota(jnp.int32, product.shape, 0)
            of_rows = (row >= start[visit]) & (row < end[visit])
            result[...] = jnp.where(of_rows, product, result[...].astype(jnp.float32)).astype(result.dtype)


def product_of_packed(x: Any, weight: Any, scale: Any) -> jax.Array:
    """A tile of rows times a block of packed weights.

    Args:
        x: the rows, `[height, inputs]`: even inputs, then odd ones.
        weight: uint8 `[inputs / 2, width]`.
        scale: `[inputs / group, width]`.
    """
    half, width = weight.shape
    numbers = weight[...].astype(jnp.int32)
    by_row = jnp.broadcast_to(scale[...][:, None], (scale.shape[0], half // scale.shape[0], width))
    by_row = by_row.reshape(half, width).astype(jnp.float32)
    parts = (((numbers >> shift) & 15) - 8 for shift in (0, 4))
    even, odd = ((part.astype(jnp.float32) * by_row).astype(x.dtype) for part in parts)
    return dot(x[:, :half], even) + dot(x[:, half:], odd)


def dot(x: jax.Array, weight: jax.Array, transposed: bool = False) -> jax.Array:
    """The product of two blocks in VMEM, float32.

    Args:
        x: rows, `[height, inputs]`.
        weight: columns, `[inputs, width]`.
        transposed: whether the weight is `[width, inputs]`.
    """
    dimensions = (((1,), (1 if transposed else 0,)), ((), ()))
    precision = exactly(x.dtype)
    return lax.dot_general(x, weight, dimensions, precision=precision, preferred_element_type=jnp.float32)
