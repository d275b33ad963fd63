"""Skinny products on the matrix units of a CPU (AMX): operands of bfloat16, sums of float32.

Rows are rounded, or split into three parts of bfloat16, and laid out as tiles once per call. A block of
columns that lies in tiles is read as it is. Any other is laid out as tiles one panel of inputs at a time, and
every tile of rows is multiplied by that. A weight of 8 bits becomes bfloat16 on the way, which holds its
numbers exactly.

Only a process that compiles imports this module, because it imports Numba.
"""

from functools import cache
from typing import Any

import numpy as np

from ...cpu_runtime import matmul, row_tiles, weight_tiles
from ...cpu_runtime import matrix_tiles as tiles
from ...cpu_runtime.instructions import ITEMSIZE
from ...cpu_runtime.kernel import EXACT, array, floats, njit, stack_memory
from .cpu_rounded import InstructionSet

PANEL = 256  # inputs: a panel of a block, and two tiles of rows, fit into the first-level cache
COLUMN_TILES = matmul.BLOCK // tiles.TILE
COLUMN_STRIDE = PANEL // tiles.STEP * tiles.TILE_BYTES
GROUP = 32  # rows, a few full tiles with their parts, that are multiplied by some blocks before others are
PART = matmul.MAX_PANEL  # inputs of a part of a block that are widened at a time

panel_memory = stack_memory(COLUMN_TILES * COLUMN_STRIDE)
sum_memory = stack_memory(4 * tiles.TILE * matmul.BLOCK)
part_memory = stack_memory(4 * row_tiles.SPLIT * GROUP * matmul.BLOCK)


def instructions(dtype: str, layout: str, parts: int) -> InstructionSet:
    """The products on matrix units.

    Args:
        dtype: of the weights.
        layout: "columns"; "blocks" if they lie block by block; "tiles" if blocks lie in tiles.
        parts: numbers of bfloat16 that stand for one of a row: 1, or `row_tiles.SPLIT`.
    """
    configure = tiles.configure()
    multiply = multiply_tiles() if layout == "tiles" else multiply_block(dtype)
    if parts > 1:
        multiply = add_split_products(multiply)

    @njit(**EXACT)
    def bytes_of_rows(rows, inputs):
        steps = (inputs + tiles.STEP - 1) // tiles.STEP
        return (parts * rows + tiles.TILE - 1) // tiles.TILE * steps * tiles.TILE_BYTES

    @njit(**EXACT)
    def begin(state, rows):
        tiles.store_configuration(state)
        configure(state + tiles.CONFIGURATION, min(parts * rows, tiles.TILE))

    @njit(**EXACT)
    def end(state):
        tiles.load_configuration(state)

    # Weights that are not in tiles are laid out in each pass: few rows would not be worth it.
    rows_of_pass = GROUP if layout == "tiles" else 0
    return InstructionSet(bytes_of_rows, row_tiles.store_rows(parts), begin, end, multiply, rows_of_pass)


