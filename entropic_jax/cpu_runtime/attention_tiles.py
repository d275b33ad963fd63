"""Attention to a page on matrix units: operands of bfloat16, sums and softmax of float32.

Query heads are multiplied in tiles of 16. The scores of a tile have a row for each position and a lane for
each head. Either 16 heads have their softmax in one sequence of vector instructions, and its weights are
transposed; or the scores of a few heads are, and each has the softmax of `attention`. The rows of values are
laid out in pairs once for all tiles (`attention_layouts`).

What is computed for a head, and in which order, does not depend on the other heads of its tile, nor on which
of the two ways it goes: its products are chains over positions in ascending order, to which positions that it
does not see add zeros, and its weights are added up by their position modulo 16. The functions are for Numba
code, specialised for the given sizes; addresses are integers.
"""

from functools import cache
from typing import Any

import numpy as np

from .attention import SLACK
from .attention_layouts import prefetch_row, transposed
from .control_flow import loop
from .instructions import (
    INTEGERS,
    LANES,
    NARROW,
    VECTOR,
    WORD,
    any_lane,
    broadcast,
    constant,
    exponential,
    integers,
    intrinsic_of,
    larger,
    load,
    splat,
    store,
)
from .matrix_tiles import STEP, TILE, TILE_BYTES, clear_sums, multiply_step, transfer
from .pairs import nearest

UPPER = -65536  # the bits of the upper half of a lane
SUMS_AT_ONCE = 4  # tiles of weighted sums that stay in registers
LOWEST = float(np.finfo(np.float32).min)
MAXIMA = 4  # that are kept apart until all positions are seen


