"""Matrix tiles: products of bfloat16 on the matrix units of x86 processors (AMX), with sums in float32.

One instruction multiplies a tile of up to 16 rows and 32 inputs by a tile of 32 inputs and 16 columns, and
adds the product to a tile of sums. Every sum is one chain over the inputs, `STEP` at a time in ascending
order, whatever the number of rows is; storing sums and loading them again changes no bit.

Tiles lie in memory one after the other, `TILE_BYTES` each: those of the rows by tiles of rows, then by steps;
those of a weight by tiles of columns, then by steps, the two inputs of a pair side by side.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from .control_flow import loop
from .instructions import (
    CACHE_LINE,
    ITEMSIZE,
    LANES,
    NARROW,
    WORD,
    integers,
    intrinsic_of,
    load,
    load_widened,
    permute,
    prefetch,
    store,
)

TILE = 16  # rows or columns
STEP = 32  # inputs
TILE_BYTES = 1024
CONFIGURATION = 64  # bytes
SHORT, BYTE = ir.IntType(16), ir.IntType(8)
AHEAD = 4  # steps between a prefetch and the use, in `stream`
STREAM_BYTES = 2 * 4 * TILE_BYTES
ROW_TILE, COLUMN_TILE = 4, 6  # the first registers of tiles of rows and of a weight; sums have those below


def _call(builder: Any, name: str, *arguments: Any) -> None:
    """Emit a call of an LLVM function of x86 that returns nothing."""
    function_type = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    full_name = f"llvm.x86.{name}"
    function = builder.module.globals.get(full_name) or ir.Function(builder.module, function_type, full_name)
    builder.call(function, arguments)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, BYTE.as_pointer())


def _transfer(builder: Any, name: str, register: int, address: Any, stride: Any) -> None:
    """Load a tile or store it; `stride` is in bytes."""
    _call(builder, name, BYTE(register), _pointer(builder, address), stride)


load_configuration = intrinsic_of(1, lambda builder, a: _call(builder, "ldtilecfg", _pointer(builder, a[0])))
store_configuration = intrinsic_of(1, lambda builder, a: _call(builder, "sttilecfg", _pointer(builder, a[0])))


@cache
def configure() -> Any:
    """`configure(memory, rows)`: sums and rows in tiles of `rows` rows; it needs `CONFIGURATION` bytes."""
    from .kernel import EXACT, array, njit

    @njit(**EXACT)
    def configure(memory, rows):
        table = array(memory, (CONFIGURATION,), np.uint8)
        table[:] = np.uint8(0)
        table[0] = np.uint8(1)  # the palette of eight tiles
        for tile in range(8):
            table[16 + 2 * tile] = np.uint8(2 * STEP)  # bytes of a row
            table[48 + tile] = np.uint8(rows if tile < COLUMN_TILE else TILE)
        load_configuration(memory)

    return configure


@cache
def product(row_tiles: int, column_tiles: int) -> Any:
    """`product(rows, row_stride, weight, column_stride, steps, out, out_stride, begin)`: tiles of sums.

    If begin is above 0, sums continue from those in out. Strides are in bytes: of a tile of rows, a tile of
    columns and a row of out.

    Args:
        row_tiles: 1 or 2.
        column_tiles: 2, or 4 with one tile of rows.
    """

    def emit(builder, values):
        rows, row_stride, weight, column_stride, steps, out, out_stride, begin = values

        def sums(name):
            for r in range(row_tiles):
                first = builder.add(out, builder.mul(out_stride, WORD(TILE * r)))
                for c in range(column_tiles):
                    address = builder.add(first, WORD(4 * TILE * c))
                    _transfer(builder, name, column_tiles * r + c, address, out_stride)

        with builder.if_else(builder.icmp_signed(">", begin, WORD(0))) as (continued, new):
            with continued:
                sums("tileloadd64")
            with new:
                for number in range(row_tiles * column_tiles):
                    _call(builder, "tilezero", BYTE(number))

        def advance(step, carried):
            from_rows, from_weight = carried
            for c in range(column_tiles):
                register = COLUMN_TILE + c % 2
                address = builder.add(from_weight, builder.mul(column_stride, WORD(c)))
                _transfer(builder, "tileloadd64", register, address, WORD(2 * STEP))
                for r in range(row_tiles):
                    if c == 0:
                        address = builder.add(from_rows, builder.mul(row_stride, WORD(r)))
                        _transfer(builder, "tileloadd64", ROW_TILE + r, address, WORD(2 * STEP))
                    sums_register = BYTE(column_tiles * r + c)
                    _call(builder, "tdpbf16ps", sums_register, BYTE(ROW_TILE + r), BYTE(register))
            return [builder.add(address, WORD(TILE_BYTES)) for address in carried]

        loop(builder, WORD(0), steps, 1, [rows, weight], advance)
        sums("tilestored64")

    return intrinsic_of(8, emit)


def _as_short(builder: Any, value: Any) -> Any:
    """The upper halves of the lanes of a vector: the same numbers where these are numbers of bfloat16."""
    bits = builder.bitcast(value, ir.VectorType(NARROW, LANES))
    return builder.trunc(builder.lshr(bits, integers(16)), ir.VectorType(SHORT, LANES))


def _rounded(builder: Any, value: Any) -> Any:
    """A vector rounded to bfloat16, to nearest with ties to even; NaN stays NaN."""
    bits = builder.bitcast(value, ir.VectorType(NARROW, LANES))
    odd = builder.and_(builder.lshr(bits, integers(16)), integers(1))
    nearest = builder.lshr(builder.add(builder.add(bits, integers(0x7FFF)), odd), integers(16))
    nearest = builder.select(builder.fcmp_unordered("uno", value, value), integers(0x7FC0), nearest)
    return builder.trunc(nearest, ir.VectorType(SHORT, LANES))


def _store_shorts(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=2)


def _emit_rounded(builder, values):
    x, target, steps = values

    def advance(step, carried):
        source, to = carried
        halves = [_rounded(builder, load(builder, source, LANES * half)) for half in (0, 1)]
        _store_shorts(builder, permute(builder, halves, range(STEP)), to)
        return [builder.add(source, WORD(4 * STEP)), builder.add(to, WORD(TILE_BYTES))]

    loop(builder, WORD(0), steps, 1, [x, target], advance)


round_steps = intrinsic_of(3, _emit_rounded)
"""`round_steps(x, target, steps)`: one row of x, float32, as a row of tiles."""


@cache
def store_rows() -> Any:
    """`store_rows(x, rows, inputs, first, target)`: the rows from `first` on, up to `TILE`, as tiles.

    x is float32 `[rows, inputs]`; the last step is filled up with zeros.
    """
    from .kernel import EXACT, array, njit

    @njit(**EXACT)
    def store_rows(x, rows, inputs, first, target):
        full = inputs // STEP
        for r in range(min(TILE, rows - first)):
            source, to = x + 4 * (first + r) * inputs, target + 2 * STEP * r
            round_steps(source, to, full)
            if full * STEP < inputs:
                bits = array(source + 4 * full * STEP, (STEP,), np.uint32)
                shorts = array(to + TILE_BYTES * full, (STEP,), np.uint16)
                for i in range(STEP):
                    shorts[i] = np.uint16(0)
                for i in range(inputs - full * STEP):
                    shorts[i] = rounded_bits(bits[i])

    @njit(**EXACT)
    def rounded_bits(bits):
        if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            return np.uint16(0x7FC0)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

    return store_rows


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
            _store_shorts(builder, value, builder.add(to, offset))
        both = builder.shl(row_bytes, WORD(1))
        return [builder.add(x, step) for x, step in zip(carried, (both, WORD(2 * STEP), both), strict=True)]

    return loop(builder, WORD(0), number, 1, places, advance)


def _interleaved(builder: Any, dtype: str, block: int, first: Any, second: Any) -> Iterator[Any]:
    """Two rows of a weight as rows of tiles of pairs, in the order of the columns."""
    lanes = [i // 2 + LANES * (i % 2) for i in range(STEP)]
    for c in range(0, block, TILE):
        halves = [_as_short(builder, load_widened(builder, row, c, dtype)) for row in (first, second)]
        yield permute(builder, halves, lanes)


def _unpacked(builder: Any, dtype: str, block: int, first: Any, second: Any) -> Iterator[Any]:
    """Two rows of a weight as rows of tiles of pairs, as x86 unpacks vectors: in half of the time.

    Of 32 columns, a tile holds every second four; `_in_order` puts the sums in order.
    """
    for c in range(0, block, 2 * TILE):
        rows = []
        for row in (first, second):
            halves = [_as_short(builder, load_widened(builder, row, c + half, dtype)) for half in (0, TILE)]
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
            for r in range(row_tiles):
                address = builder.add(from_rows, builder.mul(row_stride, WORD(r)))
                _transfer(builder, "tileloadd64", ROW_TILE + r, address, WORD(2 * STEP))
            for c in range(column_tiles):
                register, address = COLUMN_TILE + c % 2, builder.add(current, WORD(c * TILE_BYTES))
                _transfer(builder, "tileloadd64", register, address, WORD(2 * STEP))
                for r in range(row_tiles):
                    sums = BYTE(column_tiles * r + c)
                    _call(builder, "tdpbf16ps", sums, BYTE(ROW_TILE + r), BYTE(register))
            return [builder.add(from_rows, WORD(TILE_BYTES)), source, later, current]

        for tile in range(4):
            _call(builder, "tilezero", BYTE(tile))
        lay_out(WORD(pairs), WORD(0), weight, memory)
        second = builder.add(memory, WORD(step_bytes))
        loop(builder, WORD(0), steps, 1, [rows, weight, memory, second], advance)
        # A row of all tiles of columns is one row of memory.
        for tile in range(4):
            r, c = divmod(tile, column_tiles)
            address = builder.add(memory, WORD(4 * TILE * (TILE * r * column_tiles + c)))
            _transfer(builder, "tilestored64", tile, address, WORD(4 * columns))

        def put_in_order(row, carried):
            source, target = carried
            for c in range(0, columns, 2 * TILE):
                halves = [load(builder, source, c + half) for half in (0, TILE)]
                for k, value in enumerate(_in_order(builder, *halves)):
                    store(builder, value, target, c + TILE * k)
            return [builder.add(source, WORD(4 * columns)), builder.add(target, out_stride)]

        loop(builder, WORD(0), number, 1, [memory, out], put_in_order)

    return intrinsic_of(10, emit)
