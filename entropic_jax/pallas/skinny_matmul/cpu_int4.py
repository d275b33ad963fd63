"""Blocks of columns of a skinny product with packed 4-bit weights, as in `cpu_blocks`.

The first tile widens a panel, and with more rows than a tile has, the others read its copy in float32. A row
of a block is one cache line, so the first tile alone prefetches the next panel.

Only a process that compiles imports this module, because it imports Numba.
"""

from functools import cache
from typing import Any

from ...cpu_runtime import int4_tiles, matmul
from ...cpu_runtime.kernel import EXACT, floats, njit
from .cpu_blocks import LONG_PANEL, MAX_TILES, PANEL


@cache
def multiply_block() -> Any:
    """`multiply_block(x, rows, inputs, weight, width, out, following, scale, group)`.

    All rows times a block of columns. Addresses are those of the first element in the block; a row of bytes,
    of scales and of out has `width` elements. The first panel at the address `following` is prefetched.
    """
    most = matmul.MAX_TILE_ROWS
    fewest = (most + 1) // 2  # rows of a tile where there are several
    direct, copying = int4_tiles.tiles(False), int4_tiles.tiles(True, fewest)
    from_panel = matmul.tiles("float32", "panel", 0, fewest)

    @njit(**EXACT)
    def multiply_block(x, rows, inputs, weight, width, out, following, scale, group):
        memory = matmul.panel_memory()
        tiles = (rows + most - 1) // most
        length = PANEL if tiles <= MAX_TILES else LONG_PANEL
        for begin in range(0, inputs, length):
            end = min(begin + length, inputs)
            ahead = weight + (end // 2) * width if end < inputs else following
            row = 0
            for tile in range(tiles):
                n = (rows - row + tiles - tile - 1) // (tiles - tile)
                source, target = x + 4 * row * inputs, out + 4 * row * width
                arguments = source, inputs, begin, end, weight, width, target, width, memory, ahead
                if tiles == 1:
                    direct(n, *arguments, scale, group)
                elif tile == 0:
                    copying(n, *arguments, scale, group)
                else:
                    from_panel(n, *arguments)
                row += n

    return multiply_block


@cache
def multiply_part() -> Any:
    """`multiply_part(x, rows, inputs, weight, width, out, columns, scale, group)`.

    All rows times a part of a block: a whole block from a panel with zeros, in memory of its own.
    """
    block, most = matmul.BLOCK, matmul.MAX_TILE_ROWS
    load_block, tile = int4_tiles.load_block(), matmul.tiles("float32", "panel", 0)

    @njit(**EXACT)
    def multiply_part(x, rows, inputs, weight, width, out, columns, scale, group):
        memory, sums = matmul.panel_memory(), matmul.tile_memory()
        sum_array = floats(sums, (most, block))
        out_array = floats(out, ((rows - 1) * width + columns,))
        for begin in range(0, inputs, PANEL):
            end = min(begin + PANEL, inputs)
            load_block(weight, width, begin, end - begin, columns, scale, group, memory)
            for row in range(0, rows, most):
                n = min(most, rows - row)
                if begin > 0:
                    for r in range(n):
                        for c in range(columns):
                            sum_array[r, c] = out_array[(row + r) * width + c]
                source = x + 4 * row * inputs
                tile(n, source, inputs, begin, end, weight, width, sums, block, memory, memory)
                for r in range(n):
                    for c in range(columns):
                        out_array[(row + r) * width + c] = sum_array[r, c]

    return multiply_part
