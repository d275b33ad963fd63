"""The k most probable tokens and the entropies on an NVIDIA GPU of compute capability 9.0 (Mosaic GPU).

A row is divided into enough segments to fill the chip, and each segment is copied into the shared memory of a
warpgroup. The maxima of 512 subsets give a floor: none of the k largest values lies below it. One pass over
the segment appends the values above the floor to a list of candidates and adds all others to the sums.
Candidates are ranked by comparison with one another, and those past the k-th join the sums. No sum is
computed as a difference. If more than 512 candidates remain, because of ties or unlucky subsets, bisection
raises the floor until at most 512 do. A second call of the same kernel merges the k largest of the segments.

It compiles for sm_90a without spills and agrees with float64 in the interpreter; it has not run on hardware.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .parts import LARGEST_K, RowPartials, check, distance, finish, shifted
from .reference import TopkEntropy, exactly, inverse
from .scatter import LENGTH
from .segment import STAGES, Segments, kernel, memory

LARGEST_SEGMENT = 8192  # so that several segments of float32 fit in the shared memory of a multiprocessor
SMALLEST_SEGMENT = 2048
LARGEST_MERGED = 32768  # the most that one warpgroup can hold
FILLING = 4 * 132  # segments that fill the chip


def topk_entropy(
    logits: jax.Array,
    k: int,
    temperature: jax.Array,
    calibration: jax.Array,
    *,
    size: int | None = None,
    portable: bool = False,
) -> TopkEntropy:
    """See the package.

    Args:
        size: logits of a segment; None chooses.
        portable: whether to use nothing that the interpreter lacks.
    """
    check(logits, k)
    rows, vocabulary = logits.shape
    if logits.size >= 2**31:
        raise NotImplementedError(f"{logits.size} logits: indices are 32 bits wide")
    scales = jnp.stack([inverse(calibration), inverse(temperature)], axis=-1)
    size = size or _size(rows, vocabulary)
    num_segments = pl.cdiv(vocabulary, size)
    if num_segments * LARGEST_K > LARGEST_MERGED:
        raise NotImplementedError(
            f"{num_segments} segments of a row: {LARGEST_MERGED // LARGEST_K} can be merged"
        )
    shape = Segments(rows, vocabulary, size, num_segments, k, portable)
    values, places, numbers = _segments(shape, logits, scales)
    highest, sums = numbers[..., 0], numbers[..., 1:7].reshape(rows, num_segments, 2, 3)
    if num_segments > 1:
        merged = values.reshape(rows, num_segments * LARGEST_K)
        shape = Segments(rows, merged.shape[1], _round_up(merged.shape[1]), 1, k, portable)
        values, at, lost = _segments(shape, merged, scales)
        places = jnp.take_along_axis(places.reshape(merged.shape), at[:, 0], axis=-1, mode="clip")
        top = lost[..., 0]
        moved = jnp.where(highest == -jnp.inf, 0.0, distance(highest, top))
        parts = [shifted(sums[:, :, n], moved, scales[:, None, n]).sum(1) for n in range(2)]
        sums = jnp.stack(parts, axis=1) + lost[:, 0, 1:7].reshape(rows, 2, 3)
        highest = top
    else:
        places, sums = places[:, 0], sums[:, 0]
    parts = RowPartials(values[:, 0, :k], places[:, :k], highest[:, 0], jnp.moveaxis(sums, 0, -1))
    return finish(parts, temperature, calibration, vocabulary)


def project(
    hidden: jax.Array, weight: jax.Array, k: int, temperature: jax.Array, calibration: jax.Array
) -> TopkEntropy:
    """See the package; the product is not fused, and its logits pass through memory."""
    logits = jnp.matmul(hidden, weight, precision=exactly(hidden.dtype), preferred_element_type=jnp.float32)
    return topk_entropy(logits, k, temperature, calibration)


def _round_up(length: int) -> int:
    return pl.cdiv(length, STAGES * LENGTH) * STAGES * LENGTH


def _size(rows: int, vocabulary: int) -> int:
    segments = pl.cdiv(FILLING, rows)
    return _round_up(min(max(pl.cdiv(vocabulary, segments), SMALLEST_SEGMENT), LARGEST_SEGMENT))


def _segments(shape: Segments, logits: jax.Array, scales: jax.Array) -> tuple[jax.Array, ...]:
    flat = logits.reshape(-1)
    if shape.portable:
        # A copy on a GPU may read past the end and is cut off or filled up; the interpreter refuses it.
        flat = jnp.pad(flat, (0, shape.size))

    def out(dtype):
        return jax.ShapeDtypeStruct((shape.rows, shape.num_segments, LARGEST_K), dtype)

    return plgpu.kernel(
        partial(kernel, shape),
        out_type=(out(jnp.float32), out(jnp.int32), out(jnp.float32)),
        grid=(shape.rows, shape.num_segments),
        grid_names=("row", "segment"),
        scratch_types=tuple(memory(shape, logits.dtype)),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="topk_entropy",
    )(flat, scales.reshape(-1))
