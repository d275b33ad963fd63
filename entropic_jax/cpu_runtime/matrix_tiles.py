"""Matrix tiles: products of bfloat16 on the matrix units of x86 processors (AMX), with sums in float32.

One instruction multiplies a tile of up to 16 rows and 32 inputs by a tile of 32 inputs and 16 columns, and
adds the product to a tile of sums. Every sum is one chain over the inputs, `STEP` at a time in ascending
order, whatever the number of rows is; storing sums and loading them again changes no bit.

`row_tiles` lays out rows as tiles and `weight_tiles` weights.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from .control_flow import loop
from .instructions import WORD, intrinsic_of

TILE = 16  # rows or columns
STEP = 32  # inputs
TILE_BYTES = 1024
CONFIGURATION = 64  # bytes
BYTE = ir.IntType(8)
ROW_TILE, COLUMN_TILE = 4, 6  # the first registers of tiles of rows and of a weight; sums have those below


def _call(builder: Any, name: str, *arguments: Any) -> None:
    """Emit a call of an LLVM function of x86 that returns nothing."""
    function_type = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    full_name = f"llvm.x86.{name}"
    function = builder.module.globals.get(full_name) or ir.Function(builder.module, function_type, full_name)
    builder.call(function, arguments)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, BYTE.as_pointer())


def transfer(builder: Any, name: str, register: int, address: Any, stride: Any) -> None:
    """Emit a load of a tile, or a store.

    Args:
        builder: of the function.
        name: "tileloadd64" or "tilestored64".
        register: of the tile.
        address: of its first row.
        stride: bytes between its rows.
    """
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


def clear_sums(builder: Any, first: int, number: int) -> None:
    """Emit zeros for some tiles of sums.

    Args:
        builder: of the function.
        first: the first register of them.
        number: of tiles.
    """
    for tile in range(first, first + number):
        _call(builder, "tilezero", BYTE(tile))


def multiply_step(
    builder: Any, rows: list[Any], columns: list[Any], first: int = 0, row_bytes: int = 2 * STEP
) -> None:
    """Emit the products of a step: tiles of rows by tiles of columns, whose sums have registers in row order.

    Args:
        builder: of the function.
        rows: the address of each tile of rows.
        columns: the address of each tile of columns.
        first: the first register of sums.
        row_bytes: between the rows of a tile of rows.
    """
    for c, address in enumerate(columns):
        column = COLUMN_TILE + c % 2
        transfer(builder, "tileloadd64", column, address, WORD(2 * STEP))
        for r, row in enumerate(rows):
            if c == 0:
                transfer(builder, "tileloadd64", ROW_TILE + r, row, WORD(row_bytes))
            sums = BYTE(first + len(columns) * r + c)
            _call(builder, "tdpbf16ps", sums, BYTE(ROW_TILE + r), BYTE(column))


@cache
def product(row_tiles: int, column_tiles: int, step_bytes: int, first: int = 0) -> Any:
    """`product(rows, row_stride, weight, column_stride, steps, out, out_stride, begin)`: tiles of sums.

    If begin is above 0, sums continue from those in out. Strides are in bytes: of a tile of rows, a tile of
    columns and a row of out.

    Args:
        row_tiles: 1 or 2.
        column_tiles: 2, or 4 with one tile of rows.
        step_bytes: between the tiles of one step of the weight and of the next.
        first: the first register of sums. A product begins while the one before ends if theirs differ.
    """

    def emit(builder, values):
        rows, row_stride, weight, column_stride, steps, out, out_stride, begin = values

        def tiles_of(first_tile, stride, number):
            return [builder.add(first_tile, builder.mul(stride, WORD(k))) for k in range(number)]

        def sums(name):
            for r, row in enumerate(tiles_of(out, builder.mul(out_stride, WORD(TILE)), row_tiles)):
                for c in range(column_tiles):
                    address = builder.add(row, WORD(4 * TILE * c))
                    transfer(builder, name, first + column_tiles * r + c, address, out_stride)

        with builder.if_else(builder.icmp_signed(">", begin, WORD(0))) as (continued, new):
            with continued:
                sums("tileloadd64")
            with new:
                clear_sums(builder, first, row_tiles * column_tiles)

        def advance(step, carried):
            from_rows, from_weight = carried
            rows_of_step = tiles_of(from_rows, row_stride, row_tiles)
            multiply_step(builder, rows_of_step, tiles_of(from_weight, column_stride, column_tiles), first)
            return [builder.add(from_rows, WORD(TILE_BYTES)), builder.add(from_weight, WORD(step_bytes))]

        loop(builder, WORD(0), steps, 1, [rows, weight], advance)
        sums("tilestored64")

    return intrinsic_of(8, emit)
