"""Attention to a page on matrix units: operands of bfloat16, sums and softmax of float32.

Query heads are multiplied in tiles of 16. The scores of a tile have a row for each position and a lane for
each head. Either 16 heads have their softmax in one sequence of vector instructions, and its weights are
transposed; or the scores of a few heads are, and each has the softmax of `attention`. The rows of values are
laid out in pairs once for all tiles.

What is computed for a head, and in which order, does not depend on the other heads of its tile, nor on which
of the two ways it goes: its products are chains over positions in ascending order, to which positions that it
does not see add zeros, and its weights are added up by their position modulo 16. The functions are for Numba
code, specialised for the given sizes; addresses are integers.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from .attention import SLACK
from .control_flow import loop
from .instructions import (
    CACHE_LINE,
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
    load_fours,
    permute,
    prefetch,
    splat,
    store,
)
from .kernel import EXACT, array, njit
from .matrix_tiles import STEP, TILE, TILE_BYTES, clear_sums, multiply_step, transfer
from .pairs import nearest, store_shorts

UPPER = -65536  # the bits of the upper half of a lane
SUMS_AT_ONCE = 4  # tiles of weighted sums that stay in registers
MAXIMA = 4  # that are kept apart until all positions are seen
FEW = 4  # heads at most, whose scores are transposed
EXPONENT = 0x7F80  # of bfloat16: all ones in infinity and NaN


@njit(**EXACT)
def lay_out_queries(rounded, heads, head_dim, tiles):
    """Rounded queries as tiles, whose lanes are heads; lanes without a head are 0.

    Args:
        rounded: address of the queries, bfloat16 `[heads, head_dim]`.
        heads: number of them.
        head_dim: a multiple of `STEP`.
        tiles: address of the tiles, by 16 heads and then by steps.
    """
    pairs, steps, number = head_dim // 2, head_dim // STEP, (heads + TILE - 1) // TILE
    source = array(rounded, (heads, pairs), np.uint32)
    target = array(tiles, (number, steps, TILE, TILE), np.uint32)
    for tile in range(number):
        for step in range(steps):
            for pair in range(TILE):
                for lane in range(TILE):
                    head = tile * TILE + lane
                    seen = source[head, step * TILE + pair] if head < heads else np.uint32(0)
                    target[tile, step, pair, lane] = seen


@njit(**EXACT)
def has_other_than_numbers(values, begin, end, head_dim):
    """Whether a row from `begin` to before `end` of values, bfloat16 `[…, head_dim]`, has NaN or infinity."""
    bits = array(values + 2 * begin * head_dim, ((end - begin) * head_dim,), np.uint16)
    found = 0
    for i in range(bits.shape[0]):
        found += np.int64((bits[i] & np.uint16(EXPONENT)) == np.uint16(EXPONENT))
    return found > 0


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
    lowest, zero, row_bytes = constant(float(np.finfo(np.float32).min)), constant(0), 2 * head_dim

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
            def add_to_maxima(t, maxima):
                places = [builder.add(t, WORD(i)) for i in range(MAXIMA)]
                return [
                    larger(builder, inside(p, score(p), lowest), m)
                    for p, m in zip(places, maxima, strict=True)
                ]

            maximum, *others = loop(builder, first, last, MAXIMA, [lowest] * MAXIMA, add_to_maxima)
            for other in others:
                maximum = larger(builder, maximum, other)
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


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """The columns of the matrix whose rows are sixteen vectors: ever smaller blocks of it are exchanged.

    Args:
        builder: of the function.
        rows: the vectors.
    """
    rows = list(rows)
    for size in (8, 4, 2, 1):
        upper = [lane & size == 0 for lane in range(LANES)]
        from_first = [lane if up else LANES + lane - size for lane, up in enumerate(upper)]
        from_second = [lane + size if up else LANES + lane for lane, up in enumerate(upper)]
        for i in range(TILE):
            if i & size == 0:
                both = rows[i], rows[i + size]
                rows[i], rows[i + size] = (
                    permute(builder, both, lanes) for lanes in (from_first, from_second)
                )
    return rows


@cache
def scores_by_head(number: int, head_dim: int, page_size: int) -> Any:
    """`scores_by_head(scores, first, last, out, next_key)`: the scores of a tile as rows of its first heads.

    `out` is float32 `[number, page_size]`. The rows of the page at `next_key` that `scores` has left are
    prefetched on the way.

    Args:
        number: of heads, at most `FEW`.
        head_dim: of keys.
        page_size: positions of a page.
    """

    def emit(builder, values):
        scores, first, last, out, next_key = values

        def positions(t, _):
            rows = [builder.mul(builder.add(t, WORD(FEW * k)), WORD(LANES)) for k in range(FEW)]
            fours = [load_fours(builder, scores, rows, LANES * j, "float32") for j in range(FEW)]
            for head, value in enumerate(_transposed_fours(builder, fours)[:number]):
                store(builder, value, out, builder.add(t, WORD(head * page_size)))
            for i in range(1, LANES, 2):
                prefetch_row(builder, next_key, builder.add(t, WORD(i)), 2 * head_dim)
            return []

        loop(builder, first, last, LANES, [], positions)

    return intrinsic_of(5, emit)


def _transposed_fours(builder: Any, values: list[Any]) -> list[Any]:
    """Four vectors of which each four of lanes, with those of the others, is transposed as a matrix.

    Args:
        builder: of the function.
        values: the vectors.
    """

    def both(x, y, *lanes):
        """The fours of x and y with these lanes, of which those of y are 4 to 7."""
        places = [
            4 * k + lane if lane < 4 else LANES + 4 * k + lane - 4 for k in range(FEW) for lane in lanes
        ]
        return permute(builder, [x, y], places)

    a, b, c, d = values
    low, high = ([both(x, y, *lanes) for x, y in ((a, b), (c, d))] for lanes in ((0, 4, 1, 5), (2, 6, 3, 7)))
    return [both(*pair, *lanes) for pair in (low, high) for lanes in ((0, 1, 4, 5), (2, 3, 6, 7))]


def prefetch_row(builder: Any, page: Any, row: Any, row_bytes: int) -> None:
    """Prefetch a row of keys or values.

    Args:
        builder: of the function.
        page: address of its page.
        row: number of the row in the page.
        row_bytes: bytes of a row.
    """
    address = builder.add(page, builder.mul(row, WORD(row_bytes)))
    for line in range(0, row_bytes, CACHE_LINE):
        prefetch(builder, builder.add(address, WORD(line)))


@cache
def pair_rows(head_dim: int, ahead: bool = False) -> Any:
    """`pair_rows(values, first, last, begin, end, tiles, next_value)`: rows of values as tiles of pairs.

    Rows from first to before last, multiples of `STEP`, are laid out, by steps and then by 16 columns in the
    order of `column_places`; those outside of begin to before end as zeros, whatever they hold.

    Args:
        head_dim: a multiple of `STEP`.
        ahead: whether the rows of the page at `next_value` are prefetched on the way.
    """
    parts, row_bytes, words = head_dim // LANES, 2 * head_dim, ir.VectorType(ir.IntType(16), STEP)
    lower, upper = ([8 * k + half + i for k in range(4) for i in range(4)] for half in (0, 4))

    def emit(builder, values):
        data, first, last, begin, end, tiles, next_value = values

        def elements(row, is_seen, part):
            """Thirty-two numbers of a row; zeros where it is not seen."""
            place = builder.add(data, builder.add(builder.mul(row, WORD(row_bytes)), WORD(2 * STEP * part)))
            bits = builder.load(builder.inttoptr(place, words.as_pointer()), align=2)
            return builder.select(is_seen, bits, ir.Constant(words, None))

        def pair(t, _):
            rows = [t, builder.add(t, WORD(1))]
            seen = [
                builder.and_(builder.icmp_signed(">=", row, begin), builder.icmp_signed("<", row, end))
                for row in rows
            ]
            place = builder.mul(builder.and_(t, WORD(-STEP)), WORD(parts * TILE_BYTES // STEP))
            place = builder.add(place, builder.mul(builder.and_(t, WORD(STEP - 1)), WORD(STEP)))
            target = builder.add(tiles, place)
            for part in range(head_dim // STEP):
                both = [elements(row, is_seen, part) for row, is_seen in zip(rows, seen, strict=True)]
                for half, lanes in enumerate((lower, upper)):
                    paired = permute(builder, both, [lane + STEP * i for lane in lanes for i in (0, 1)])
                    store_shorts(builder, paired, builder.add(target, WORD((2 * part + half) * TILE_BYTES)))
            for row in rows if ahead else ():
                prefetch_row(builder, next_value, row, row_bytes)
            return []

        loop(builder, first, last, 2, [], pair)

    return intrinsic_of(7, emit)


def column_places(head_dim: int) -> tuple[int, ...]:
    """Where `pair_rows` puts each column: the way in which x86 unpacks vectors keeps fours together.

    Args:
        head_dim: a multiple of `STEP`.

    >>> column_places(32)[:10]
    (0, 1, 2, 3, 16, 17, 18, 19, 4, 5)
    """
    return tuple(d // STEP * STEP + d % 8 // 4 * TILE + d % STEP // 8 * 4 + d % 4 for d in range(head_dim))


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
