"""Vector kernels of attention to a page: softmax and weighted sums, for any number of query heads.

Query heads are computed in batches, but each by itself: what is computed for a head, and in which order, does
not depend on how many there are. The public functions return functions for Numba code, specialised for the
given sizes. Addresses are integers; weights, sums and queries are float32, or rounded to bfloat16 where a
function says so. `attention_scores` has the scores.
"""

from functools import cache
from typing import Any

import numpy as np

from .attention_scores import NARROW_SUMS, padded
from .control_flow import loop, when
from .head_batches import HeadBatches, Prefetcher, batch_sizes
from .instructions import (
    FLOAT,
    ITEMSIZE,
    LANES,
    WORD,
    any_lane,
    broadcast,
    constant,
    exponential,
    intrinsic_of,
    lanes_between,
    larger,
    largest_lane,
    load,
    load_widened,
    multiply_add,
    store,
)
from .pairs import add_dot, as_short, load_pairs, nearest, store_shorts

SLACK = 8.0  # nats by which scores may exceed the subtrahend of the softmax before it is raised
ROWS_AT_ONCE = 8  # values that are added up between two prefetches


@cache
def softmax(page_size: int, head_dim: int, scaled: bool, wide: bool, rounded: bool = False) -> Any:
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
        rounded: whether the weights are stored as bfloat16, in the first half of the memory of the scores.
            They are added up before they are rounded.
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
                if rounded:
                    address = builder.add(scores, builder.shl(t, WORD(1)))
                    store_shorts(builder, as_short(builder, nearest(builder, weight)), address)
                else:
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
def accumulate(
    group: int, head_dim: int, page_size: int, dtype: str, wide: bool, rounded: bool = False
) -> Any:
    """`accumulate(weights, values, out, heads, begin, end, next_tile)`: out[h] += Σ weights[h, t] values[t].

    Args:
        group: the number of heads is a multiple of it.
        head_dim: a multiple of the vector's width.
        page_size: rows of `weights` have `padded(page_size)` floats.
        dtype: of the values. The tile at the address `next_tile` is prefetched on the way.
        wide: whether registers are those of AVX-512. If not, a batch of heads reads the columns of a tile in
            several turns, so that its sums stay in registers.
        rounded: whether weights and values are of bfloat16, and multiplied in pairs of two rows (see
            `pairs`); the weights are those of `softmax`. What a row that is not seen holds has no effect.
    """
    parts, stride, add = head_dim // LANES, padded(page_size), add_dot if rounded else multiply_add
    sizes = batch_sizes(max(1, 16 // parts) if wide else NARROW_SUMS, group)

    def emit(builder, values):
        weights, data, out, heads, begin, end, next_tile = values

        steps_per_batch = WORD(-(-page_size // ROWS_AT_ONCE))
        batches = HeadBatches(builder, sizes)
        steps = builder.mul(batches.count(heads), steps_per_batch)
        prefetcher = Prefetcher(builder, page_size * head_dim * ITEMSIZE[dtype], steps)

        def batch(h, size):
            at_once = parts if wide else max(1, NARROW_SUMS // size)
            for first in range(0, parts, at_once):
                columns(h, size, range(first, min(first + at_once, parts)))

        def columns(h, size, chosen):
            first_step = builder.mul(batches.number(h), steps_per_batch)
            base = builder.mul(h, WORD(head_dim))
            places = [builder.add(base, WORD((g * parts + j) * LANES)) for g in range(size) for j in chosen]
            start = [load(builder, out, place) for place in places]

            def add_products(t, sums, value):
                """Add the products of parts of values, and weights that lie `t` floats behind the first."""
                after = []
                for g in range(size):
                    place = builder.add(builder.mul(builder.add(h, WORD(g)), WORD(stride)), t)
                    weight = broadcast(builder, load(builder, weights, place, FLOAT))
                    for j, part in enumerate(value):
                        after.append(add(builder, part, weight, sums[g * len(chosen) + j]))
                return after

            def row(t, sums):
                offset = builder.mul(t, WORD(head_dim))
                part_offset = lambda j: builder.add(offset, WORD(j * LANES))
                return add_products(
                    t, sums, [load_widened(builder, data, part_offset(j), dtype) for j in chosen]
                )

            def pair(t, sums, seen=(True, True)):
                """The rows t, which is even, and t + 1, as far as they are seen."""
                row_bytes = WORD(head_dim * ITEMSIZE[dtype])
                address = builder.add(data, builder.mul(t, row_bytes))
                value = [load_pairs(builder, address, row_bytes, j * LANES, dtype, seen) for j in chosen]
                return add_products(builder.lshr(t, WORD(1)), sums, value)

            def rows(t, sums, last):
                if chosen.start == 0:
                    step = builder.add(first_step, builder.udiv(t, WORD(ROWS_AT_ONCE)))
                    prefetcher.take_step(next_tile, step)
                after = builder.add(t, WORD(ROWS_AT_ONCE))
                after = builder.select(builder.icmp_signed("<", after, last), after, last)
                return loop(builder, t, after, 2 if rounded else 1, sums, pair if rounded else row)

            if rounded:
                sums = _with_odd_rows(builder, begin, end, start, pair, rows)
            else:
                sums = loop(builder, begin, end, ROWS_AT_ONCE, start, lambda t, sums: rows(t, sums, end))
            for place, x in zip(places, sums, strict=True):
                store(builder, x, out, place)

        batches.emit(WORD(0), heads, batch)

    return intrinsic_of(7, emit)


def _with_odd_rows(builder: Any, begin: Any, end: Any, sums: list[Any], pair: Any, rows: Any) -> list[Any]:
    """Emit `accumulate` in pairs: a first row alone if its number is odd, and a last one if it is even.

    Args:
        builder: of the function.
        begin: the first row.
        end: the row behind the last.
        sums: the weighted sums before.
        pair: `pair(t, sums, seen)` emits the products of a pair of rows.
        rows: `rows(t, sums, last)` emits those of `ROWS_AT_ONCE` rows, of which `last` is not one any more.
    """

    def is_odd(number):
        return builder.icmp_signed("!=", builder.and_(number, WORD(1)), WORD(0))

    before, after = builder.sub(begin, WORD(1)), builder.sub(end, WORD(1))
    sums = when(builder, is_odd(begin), sums, lambda sums: pair(before, sums, (False, True)))
    first, last = builder.and_(builder.add(begin, WORD(1)), WORD(-2)), builder.and_(end, WORD(-2))
    sums = loop(builder, first, last, ROWS_AT_ONCE, sums, lambda t, sums: rows(t, sums, last))
    return when(builder, is_odd(end), sums, lambda sums: pair(after, sums, (True, False)))