@cache
def multiply_block(dtype: str) -> Any:
    """`multiply_block(tiled, rows, inputs, weight, weight_stride, width, out, columns, following)`: all rows.

    `tiled` is the address of the rows as tiles; the others are those of `cpu_blocks.multiply_block`, with the
    columns of the block.
    """
    block, size, edge = matmul.BLOCK, ITEMSIZE[dtype], tiles.TILE
    store_pairs, store_column = (weight_tiles.store_pairs(dtype, width) for width in (block, edge))
    store_part = _store_part(dtype)
    pair_of_tiles = tiles.product(2, 2, tiles.TILE_BYTES)
    single_tile = tiles.product(1, COLUMN_TILES, tiles.TILE_BYTES)
    one_tile, two_tiles = (weight_tiles.stream(dtype, row_tiles) for row_tiles in (1, 2))

    @njit(**EXACT)
    def multiply_block(tiled, rows, inputs, weight, weight_stride, width, out, columns, following):
        panel, sums = panel_memory(), sum_memory()
        row_tiles, stride = (rows + edge - 1) // edge, 4 * width
        row_stride = (inputs + tiles.STEP - 1) // tiles.STEP * tiles.TILE_BYTES
        if rows <= 2 * edge and columns == block and inputs % tiles.STEP == 0:
            steps, row_bytes = inputs // tiles.STEP, size * weight_stride
            if rows <= edge:
                one_tile(tiled, 0, weight, row_bytes, steps, panel, out, stride, rows, following)
                return
            for half in range(2):
                source, to = weight + half * size * block // 2, out + 2 * half * block
                two_tiles(tiled, row_stride, source, row_bytes, steps, panel, to, stride, rows, following)
            return
        full_tiles = 0  # tiles of rows that are stored as they are
        if columns == block:
            full_tiles = rows // edge if rows > edge else 1
        for begin in range(0, inputs, PANEL):
            length = min(PANEL, inputs - begin)
            source, row_bytes = weight + begin * size * weight_stride, size * weight_stride
            steps = (length + tiles.STEP - 1) // tiles.STEP
            if columns == block and length % tiles.STEP == 0:
                ahead = source + length * row_bytes if begin + length < inputs else following
                store_pairs(source, row_bytes, length // 2, panel, COLUMN_STRIDE, ahead)
            elif columns % edge == 0 and length % tiles.STEP == 0:
                for c in range(columns // edge):
                    from_weight, to = source + c * size * edge, panel + c * COLUMN_STRIDE
                    store_column(from_weight, row_bytes, length // 2, to, 0, from_weight)
            else:
                store_part(source, weight_stride, length, columns, panel)
            first = tiled + begin // tiles.STEP * tiles.TILE_BYTES
            for c in range(0, COLUMN_TILES, 2):
                from_panel, to = panel + c * COLUMN_STRIDE, out + 4 * c * edge
                for tile in range(0, full_tiles - 1, 2):
                    from_rows, target = first + tile * row_stride, to + tile * edge * stride
                    pair_of_tiles(
                        from_rows, row_stride, from_panel, COLUMN_STRIDE, steps, target, stride, begin
                    )
            for tile in range(full_tiles - full_tiles % 2, row_tiles):
                from_rows, target = first + tile * row_stride, out + tile * edge * stride
                if tile < full_tiles:
                    single_tile(from_rows, 0, panel, COLUMN_STRIDE, steps, target, stride, begin)
                    continue
                number = min(edge, rows - tile * edge)
                if begin > 0:
                    _copy(target, stride, sums, 4 * block, number, columns)
                single_tile(from_rows, 0, panel, COLUMN_STRIDE, steps, sums, 4 * block, begin)
                _copy(sums, 4 * block, target, stride, number, columns)

    return multiply_block


@cache
def multiply_tiles() -> Any:
    """`multiply_tiles(...)`: as `multiply_block`, by a block of 64 columns that lies in tiles.

    The processor fetches such a block ahead by itself, so `following` is not used.
    """
    block, edge, tile_bytes = matmul.BLOCK, tiles.TILE, tiles.TILE_BYTES
    half_block, step_bytes = 4 * block // 2, 2 * tile_bytes
    pair_of_tiles = tiles.product(2, 2, step_bytes)
    single_tile, other_tile = (tiles.product(1, 2, step_bytes, first) for first in (0, 2))

    @njit(**EXACT)
    def multiply_tiles(tiled, rows, inputs, weight, weight_stride, width, out, columns, following):
        stride, steps = 4 * width, inputs // tiles.STEP
        half = steps * step_bytes
        if rows <= edge:
            single_tile(tiled, 0, weight, tile_bytes, steps, out, stride, 0)
            other_tile(tiled, 0, weight + half, tile_bytes, steps, out + half_block, stride, 0)
            return
        sums, full_tiles, row_stride = sum_memory(), rows // edge, steps * tile_bytes
        for h in range(2):
            source, to = weight + h * half, out + h * half_block
            for tile in range(0, full_tiles - 1, 2):
                at, target = tiled + tile * row_stride, to + tile * edge * stride
                pair_of_tiles(at, row_stride, source, tile_bytes, steps, target, stride, 0)
            at, target = tiled + (full_tiles - 1) * row_stride, to + (full_tiles - 1) * edge * stride
            if full_tiles % 2 == 1:
                single_tile(at, 0, source, tile_bytes, steps, target, stride, 0)
            number = rows % edge
            if number > 0:
                other_tile(at + row_stride, 0, source, tile_bytes, steps, sums, 2 * block, 0)
                _copy(sums, 2 * block, target + edge * stride, stride, number, block // 2)

    return multiply_tiles


@cache
def add_split_products(multiply: Any) -> Any:
    """`multiply_split(...)`: products of rows that are split, with the arguments of `multiply_block`.

    Args:
        multiply: `multiply_block` or `multiply_tiles`, which multiplies the parts.
    """
    block, edge = matmul.BLOCK, tiles.TILE
    add_parts = row_tiles.add_parts()

    @njit(**EXACT)
    def multiply_split(tiled, rows, inputs, weight, weight_stride, width, out, columns, following):
        sums, row_stride = part_memory(), (inputs + tiles.STEP - 1) // tiles.STEP * tiles.TILE_BYTES
        for begin in range(0, rows, GROUP):
            number = min(GROUP, rows - begin)
            source = tiled + row_tiles.SPLIT * begin // edge * row_stride
            parts = row_tiles.SPLIT * number
            if parts > edge:
                parts = (parts + edge - 1) & -edge
            multiply(source, parts, inputs, weight, weight_stride, block, sums, columns, following)
            add_parts(sums, number, columns, out + 4 * begin * width, 4 * width)

    return multiply_split


@njit(**EXACT)
def _copy(source, source_stride, target, target_stride, rows, columns):
    """Copy rows of float32; strides are in bytes."""
    for r in range(rows):
        from_row = floats(source + r * source_stride, (columns,))
        to_row = floats(target + r * target_stride, (columns,))
        for c in range(columns):
            to_row[c] = from_row[c]


@cache
def _store_part(dtype: str) -> Any:
    """`store_part(weight, width, inputs, columns, panel)`: a part of a block as tiles, zeros around it."""
    load_block, size = matmul.load_block(dtype), ITEMSIZE[dtype]

    @njit(**EXACT)
    def store_part(weight, width, inputs, columns, panel):
        wide = matmul.panel_memory()
        steps = (inputs + tiles.STEP - 1) // tiles.STEP
        for begin in range(0, steps * tiles.STEP, PART):
            number = max(0, min(PART, inputs - begin))
            load_block(weight + begin * size * width, width, number, columns, wide)
            bits = array(wide, (PART, matmul.BLOCK), np.uint32)
            for i in range(min(PART, steps * tiles.STEP - begin)):
                step, place = (begin + i) // tiles.STEP, (begin + i) % tiles.STEP
                offset = panel + step * tiles.TILE_BYTES + place // 2 * 2 * tiles.STEP
                for c in range(COLUMN_TILES):
                    row = array(offset + c * COLUMN_STRIDE, (tiles.STEP,), np.uint16)
                    for k in range(tiles.TILE):
                        value = bits[i, c * tiles.TILE + k] if i < number else np.uint32(0)
                        row[2 * k + place % 2] = np.uint16(value >> np.uint32(16))

    return store_part