@cache
def scores(head_dim: int, ahead: bool = False) -> Any:
    """`scores(keys, query, first, last, out, next_key)`: the scores `[positions, TILE]` of a tile of heads.

    Those of positions from first to before last, multiples of `STEP`, are written.

    Args:
        head_dim: a multiple of `STEP`.
        ahead: whether half of the rows of the page at `next_key` are prefetched on the way.
    """
    row_bytes = 2 * head_dim

    def emit(builder, values):
        keys, query, first, last, out, next_key = values

        def positions(t, _):
            for i in range(0, STEP, 2) if ahead else ():
                prefetch_row(builder, next_key, builder.add(t, WORD(i)), row_bytes)
            clear_sums(builder, 0, 2)
            rows = builder.add(keys, builder.mul(t, WORD(row_bytes)))
            for step in range(head_dim // STEP):
                both = [builder.add(rows, WORD(half * TILE * row_bytes + 2 * STEP * step)) for half in (0, 1)]
                multiply_step(
                    builder, both, [builder.add(query, WORD(step * TILE_BYTES))], row_bytes=row_bytes
                )
            target = builder.add(out, builder.mul(t, WORD(4 * TILE)))
            for half in (0, 1):
                place = builder.add(target, WORD(half * TILE_BYTES))
                transfer(builder, "tilestored64", half, place, WORD(4 * TILE))
            return []

        loop(builder, first, last, 2 * TILE, [], positions)

    return intrinsic_of(6, emit)


@cache
def softmax(head_dim: int, ahead: bool) -> Any:
    """`softmax(scores, state, out, bounds, first, last, masked, pairs, weights, next_key, next_value)`.

    An online softmax of 16 heads: the scores from first to before last, multiples of `STEP`, become weights
    exp(score − top), which are stored as tiles of rows. `state` holds top and, behind it, the sums of
    weights by position modulo `LANES`, each of 16 heads; top is raised to the largest score if one exceeds it
    by more than `SLACK`, and the sums, and `out`, float32 `[TILE, head_dim]`, are then rescaled. `pairs` is
    scratch for a tile.

    If masked is not 0, a head sees the positions between its `bounds`, int32 `[2, TILE]`; others have
    weights of 0.

    Args:
        head_dim: of `out`; a multiple of `LANES`.
        ahead: whether the rows of the page at `next_key` and `next_value` are prefetched on the way.
    """
    lowest, zero, row_bytes = constant(LOWEST), constant(0), 2 * head_dim

    def emit(builder, values):
        scores, state, out, bounds, first, last, masked, pairs, weights, next_key, next_value = values
        low, high = (builder.bitcast(load(builder, bounds, part), INTEGERS) for part in (0, LANES))

        def seen(t, value, other):
            position = splat(builder, builder.trunc(t, NARROW))
            after_begin = builder.icmp_signed(">=", position, low)
            inside = builder.and_(after_begin, builder.icmp_signed("<", position, high))
            return builder.select(inside, value, other)

        def score(t):
            return load(builder, scores, builder.mul(t, WORD(LANES)))

        def page(inside):
            maximum = _largest(builder, first, last, lambda t: inside(t, score(t), lowest))
            limit = builder.fadd(load(builder, state, 0), constant(SLACK))
            exceeded = builder.fcmp_ordered(">", maximum, limit)
            with builder.if_then(any_lane(builder, exceeded), likely=False):
                _raise_tops(
                    builder, builder.select(exceeded, maximum, load(builder, state, 0)), state, out, head_dim
                )
            top = load(builder, state, 0)

            def weigh_pair(t):
                bits = []
                for place in (t, builder.add(t, WORD(1))):
                    weight = inside(place, exponential(builder, builder.fsub(score(place), top)), zero)
                    lane = builder.add(builder.and_(place, WORD(LANES - 1)), WORD(1))
                    sums = builder.add(state, builder.mul(lane, WORD(4 * LANES)))
                    store(builder, builder.fadd(load(builder, sums, 0), weight), sums, 0)
                    bits.append(builder.bitcast(nearest(builder, weight), INTEGERS))
                    for next_page in (next_key, next_value) if ahead else ():
                        prefetch_row(builder, next_page, place, row_bytes)
                lower, upper = builder.lshr(bits[0], integers(16)), builder.and_(bits[1], integers(UPPER))
                return builder.bitcast(builder.or_(lower, upper), VECTOR)

            def step(t, _):
                def pair(number, _):
                    both = weigh_pair(builder.add(t, builder.shl(number, WORD(1))))
                    store(builder, both, pairs, builder.mul(number, WORD(LANES)))
                    return []

                loop(builder, WORD(0), WORD(TILE), 1, [], pair)
                rows = transposed(builder, [load(builder, pairs, LANES * number) for number in range(TILE)])
                tile = builder.add(weights, builder.mul(t, WORD(TILE_BYTES // STEP)))
                for head, row in enumerate(rows):
                    store(builder, row, tile, LANES * head)
                return []

            loop(builder, first, last, STEP, [], step)

        with builder.if_else(builder.icmp_signed("!=", masked, WORD(0))) as (then, otherwise):
            with then:
                page(seen)
            with otherwise:
                page(lambda t, value, other: value)

    return intrinsic_of(11, emit)


def _largest(builder: Any, first: Any, last: Any, value: Any) -> Any:
    """Emit the largest of vectors, lane by lane.

    Args:
        builder: of the function.
        first: number of the first vector.
        last: number behind the last vector; a multiple of `MAXIMA` follow each other.
        value: `value(t)` emits the vector of the number t.
    """

    def add(t, maxima):
        values = (value(builder.add(t, WORD(i))) for i in range(MAXIMA))
        return [larger(builder, x, y) for x, y in zip(values, maxima, strict=True)]

    maximum, *others = loop(builder, first, last, MAXIMA, [constant(LOWEST)] * MAXIMA, add)
    for other in others:
        maximum = larger(builder, maximum, other)
    return maximum


def _raise_tops(builder: Any, tops: Any, state: Any, out: Any, head_dim: int) -> None:
    """Emit the rescaling of the sums of an online softmax to larger tops.

    Args:
        builder: of the function.
        tops: vector, a lane for each head.
        state: address of the tops before, and the sums of weights.
        out: address of the weighted sums, float32 `[TILE, head_dim]`.
        head_dim: of the weighted sums.
    """
    shrink = exponential(builder, builder.fsub(load(builder, state, 0), tops))
    store(builder, tops, state, 0)
    for sums in range(LANES, (1 + LANES) * LANES, LANES):
        store(builder, builder.fmul(load(builder, state, sums), shrink), state, sums)
    for head in range(TILE):
        factor = broadcast(builder, builder.extract_element(shrink, NARROW(head)))
        for offset in range(head * head_dim, (head + 1) * head_dim, LANES):
            store(builder, builder.fmul(load(builder, out, offset), factor), out, offset)


@cache
def add_weighted(head_dim: int, row_bytes: int = 2 * STEP) -> Any:
    """`add_weighted(weights, values, first, last, out)`: out[h] += Σ weights[h, t] values[t], for 16 heads.

    The sum runs over t from first to before last, multiples of `STEP`. Values are tiles of `pair_rows`;
    `out` is float32 `[TILE, head_dim]`.

    Args:
        head_dim: a multiple of `LANES`.
        row_bytes: between the weights of heads, bfloat16; by default they are tiles of `softmax`.
    """
    parts = head_dim // LANES
    tile_bytes = TILE_BYTES if row_bytes == 2 * STEP else 2 * STEP  # from the weights of a step to the next

    def emit(builder, values):
        weights, data, first, last, out = values

        def sums(name, chosen):
            for register, part in enumerate(chosen):
                transfer(
                    builder, name, register, builder.add(out, WORD(4 * LANES * part)), WORD(4 * head_dim)
                )

        for begin in range(0, parts, SUMS_AT_ONCE):
            chosen = range(begin, min(begin + SUMS_AT_ONCE, parts))
            sums("tileloadd64", chosen)

            def step(t, _, chosen=chosen):
                row = builder.add(weights, builder.mul(t, WORD(tile_bytes // STEP)))
                tiles = builder.add(data, builder.mul(t, WORD(parts * TILE_BYTES // STEP)))
                columns = [builder.add(tiles, WORD(part * TILE_BYTES)) for part in chosen]
                multiply_step(builder, [row], columns, row_bytes=row_bytes)
                return []

            loop(builder, first, last, STEP, [], step)
            sums("tilestored64", chosen)

    return intrinsic_of(5, emit)
