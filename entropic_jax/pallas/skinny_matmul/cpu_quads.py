"""Skinny products with AVX512-VNNI: rows are rounded to 8 bits, and sums of products are exact.

Only a process that compiles imports this module, because it imports Numba.
"""

from ...cpu_runtime import quads
from ...cpu_runtime.instructions import CACHE_LINE
from ...cpu_runtime.kernel import EXACT, njit
from .cpu_rounded import InstructionSet


def instructions() -> InstructionSet:
    """The products with weights of int8 in quads."""
    most, memory = quads.MAX_TILE_ROWS, quads.column_sum_memory
    header, first_tile, later_tile = quads.HEADER, quads.tiles(True), quads.tiles(False)

    @njit(**EXACT)
    def multiply(stored, rows, inputs, weight, weight_stride, width, out, columns, following):
        sums, row = memory(), 0
        tiles = (rows + most - 1) // most
        for tile in range(tiles):
            n = (rows - row + tiles - tile - 1) // (tiles - tile)
            arguments = stored + row * (header + inputs), inputs, weight, out + 4 * row * width, width, sums
            if tile == 0:
                first_tile(n, *arguments, following)
            else:
                later_tile(n, *arguments, following)
            row += n

    return InstructionSet(_bytes_of_rows, quads.store_rows(), _begin, _end, multiply)


@njit(**EXACT)
def _bytes_of_rows(rows, inputs):
    return (rows * (quads.HEADER + inputs) + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


@njit(**EXACT)
def _begin(state, rows):
    pass


@njit(**EXACT)
def _end(state):
    pass
