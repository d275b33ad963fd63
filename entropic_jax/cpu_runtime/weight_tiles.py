"""Weights as tiles of bfloat16 for matrix units, laid out as they are multiplied.

Tiles of a weight have the two inputs of a pair side by side. They lie by tiles of columns, then by steps.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from .control_flow import loop
from .instructions import (
    CACHE_LINE,
    ITEMSIZE,
    LANES,
    WORD,
    intrinsic_of,
    load,
    load_widened,
    permute,
    prefetch,
    store,
)
from .matrix_tiles import STEP, TILE, TILE_BYTES, clear_sums, multiply_step, transfer
from .pairs import as_short, store_shorts

STREAM_BYTES = 2 * 4 * TILE_BYTES
AHEAD = 4  # steps between a prefetch and the use


def _emit_pairs(
    builder: Any, dtype: str, block: int, number: Any, places: list[Any], row_bytes: Any, column_stride: Any
) -> list[Any]:
    """A loop that lays out pairs of rows of a weight, of `block` columns, as tiles.

    Args:
        builder: of the function.
        dtype: of the weight.
        block: columns.
        number: of pairs.
        places: the addresses of the weight, of the tiles, and of rows to prefetch.
        row_bytes: of the weight.
        column_stride: bytes between tiles of neighbouring columns. None puts them one after the other, in the
            order of `_unpacked`.

    Returns:
        The places behind the last pair.
    """

    def advance(pair, carried):
        first, to, ahead = carried
        second = builder.add(first, row_bytes)
        for row in (ahead, builder.add(ahead, row_bytes)):
            for line in range(0, block * ITEMSIZE[dtype], CACHE_LINE):
                prefetch(builder, builder.add(row, WORD(line)))
        tiles = _unpacked if column_stride is None else _interleaved
        for c, value in enumerate(tiles(builder, dtype, block, first, second)):
            offset = WORD(c * TILE_BYTES) if column_stride is None else builder.mul(column_stride, WORD(c))
            store_shorts(builder, value, builder.add(to, offset))
        both = builder.shl(row_bytes, WORD(1))
        return [builder.add(x, step) for x, step in zip(carried, (both, WORD(2 * STEP), both), strict=True)]

    return loop(builder, WORD(0), number, 1, places, advance)


def _interleaved(builder: Any, dtype: str, block: int, first: Any, second: Any) -> Iterator[Any]:
    """Two rows of a weight as rows of tiles of pairs, in the order of the columns."""
    lanes = [i // 2 + LANES * (i % 2) for i in range(STEP)]
    for c in range(0, block, TILE):
        halves = [as_short(builder, load_widened(builder, row, c, dtype)) for row in (first, second)]
        yield permute(builder, halves, lanes)


def _unpacked(builder: Any, dtype: str, block: int, first: Any, second: Any) -> Iterator[Any]:
    """Two rows of a weight as rows of tiles of pairs, as x86 unpacks vectors: in half of the time.

    Of 32 columns, a tile holds every second four; `_in_order` puts the sums in order.
    """
    for c in range(0, block, 2 * TILE):
        rows = []
        for row in (first, second):
            halves = [as_short(builder, load_widened(builder, row, c + half, dtype)) for half in (0, TILE)]
            rows.append(permute(builder, halves, range(STEP)))
        for four in (0, 4):
            yield permute(
                builder, rows, [i // 8 * 8 + four + i % 8 // 2 + STEP * (i % 2) for i in range(STEP)]
            )


def _in_order(builder: Any, low: Any, high: Any) -> list[Any]:
    """The sums of 32 columns in their order, from a row of each of the two tiles of `_unpacked`."""
    fours = [[4 * k + LANES * tile + i for tile in (0, 1) for i in range(4)] for k in range(4)]
    return [permute(builder, [low, high], fours[k] + fours[k + 1]) for k in (0, 2)]


@cache
def store_pairs(dtype: str, block: int) -> Any:
    """`store_pairs(weight, row_bytes, pairs, target, column_stride, ahead)`: a block of a weight as tiles.

    It prefetches the rows from the address `ahead` on.

    Args:
        dtype: of the weight, whose elements bfloat16 can hold.
        block: columns, a multiple of `TILE`.
    """

    def emit(builder, values):
        weight, row_bytes, pairs, target, column_stride, ahead = values
        _emit_pairs(builder, dtype, block, pairs, [weight, target, ahead], row_bytes, column_stride)

    return intrinsic_of(6, emit)


@cache
def stream(dtype: str, row_tiles: int) -> Any:
    """`stream(rows, row_stride, weight, row_bytes, steps, memory, out, out_stride, number, following)`.

    The product of `number` rows and some columns of a weight. It lays out a step of the weight while it
    multiplies the one before, and prefetches the steps after them, at last those at the address `following`.
    `memory` holds `STREAM_BYTES`.

    Args:
        dtype: of the weight, whose elements bfloat16 can hold.
        row_tiles: tiles of rows, 1 with 64 columns or 2 with 32.
    """
    column_tiles, pairs = 4 // row_tiles, STEP // 2
    columns, step_bytes = column_tiles * TILE, column_tiles * TILE_BYTES

    def emit(builder, values):
        rows, row_stride, weight, row_bytes, steps, memory, out, out_stride, number, following = values
        weight_step = builder.mul(row_bytes, WORD(STEP))

        def lay_out(number_of_pairs, step, source, target):
            later = builder.add(step, WORD(AHEAD))
            beyond = builder.add(following, builder.mul(builder.sub(later, steps), weight_step))
            within = builder.add(source, builder.mul(weight_step, WORD(AHEAD)))
            ahead = builder.select(builder.icmp_signed("<", later, steps), within, beyond)
            _emit_pairs(builder, dtype, columns, number_of_pairs, [source, target, ahead], row_bytes, None)

        def advance(step, carried):
            from_rows, source, current, later = carried
            next_step, source = builder.add(step, WORD(1)), builder.add(source, weight_step)
            left = builder.icmp_signed("<", next_step, steps)
            lay_out(builder.select(left, WORD(pairs), WORD(0)), next_step, source, later)
            tiles = [builder.add(current, WORD(c * TILE_BYTES)) for c in range(column_tiles)]
            row_places = [builder.add(from_rows, builder.mul(row_stride, WORD(r))) for r in range(row_tiles)]
            multiply_step(builder, row_places, tiles)
            return [builder.add(from_rows, WORD(TILE_BYTES)), source, later, current]

        clear_sums(builder, 0, 4)
        lay_out(WORD(pairs), WORD(0), weight, memory)
        second = builder.add(memory, WORD(step_bytes))
        loop(builder, WORD(0), steps, 1, [rows, weight, memory, second], advance)
        # A row of all tiles of columns is one row of memory.
        for tile in range(4):
            r, c = divmod(tile, column_tiles)
            address = builder.add(memory, WORD(4 * TILE * (TILE * r * column_tiles + c)))
            transfer(builder, "tilestored64", tile, address, WORD(4 * columns))

        def put_in_order(row, carried):
            source, target = carried
            for c in range(0, columns, 2 * TILE):
                halves = [load(builder, source, c + half) for half in (0, TILE)]
                for k, value in enumerate(_in_order(builder, *halves)):
                    store(builder, value, target, c + TILE * k)
            return [builder.add(source, WORD(4 * columns)), builder.add(target, out_stride)]

        loop(builder, WORD(0), number, 1, [memory, out], put_in_order)

    return intrinsic_of(10, emit)
