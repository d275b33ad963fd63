"""Vector kernels of attention to a page: scores, softmax and weighted sums, for any number of query heads.

Query heads are computed in batches, but each by itself: what is computed for a head, and in which order, does
not depend on how many there are. The public functions return functions for Numba code, specialised for the
given sizes. Addresses are integers; weights, sums and queries are float32.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .instructions import (
    FLOAT,
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
    load_widened,
    loop,
    multiply_add,
    prefetch_elements,
    store,
    sum_lanes_of_fours,
    transpose_fours,
)

SLACK = 8.0  # nats by which scores may exceed the subtrahend of the softmax before it is raised
CHUNK = 4  # elements of a key, or of a query head, that stand together in a vector of four keys
QUADS = LANES // CHUNK  # vectors of four keys in a block of keys
HEADS = 4  # query heads whose scores of a block of keys fill the accumulators


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


@cache
def scores(group: int, head_dim: int, page_size: int, dtype: str) -> Any:
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
    """
    stride, sizes = padded(page_size), _batches(HEADS, group)
    zero = constant(0)

    def emit(builder, values):
        keys, query, out, block, heads, begin, end, next_tile = values

        def row_of(t, number):
            row = builder.add(t, WORD(number))
            if page_size % LANES == 0:
                return row
            last = WORD(page_size - 1)
            return builder.select(builder.icmp_signed("<", row, last), row, last)

        def fours_from_tile(t, part, quad):
            """For four keys, the vectors of their elements 0-3, 4-7, 8-11 and 12-15 of a part."""
            elements = []
            for i in range(CHUNK):
                row = row_of(t, quad + QUADS * i)
                offset = builder.add(builder.mul(row, WORD(head_dim)), part)
                elements.append(load_widened(builder, keys, offset, dtype))
            fours = transpose_fours(builder, elements)
            for m, value in enumerate(fours):
                store(builder, value, block, block_offset(part, m, quad))
            # A part of this block of keys goes with as many elements of the next tile, in their order.
            next_part = builder.add(builder.mul(t, WORD(head_dim)), builder.shl(part, WORD(4)))
            next_quad = builder.add(next_part, WORD(quad * CHUNK * LANES))
            prefetch_elements(builder, next_tile, next_quad, CHUNK * LANES, dtype)
            return fours

        def block_offset(part, m, quad):
            # A part takes LANES vectors.
            return builder.add(builder.shl(part, WORD(4)), WORD((m * QUADS + quad) * LANES))

        def fours_from_block(t, part, quad):
            return [load(builder, block, block_offset(part, m, quad)) for m in range(CHUNK)]

        def batch(t, h, size, fours_of):
            def add_part(part, sums):
                query_of = {}
                for g in range(size):
                    offset = builder.add(builder.mul(builder.add(h, WORD(g)), WORD(head_dim)), part)
                    for m in range(CHUNK):
                        query_of[g, m] = broadcast_four(builder, query, builder.add(offset, WORD(CHUNK * m)))
                sums = list(sums)
                for quad in range(QUADS):
                    for m, four in enumerate(fours_of(t, part, quad)):
                        for g in range(size):
                            i = g * QUADS + quad
                            sums[i] = multiply_add(builder, four, query_of[g, m], sums[i])
                return sums

            sums = loop(builder, WORD(0), WORD(head_dim), LANES, [zero] * (size * QUADS), add_part)
            for g in range(size):
                target = builder.add(builder.mul(builder.add(h, WORD(g)), WORD(stride)), t)
                quads = sums[g * QUADS : (g + 1) * QUADS]
                store(builder, sum_lanes_of_fours(builder, quads), out, target)

        def block_of_keys(t, _):
            first = _for_first_batch(
                builder, heads, sizes, lambda h, size: batch(t, h, size, fours_from_tile)
            )
            _for_batches(builder, first, heads, sizes, lambda h, size: batch(t, h, size, fours_from_block))
            return []

        loop(builder, builder.and_(begin, WORD(-LANES)), end, LANES, [], block_of_keys)

    return intrinsic_of(8, emit)


@cache
def softmax(page_size: int, head_dim: int, scaled: bool) -> Any:
    """`softmax(scores, top, total, out, begin, end, key_scale, value_scale)`: an online softmax of a head.

    The scores of a page become weights exp(score − top), 0 outside of the range. `top` is raised to the
    largest score if one exceeds it by more than `SLACK`; `total`, the sums of weights by lane, and the
    weighted sums `out` are then rescaled.

    Args:
        page_size: the scores are `padded(page_size)` floats.
        head_dim: of `out`; a multiple of `LANES`.
        scaled: whether scores are multiplied by the float32 at `key_scale`, and weights, once they are added
            up, by those at `value_scale`, each `[padded(page_size)]`.
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
                raise_top(maximum)
            subtrahend = broadcast(builder, load(builder, top, 0, FLOAT))

            def weigh(t, carried):
                weight = inside(t, exponential(builder, builder.fsub(score(t), subtrahend)), zero)
                store(builder, scaled_by(weight, value_scale, t), scores, t)
                return [builder.fadd(carried[0], weight)]

            (mass,) = loop(builder, first, last, LANES, [load(builder, total, 0)], weigh)
            store(builder, mass, total, 0)

        def raise_top(maximum):
            peak = largest_lane(builder, maximum)
            drop = builder.fsub(load(builder, top, 0, FLOAT), peak)
            shrink = exponential(builder, broadcast(builder, drop))
            store(builder, peak, top, 0)
            store(builder, builder.fmul(load(builder, total, 0), shrink), total, 0)
            for j in range(parts):
                store(builder, builder.fmul(load(builder, out, j * LANES), shrink), out, j * LANES)

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


@cache
def accumulate(group: int, head_dim: int, page_size: int, dtype: str) -> Any:
    """`accumulate(weights, values, out, heads, begin, end, next_tile)`: out[h] += Σ weights[h, t] values[t].

    Args:
        group: the number of heads is a multiple of it.
        head_dim: a multiple of the vector's width.
        page_size: rows of `weights` have `padded(page_size)` floats.
        dtype: of the values. The tile at the address `next_tile` is prefetched on the way.
    """
    parts, stride = head_dim // LANES, padded(page_size)
    sizes = _batches(max(1, 16 // parts), group)

    def emit(builder, values):
        weights, data, out, heads, begin, end, next_tile = values

        def batch(h, size, prefetching):
            base = builder.mul(h, WORD(head_dim))
            places = [builder.add(base, WORD(i * LANES)) for i in range(size * parts)]
            start = [load(builder, out, place) for place in places]

            def row(t, sums):
                offset = builder.mul(t, WORD(head_dim))
                part_offset = lambda j: builder.add(offset, WORD(j * LANES))
                value = [load_widened(builder, data, part_offset(j), dtype) for j in range(parts)]
                if prefetching:
                    prefetch_elements(builder, next_tile, offset, head_dim, dtype)
                after = []
                for g in range(size):
                    place = builder.add(builder.mul(builder.add(h, WORD(g)), WORD(stride)), t)
                    weight = broadcast(builder, load(builder, weights, place, FLOAT))
                    for j in range(parts):
                        after.append(multiply_add(builder, value[j], weight, sums[g * parts + j]))
                return after

            for place, x in zip(places, loop(builder, begin, end, 1, start, row), strict=True):
                store(builder, x, out, place)

        first = _for_first_batch(builder, heads, sizes, lambda h, size: batch(h, size, True))
        _for_batches(builder, first, heads, sizes, lambda h, size: batch(h, size, False))

    return intrinsic_of(7, emit)
