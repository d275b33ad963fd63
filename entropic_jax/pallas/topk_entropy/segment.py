"""The body of the GPU kernel: the k largest values of one segment of a row, and sums over the others.

One warpgroup keeps the segment in shared memory, where repeated passes over it are cheap.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .parts import FARTHEST, LARGEST_K
from .scatter import LAYOUT, LENGTH, append, place_at

BOX = 256  # elements that a tiled copy can move
STAGES = 4  # barriers: the kernel works on the first quarter while the others arrive
NOWHERE = 2**31 - 1  # the place of no value
LARGEST = float(np.finfo(np.float32).max)


class Segments(NamedTuple):
    """The static parameters of the kernel."""

    rows: int
    length: int  # of a row
    size: int  # of a segment, the last of a row excepted; a multiple of STAGES · LENGTH
    num_segments: int  # in a row
    k: int
    portable: bool  # for the interpreter

    @property
    def aligned(self) -> bool:
        """Whether every row begins at an address that bulk copies accept, in float32 and in bfloat16."""
        return self.length % 8 == 0


class SharedMemory(NamedTuple):
    """Scratch buffers of a segment in shared memory."""

    segment: Any  # [size], of the type of the logits
    values: Any  # float32 [LENGTH]: the candidates, in any order
    places: Any  # int32 [LENGTH], in the row
    best: Any  # float32 [LARGEST_K], descending
    best_places: Any
    num_candidates: Any  # int32 [1]
    arrived: Any  # barriers


def memory(shape: Segments, dtype: Any) -> SharedMemory:
    """The shared memory that the kernel needs."""
    copies = 1 if shape.aligned else shape.size // STAGES // BOX
    return SharedMemory(
        segment=plgpu.SMEM((shape.size,), dtype),
        values=plgpu.SMEM((LENGTH,), jnp.float32),
        places=plgpu.SMEM((LENGTH,), jnp.int32),
        best=plgpu.SMEM((LARGEST_K,), jnp.float32),
        best_places=plgpu.SMEM((LARGEST_K,), jnp.int32),
        num_candidates=plgpu.SMEM((1,), jnp.int32),
        arrived=plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
    )


def kernel(
    shape: Segments,
    logits_ref: Any,
    scales_ref: Any,
    values_ref: Any,
    places_ref: Any,
    numbers_ref: Any,
    *held: Any,
) -> None:
    """The best tokens and the sums of one segment of a row.

    Args:
        shape: the static parameters.
        logits_ref: `[rows · length]`.
        scales_ref: float32 `[rows, 2]`, 1/T of belief and sampling.
        values_ref, places_ref: the best of each segment, `[rows, num_segments, LARGEST_K]`.
        numbers_ref: the highest logit and the sums of each segment, `[rows, num_segments, LARGEST_K]`.
        *held: `SharedMemory`.
    """
    held = SharedMemory(*held)
    row, segment = lax.axis_index("row"), lax.axis_index("segment")
    begin = segment * shape.size
    length = jnp.minimum(shape.length - begin, shape.size)
    _fetch(shape, logits_ref, row * shape.length + begin, held)

    cast = (lambda x: x) if shape.portable else (lambda x: plgpu.layout_cast(x, LAYOUT))

    def full(value, dtype=jnp.float32):
        return cast(jnp.full((LENGTH,), value, dtype))

    iota = cast(lax.broadcasted_iota(jnp.int32, (LENGTH,), 0))
    held.values[...] = full(-jnp.inf)
    held.places[...] = full(NOWHERE, jnp.int32)
    held.num_candidates[0] = jnp.int32(0)

    def read(chunk):
        x = cast(held.segment[pl.ds(chunk * LENGTH, LENGTH)]).astype(jnp.float32)
        place = chunk * LENGTH + iota
        # Memory beyond the row may hold anything.
        return jnp.where(place < length, x, -jnp.inf), place

    def largest(chunk, top):
        x, _ = read(chunk)
        return jnp.where(x > top, x, top)  # NaN is passed over

    rounds = shape.size // LENGTH
    top = full(-jnp.inf)
    for stage in range(STAGES):
        plgpu.barrier_wait(held.arrived.at[stage])
        first = stage * (rounds // STAGES)
        top = lax.fori_loop(first, first + rounds // STAGES, largest, top)

    tally = lambda mask: jnp.sum(jnp.where(mask, 1, 0))
    count = lambda floor, end: _count(read, rounds, full, floor, end)
    floor, end = _candidates(shape, top, tally, count)
    highest = jnp.max(top)
    origin = jnp.where(highest == -jnp.inf, 0.0, highest)
    scales = [scales_ref[2 * row + n] * math.log2(math.e) for n in range(2)]

    def take_in(chunk, sums):
        x, place = read(chunk)
        candidate = (x > floor) | ((x == floor) & (place <= end))
        append(candidate, x, begin + place, held.values, held.places, held.num_candidates, shape.portable)
        return _weigh(x - origin, scales, sums, candidate)

    sums = lax.fori_loop(0, rounds, take_in, tuple(full(0.0) for _ in range(6)))
    values, places = cast(held.values[...]), cast(held.places[...])
    rank = _ranks(held, values, places, full)
    sums = _weigh(values - origin, scales, sums, rank < shape.k)

    blank = lambda value, dtype: jnp.full((LARGEST_K,), value, dtype)
    held.best[...] = blank(-jnp.inf, jnp.float32)
    held.best_places[...] = blank(NOWHERE, jnp.int32)
    place_at(rank, shape.k, values, places, held.best, held.best_places, shape.portable)
    values_ref[row, segment] = held.best[...]
    places_ref[row, segment] = held.best_places[...]
    for n, number in enumerate((highest, *(jnp.sum(x) for x in sums))):
        numbers_ref[row, segment, n] = number


def _fetch(shape: Segments, logits_ref, start, held: SharedMemory) -> None:
    """Copy the segment from `start` on; the last one of a row includes what lies behind the row."""
    part = shape.size // STAGES
    step = part if shape.aligned else BOX
    # A bulk copy asks for 16 bytes of alignment, a tiled one for none, but moves a box at a time.
    mode = plgpu.OOBFillMode.UNDEFINED if shape.aligned else plgpu.OOBFillMode.ZEROS
    for stage in range(STAGES):
        for at in range(stage * part, (stage + 1) * part, step):
            plgpu.copy_gmem_to_smem(
                logits_ref.at[pl.ds(start + at, step)],
                held.segment.at[pl.ds(at, step)],
                held.arrived.at[stage],
                oob_mode=mode,
            )


def _weigh(apart, scales: list[Any], sums: tuple[Any, ...], out) -> tuple[Any, ...]:
    """Add to the sums of both temperatures what logits `apart` from the highest one weigh, but for `out`."""
    apart = jnp.where(apart < FARTHEST, FARTHEST, apart)
    added = []
    for scale in scales:
        ratio = jnp.where(out, 0.0, jnp.exp2(apart * scale))
        first = apart * ratio
        added += [ratio, first, apart * first]
    return tuple(a + b for a, b in zip(sums, added, strict=True))


def _count(read, rounds: int, full, floor, end) -> jax.Array:
    """How many values are above the floor, or at it up to a place."""

    def add(chunk, counts):
        x, place = read(chunk)
        return counts + jnp.where((x > floor) | ((x == floor) & (place <= end)), 1, 0)

    return jnp.sum(lax.fori_loop(0, rounds, add, full(0, jnp.int32)))


def _halve(count, low, high, many, enough: int, k: int) -> tuple[Any, Any]:
    """A floor with `k` to `enough` values at or above it, or the last one with k; and how many those are.

    `low` has `many`, `high` has fewer than k or is `low`.
    """

    def middle(low, high):
        half = 0.5 * low + 0.5 * high
        return jnp.where(high == jnp.inf, LARGEST, half)

    def undecided(state):
        low, high, many = state
        half = middle(low, high)
        return (many > enough) & (low < half) & (half < high)

    def step(state):
        low, high, many = state
        half = middle(low, high)
        middle_count = count(half)
        right = middle_count >= k
        return jnp.where(right, half, low), jnp.where(right, high, half), jnp.where(right, middle_count, many)

    low, _, many = lax.while_loop(undecided, step, (low, high, many))
    return low, many


def _candidates(shape: Segments, top, tally, count) -> tuple[Any, Any]:
    """A floor that leaves k to LENGTH candidates, and the place up to which values equal to it count.

    If there are fewer than k values, all are candidates. `top` holds the maxima of LENGTH subsets: the number
    of them above a floor is a lower bound of the number of values above it.
    """
    k, everywhere = shape.k, jnp.int32(shape.size)
    highest = jnp.max(top)
    lowest = jnp.maximum(jnp.min(top), -LARGEST)
    at_highest = tally(top >= highest)
    low = jnp.where(at_highest >= k, highest, lowest)
    many = jnp.where(at_highest >= k, at_highest, tally(top >= lowest))
    floor, _ = _halve(lambda floor: tally(top >= floor), low, highest, many, k + k // 8 + 8, k)
    many = count(floor, everywhere)

    def narrower():
        # Some subsets hold several of the largest values.
        at_highest = count(highest, everywhere)
        low = jnp.where(at_highest >= k, highest, floor)
        start = jnp.where(at_highest >= k, at_highest, many)
        exact = lambda floor: count(floor, everywhere)
        low, start = _halve(exact, low, highest, start, LENGTH, k)

        def undecided(state):
            _, _, candidates = state
            return (candidates < k) | (candidates > LENGTH)

        def step(state):
            before, end, _ = state
            half = before + (end - before) // 2
            candidates = count(low, half)
            fewer = candidates < k
            return jnp.where(fewer, half, before), jnp.where(fewer, end, half), candidates

        # Among too many equal values, the first count.
        before, end, _ = lax.while_loop(undecided, step, (jnp.int32(-1), everywhere, start))
        return low, end

    return lax.cond(many > LENGTH, narrower, lambda: (floor, everywhere))


def _ranks(held: SharedMemory, values, places, full) -> Any:
    """The rank of each candidate: how many come before it."""
    unrolled = 8

    def compare(chunk, ranks):
        for n in range(unrolled):
            value, place = held.values[chunk * unrolled + n], held.places[chunk * unrolled + n]
            first = (value > values) | ((value == values) & (place < places))
            ranks += jnp.where(first, 1, 0)
        return ranks

    candidates = jnp.minimum(held.num_candidates[0], LENGTH)
    return lax.fori_loop(0, (candidates + unrolled - 1) // unrolled, compare, full(0, jnp.int32))
