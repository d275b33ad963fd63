"""Vector kernels of attention to a page: scores, softmax and weighted sums, for any number of query heads.

Query heads are computed in batches, but each by itself: what is computed for a head, and in which order, does
not depend on how many there are. The public functions return functions for Numba code, specialised for the
given sizes. Addresses are integers; weights, sums and queries are float32.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .control_flow import loop
from .instructions import (
    CACHE_LINE,
    FLOAT,
    ITEMSIZE,
    LANES,
    WORD,
    any_lane,
    broadcast,
    broadcast_four,
    constant,
    exponential,
    intrinsic_of,
    lanes_between,
    larger,
    largest_lane,
    load,
    load_fours,
    load_widened,
    multiply_add,
    prefetch,
    store,
    sum_lanes_of_fours,
    transpose_fours,
)

SLACK = 8.0  # nats by which scores may exceed the subtrahend of the softmax before it is raised
CHUNK = 4  # elements of a key, or of a query head, that stand together in a vector of four keys
QUADS = LANES // CHUNK  # vectors of four keys in a block of keys
LINES_AT_ONCE = 4  # cache lines that are prefetched together
ROWS_AT_ONCE = 8  # values that are added up between two prefetches
HEADS = 4  # query heads whose scores of a block of keys fill the accumulators
NARROW_SUMS = 4  # vectors of sums that leave registers for their operands, where those are not of AVX-512


def padded(page_size: int) -> int:
    """Floats from the scores of a query head to those of the next: `page_size`, in full vectors."""
    return -(-page_size // LANES) * LANES


def _batches(largest: int, group: int) -> list[int]:
    """Sizes of batches of query heads, descending, whose multiples add up to any multiple of `group`."""
    sizes = [2**i for i in range(largest.bit_length())][::-1]
    last = next(i for i, size in enumerate(sizes) if group % size == 0)
    return sizes[: last + 1]


def _for_batches(builder: Any, first: Any, heads: Any, sizes: list[int], body: Callable) -> None:
    """Emits `body(head, size)` for batches that cover the heads from `first` to before `heads`."""
    for size in sizes:
        end = builder.add(first, builder.and_(builder.sub(heads, first), WORD(-size)))
        loop(builder, first, end, size, [], lambda h, _, size=size: body(h, size) or [])
        first = end


def _for_first_batch(builder: Any, heads: Any, sizes: list[int], body: Callable) -> Any:
    """Emits `body(0, size)` for the largest batch that there are heads for; returns its size, or 0."""
    first = WORD(0)
    for size in sizes:
        fits = builder.and_(
            builder.icmp_signed("==", first, WORD(0)), builder.icmp_signed(">=", heads, WORD(size))
        )
        with builder.if_then(fits):
            body(WORD(0), size)
        first = builder.select(fits, WORD(size), first)
    return first


def _number_of_batches(builder: Any, heads: Any, sizes: list[int]) -> Any:
    """How many batches cover the heads, if all but the last are of the first size."""
    return _batch_number(builder, builder.add(heads, WORD(sizes[0] - 1)), sizes)


def _batch_number(builder: Any, head: Any, sizes: list[int]) -> Any:
    return builder.udiv(head, WORD(sizes[0]))


class Prefetcher:
    """Spreads the prefetches of a piece of memory evenly over the steps of a computation.

    Prefetches in quick succession would wait for one another, and the computation for them.
    """

    def __init__(self, builder: Any, size: int, steps: Any) -> None:
        """Divide the memory.

        Args:
            builder: of the function.
            size: of the memory, in bytes.
            steps: of the computation.
        """
        self.builder, self.lines = builder, -(-size // CACHE_LINE)
        rounded_up = builder.add(steps, WORD(self.lines - 1))
        lines_per_step = builder.udiv(rounded_up, steps)
        rounded_up = builder.add(lines_per_step, WORD(LINES_AT_ONCE - 1))
        self.lines_per_step = builder.and_(rounded_up, WORD(-LINES_AT_ONCE))

    def take_step(self, address: Any, step: Any) -> None:
        """Prefetch what falls to a step, of the memory at an address."""
        builder, lines = self.builder, WORD(self.lines)
        begin = builder.mul(step, self.lines_per_step)
        end = builder.add(begin, self.lines_per_step)
        end = builder.select(builder.icmp_signed("<", end, lines), end, lines)

        def prefetch_lines(line, _):
            first = builder.add(address, builder.mul(line, WORD(CACHE_LINE)))
            for i in range(LINES_AT_ONCE):
                prefetch(builder, builder.add(first, WORD(i * CACHE_LINE)))
            return []

        loop(builder, begin, end, LINES_AT_ONCE, [], prefetch_lines)


def _row_of_page(builder: Any, first: Any, number: int, page_size: int) -> Any:
    """The row `number` of a block, or the last of the page if the page ends before."""
    row = builder.add(first, WORD(number))
    if page_size % LANES == 0:
        return row
    last = WORD(page_size - 1)
    return builder.select(builder.icmp_signed("<", row, last), row, last)


def _block_offset(builder: Any, part: Any, chunk: int, quad: int) -> Any:
    """Where the scratch of `scores` holds a chunk of four keys; `LANES` elements take as many vectors."""
    return builder.add(builder.mul(part, WORD(LANES)), WORD((chunk * QUADS + quad) * LANES))


@cache
def scores(group: int, head_dim: int, page_size: int, dtype: str, wide: bool) -> Any:
    """`scores(keys, query, out, block, heads, begin, end, next_tile)`: dot products of queries and keys.

        out[h, t] = query[h] · keys[t],   begin ≤ t < end

    Rows of `out` have `padded(page_size)` floats; those of the vectors around begin and end are written too,
    and hold nothing of use outside of the range. Of each block of 16 keys, four vectors at a time hold four
    elements of all keys. Sums run over these fours in ascending order, and then over the four lanes of a key.

    Args:
        group: the number of heads is a multiple of it.
        head_dim: a multiple of `LANES`.
        page_size: keys of a tile.
        dtype: of the keys. The tile at the address `next_tile` is prefetched on the way. `block` is scratch
            for `LANES · head_dim` floats.
        wide: whether registers are those of AVX-512. If not, a batch of heads is multiplied by some of the
            vectors of a block of keys at a time, so that its sums stay in registers.
    """
    stride, parts, sizes = padded(page_size), head_dim // LANES, _batches(HEADS, group)
    block_bytes = LANES * head_dim * ITEMSIZE[dtype]
    zero = constant(0)

    def emit(builder, values):
        keys, query, out, block, heads, begin, end, next_tile = values
        steps = builder.mul(_number_of_batches(builder, heads, sizes), WORD(parts))
        prefetcher = Prefetcher(builder, block_bytes, steps)

        def quads_from_tile(t, part, quad):
            """For four keys, the vectors of their elements 0-3, 4-7, 8-11 and 12-15 of a part."""
            offsets = []
            for i in range(CHUNK):
                row = _row_of_page(builder, t, quad + QUADS * i, page_size)
                offsets.append(builder.add(builder.mul(row, WORD(head_dim)), part))

            def load_one(m):
                four = load_fours(builder, keys, offsets, CHUNK * m, dtype)
                store(builder, four, block, _block_offset(builder, part, m, quad))
                return four

            if not wide:  # one at a time
                return load_one
            elements = [load_widened(builder, keys, offset, dtype) for offset in offsets]
            fours = transpose_fours(builder, elements)
            for m, value in enumerate(fours):
                store(builder, value, block, _block_offset(builder, part, m, quad))
            return fours.__getitem__

        def quads_from_block(t, part, quad):
            load_one = lambda m: load(builder, block, _block_offset(builder, part, m, quad))
            return [load_one(m) for m in range(CHUNK)].__getitem__ if wide else load_one

        def batch(t, h, size, load_quads):
            number = builder.mul(_batch_number(builder, h, sizes), WORD(parts))
            next_block = builder.add(next_tile, builder.mul(t, WORD(head_dim * ITEMSIZE[dtype])))

            def add_part(part, sums, quads):
                if quads.start == 0:
                    prefetcher.take_step(next_block, builder.add(number, builder.udiv(part, WORD(LANES))))
                sums = list(sums)

                def query_of(g, m):
                    offset = builder.add(builder.mul(builder.add(h, WORD(g)), WORD(head_dim)), part)
                    return broadcast_four(builder, query, builder.add(offset, WORD(CHUNK * m)))

                factors = {(g, m): query_of(g, m) for g in range(size) for m in range(CHUNK)} if wide else {}
                for number_of_quad, quad in enumerate(quads):
                    load_four = load_quads(t, part, quad)
                    for m in range(CHUNK):
                        four = load_four(m)
                        for g in range(size):
                            i = g * len(quads) + number_of_quad
                            factor = factors[g, m] if wide else query_of(g, m)
                            sums[i] = multiply_add(builder, four, factor, sums[i])
                return sums

            # A batch that reads the scratch would keep the query of several vectors in registers.
            narrow = max(1, NARROW_SUMS // max(2, size)) if load_quads is quads_from_tile else 1
            at_once = QUADS if wide else narrow
            sums_of_quad = {}
            for first in range(0, QUADS, at_once):
                quads = range(first, first + at_once)
                add = lambda part, sums, quads=quads: add_part(part, sums, quads)
                start = [zero] * (size * at_once)
                sums = loop(builder, WORD(0), WORD(head_dim), LANES, start, add)
                for i, value in enumerate(sums):
                    sums_of_quad[i // at_once, quads[i % at_once]] = value
            for g in range(size):
                target = builder.add(builder.mul(builder.add(h, WORD(g)), WORD(stride)), t)
                sums = [sums_of_quad[g, quad] for quad in range(QUADS)]
                store(builder, sum_lanes_of_fours(builder, sums), out, target)

        def block_of_keys(t, _):
            first = _for_first_batch(
                builder, heads, sizes, lambda h, size: batch(t, h, size, quads_from_tile)
            )
            _for_batches(builder, first, heads, sizes, lambda h, size: batch(t, h, size, quads_from_block))
            return []

        loop(builder, builder.and_(begin, WORD(-LANES)), end, LANES, [], block_of_keys)

    return intrinsic_of(8, emit)


@cache
def softmax(page_size: int, head_dim: int, scaled: bool, wide: bool) -> Any:
    """`softmax(scores, top, total, out, begin, end, key_scale, value_scale)`: an online softmax of a head.

    The scores of a page become weights exp(score − top), 0 in the other lanes of vectors at the ends. `top`
    is raised to the largest score if one exceeds it by more than `SLACK`; `total`, the sums of weights by
    lane, and the weighted sums `out` are then rescaled.

    Args:
        page_size: the scores are `padded(page_size)` floats.
        head_dim: of `out`; a multiple of `LANES`.
        scaled: whether scores are multiplied by the float32 at `key_scale`, and weights, once they are added
            up, by those at `value_scale`, each `[padded(page_size)]`.
        wide: whether registers are those of AVX-512. If not, a loop of its own computes the
            exponentials, so that their constants stay in registers.
    """
    low, zero = constant(float(np.finfo(np.float32).min)), constant(0)
    parts = head_dim // LANES

    def emit(builder, values):
        scores, top, total, out, begin, end, key_scale, value_scale = values

        def scaled_by(value, scale, t):
            return builder.fmul(value, load(builder, scale, t)) if scaled else value

        def page(first, last, inside):
            def score(t):
                return scaled_by(load(builder, scores, t), key_scale, t)

            def add_to_maximum(t, carried):
                value = inside(t, score(t), low)
                return [larger(builder, value, carried[0])]

            (maximum,) = loop(builder, first, last, LANES, [low], add_to_maximum)
            limit = builder.fadd(load(builder, top, 0, FLOAT), FLOAT(SLACK))
            exceeded = builder.fcmp_ordered(">", maximum, broadcast(builder, limit))
            with builder.if_then(any_lane(builder, exceeded), likely=False):
                _raise_top(builder, maximum, top, total, out, parts)
            subtrahend = broadcast(builder, load(builder, top, 0, FLOAT))

            def exponentiate(t, _):
                store(builder, exponential(builder, builder.fsub(score(t), subtrahend)), scores, t)
                return []

            def weigh(t, carried):
                if wide:
                    power = exponential(builder, builder.fsub(score(t), subtrahend))
                else:
                    power = load(builder, scores, t)
                weight = inside(t, power, zero)
                store(builder, scaled_by(weight, value_scale, t), scores, t)
                return [builder.fadd(carried[0], weight)]

            if not wide:
                loop(builder, first, last, LANES, [], exponentiate)
            (mass,) = loop(builder, first, last, LANES, [load(builder, total, 0)], weigh)
            store(builder, mass, total, 0)

        full = builder.and_(
            builder.icmp_signed("==", begin, WORD(0)), builder.icmp_signed("==", end, WORD(padded(page_size)))
        )
        with builder.if_else(full) as (then, otherwise):
            with then:
                page(WORD(0), WORD(padded(page_size)), lambda t, value, _: value)
            with otherwise:
                page(
                    builder.and_(begin, WORD(-LANES)),
                    end,
                    lambda t, value, other: builder.select(
                        lanes_between(builder, t, begin, end), value, other
                    ),
                )

    return intrinsic_of(8, emit)


def _raise_top(builder: Any, maximum: Any, top: Any, total: Any, out: Any, parts: int) -> None:
    """Rescales the sums of an online softmax to a larger score.

    Args:
        builder: The builder of the function.
        maximum: A vector whose largest lane is the score.
        top: The address of the score that the sums are relative to.
        total: The address of the sums of weights by lane.
        out: The address of the weighted sums.
        parts: Vectors of the weighted sums.
    """
    peak = largest_lane(builder, maximum)
    drop = builder.fsub(load(builder, top, 0, FLOAT), peak)
    shrink = exponential(builder, broadcast(builder, drop))
    store(builder, peak, top, 0)
    store(builder, builder.fmul(load(builder, total, 0), shrink), total, 0)
    for j in range(parts):
        store(builder, builder.fmul(load(builder, out, j * LANES), shrink), out, j * LANES)


@cache
def accumulate(group: int, head_dim: int, page_size: int, dtype: str, wide: bool) -> Any:
    """`accumulate(weights, values, out, heads, begin, end, next_tile)`: out[h] += Σ weights[h, t] values[t].

    Args:
        group: the number of heads is a multiple of it.
        head_dim: a multiple of the vector's width.
        page_size: rows of `weights` have `padded(page_size)` floats.
        dtype: of the values. The tile at the address `next_tile` is prefetched on the way.
        wide: whether registers are those of AVX-512. If not, a batch of heads reads the columns of a tile in
            several turns, so that its sums stay in registers.
    """
    parts, stride = head_dim // LANES, padded(page_size)
    sizes = _batches(max(1, 16 // parts) if wide else NARROW_SUMS, group)

    def emit(builder, values):
        weights, data, out, heads, begin, end, next_tile = values

        steps_per_batch = WORD(-(-page_size // ROWS_AT_ONCE))
        steps = builder.mul(_number_of_batches(builder, heads, sizes), steps_per_batch)
        prefetcher = Prefetcher(builder, page_size * head_dim * ITEMSIZE[dtype], steps)

        def batch(h, size):
            at_once = parts if wide else max(1, NARROW_SUMS // size)
            for first in range(0, parts, at_once):
                columns(h, size, range(first, min(first + at_once, parts)))

        def columns(h, size, chosen):
            first_step = builder.mul(_batch_number(builder, h, sizes), steps_per_batch)
            base = builder.mul(h, WORD(head_dim))
            places = [builder.add(base, WORD((g * parts + j) * LANES)) for g in range(size) for j in chosen]
            start = [load(builder, out, place) for place in places]

            def row(t, sums):
                offset = builder.mul(t, WORD(head_dim))
                part_offset = lambda j: builder.add(offset, WORD(j * LANES))
                value = [load_widened(builder, data, part_offset(j), dtype) for j in chosen]
                after = []
                for g in range(size):
                    place = builder.add(builder.mul(builder.add(h, WORD(g)), WORD(stride)), t)
                    weight = broadcast(builder, load(builder, weights, place, FLOAT))
                    for j, part in enumerate(value):
                        after.append(multiply_add(builder, part, weight, sums[g * len(chosen) + j]))
                return after

            def rows(t, sums):
                if chosen.start == 0:
                    step = builder.add(first_step, builder.udiv(t, WORD(ROWS_AT_ONCE)))
                    prefetcher.take_step(next_tile, step)
                after = builder.add(t, WORD(ROWS_AT_ONCE))
                after = builder.select(builder.icmp_signed("<", after, end), after, end)
                return loop(builder, t, after, 1, sums, row)

            sums = loop(builder, begin, end, ROWS_AT_ONCE, start, rows)
            for place, x in zip(places, sums, strict=True):
                store(builder, x, out, place)

        _for_batches(builder, WORD(0), heads, sizes, batch)

    return intrinsic_of(7, emit)
