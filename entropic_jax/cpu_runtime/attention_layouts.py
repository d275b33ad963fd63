"""Layouts of attention on matrix units: queries, scores, weights and values, as tiles and as rows of heads.

The functions are for Numba code, specialised for the given sizes; addresses are integers.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from .control_flow import loop
from .instructions import (
    CACHE_LINE,
    LANES,
    WORD,
    intrinsic_of,
    load_fours,
    permute,
    prefetch,
    store,
)
from .kernel import EXACT, array, njit
from .matrix_tiles import STEP, TILE, TILE_BYTES
from .pairs import store_shorts

HEADS_APART = 4  # heads at most whose scores become rows: each then has a softmax of its own
EXPONENT = 0x7F80  # of bfloat16: all ones in infinity and NaN


@njit(**EXACT)
def lay_out_queries(rounded: int, heads: int, head_dim: int, tiles: int) -> None:
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
def has_nan_or_infinity(values: int, begin: int, end: int, head_dim: int) -> bool:
    """Whether some rows of values hold NaN or infinity.

    Args:
        values: address of the values, bfloat16 `[…, head_dim]`.
        begin: number of the first row.
        end: number of the row behind the last.
        head_dim: elements of a row.
    """
    bits = array(values + 2 * begin * head_dim, ((end - begin) * head_dim,), np.uint16)
    count = 0
    for i in range(bits.shape[0]):
        count += np.int64((bits[i] & np.uint16(EXPONENT)) == np.uint16(EXPONENT))
    return bool(count > 0)


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Vectors of which each block of as many lanes, with those of the others, is transposed as a matrix.

    Sixteen vectors are one block, four have blocks of four lanes. Ever smaller parts are exchanged.

    Args:
        builder: of the function.
        rows: the vectors; their number is a power of 2, at most `LANES`.
    """
    rows, size = list(rows), len(rows) // 2
    while size > 0:
        upper = [lane & size == 0 for lane in range(LANES)]
        from_first = [lane if up else LANES + lane - size for lane, up in enumerate(upper)]
        from_second = [lane + size if up else LANES + lane for lane, up in enumerate(upper)]
        for i in range(len(rows)):
            if i & size == 0:
                both = rows[i], rows[i + size]
                rows[i], rows[i + size] = (
                    permute(builder, both, lanes) for lanes in (from_first, from_second)
                )
        size //= 2
    return rows


@cache
def scores_by_head(number: int, head_dim: int, page_size: int) -> Any:
    """`scores_by_head(scores, first, last, out, next_key)`: the scores of a tile as rows of its first heads.

    `out` is float32 `[number, page_size]`. The rows of the page at `next_key` that `scores` has left are
    prefetched on the way.

    Args:
        number: of heads, at most `HEADS_APART`.
        head_dim: of keys.
        page_size: positions of a page.
    """

    def emit(builder, values):
        scores, first, last, out, next_key = values

        def positions(t, _):
            rows = [
                builder.mul(builder.add(t, WORD(HEADS_APART * k)), WORD(LANES)) for k in range(HEADS_APART)
            ]
            fours = [load_fours(builder, scores, rows, LANES * j, "float32") for j in range(HEADS_APART)]
            for head, value in enumerate(transposed(builder, fours)[:number]):
                store(builder, value, out, builder.add(t, WORD(head * page_size)))
            for i in range(1, LANES, 2):
                prefetch_row(builder, next_key, builder.add(t, WORD(i)), 2 * head_dim)
            return []

        loop(builder, first, last, LANES, [], positions)

    return intrinsic_of(5, emit)


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
