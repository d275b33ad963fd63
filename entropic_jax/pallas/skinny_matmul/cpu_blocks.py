"""Blocks of columns of a skinny product: the order in which tiles of rows and panels of inputs are computed.

A block is read from memory once, a panel of inputs at a time. Up to `MAX_TILE_ROWS` rows are multiplied as
the panel is read. With more rows, the first tile copies the panel to memory that stays in the cache, where
the other tiles read it: rows of a wide weight are far apart and would evict one another. Meanwhile all tiles
prefetch the next panel in equal parts, because a core has few requests to memory under way at once.

More rows than the second-level cache holds are multiplied in passes: some rows by all blocks of a chunk, then
the next rows. Otherwise every block would read all rows from memory.

Only a process that compiles imports this module, because it imports Numba.
"""

from functools import cache
from typing import Any

from ...cpu_runtime import matmul
from ...cpu_runtime.instructions import CACHE_LINE, ITEMSIZE
from ...cpu_runtime.kernel import EXACT, floats, njit, operand, words
from ...cpu_runtime.thread_pool import num_threads

LONGEST_CHUNK = 4  # blocks of columns
CHUNKS_PER_THREAD = 4  # at least, where there are as many blocks
PANEL = 64  # inputs
LONG_PANEL = matmul.MAX_PANEL  # inputs, for more than three tiles: their sums are stored less often
MAX_TILES = 3  # that share a short panel
# Rows of a pass: as many as take so many bytes in float32, in these bounds. All are multiples of `ROW_STEP`.
PASS_BYTES, FEWEST_ROWS, MOST_ROWS = 2**19, 64, 256
ROW_STEP = 32  # rows of any layout begin on a cache line
LAST_ROWS = 16  # the last pass has more rows than these: matrix units are configured for full tiles


@cache
def multiply_block(dtype: str, rounded: bool = False) -> Any:
    """`multiply_block(x, rows, inputs, weight, stride, width, out, following)`: all rows times a block.

    Addresses are those of the first element in the block; a row of the weight has `stride` elements, one of
    out `width`. The first panel at the address `following` is prefetched at the end.

    Args:
        dtype: of the weight.
        rounded: whether x is of pairs of bfloat16, whose number is `inputs`.
    """
    block, most, rows_of_input = matmul.BLOCK, matmul.MAX_TILE_ROWS, 2 if rounded else 1
    size = rows_of_input * ITEMSIZE[dtype]
    lines_of_row = block * ITEMSIZE[dtype] // CACHE_LINE
    lines = rows_of_input * lines_of_row
    half, quarter = max(1, lines // 2), max(1, lines // 4)
    fewest = (most + 1) // 2  # rows of a tile where there are several
    direct = matmul.tiles(dtype, "weight", lines, 1, rounded)
    copy_half, copy_quarter = (
        matmul.tiles(dtype, "both", count, fewest, rounded) for count in (half, quarter)
    )
    panel_half, panel_quarter, panel_only = (
        matmul.tiles(dtype, "panel", count, fewest, rounded) for count in (half, quarter, 0)
    )

    @njit(**EXACT)
    def multiply_block(x, rows, inputs, weight, stride, width, out, following):
        memory = matmul.panel_memory()
        tiles = (rows + most - 1) // most
        length = PANEL if tiles <= MAX_TILES else LONG_PANEL
        for begin in range(0, inputs, length):
            end = min(begin + length, inputs)
            next_panel = weight + end * size * stride if end < inputs else following
            row, line = 0, 0
            for tile in range(tiles):
                n = (rows - row + tiles - tile - 1) // (tiles - tile)
                source, target = x + 4 * row * inputs, out + 4 * row * width
                ahead = next_panel + line % lines_of_row * CACHE_LINE
                ahead += line // lines_of_row * (size // rows_of_input) * stride
                arguments = source, inputs, begin, end, weight, stride, target, width, memory, ahead
                many = tiles == 2 or (tiles == 3 and tile == 0)  # lines to prefetch
                if tiles == 1:
                    direct(n, *arguments)
                elif tile == 0 and many:
                    copy_half(n, *arguments)
                elif tile == 0:
                    copy_quarter(n, *arguments)
                elif line >= lines:
                    panel_only(n, *arguments)
                elif many:
                    panel_half(n, *arguments)
                else:
                    panel_quarter(n, *arguments)
                row += n
                line += half if many else quarter

    return multiply_block


@cache
def multiply_part(dtype: str, rounded: bool = False) -> Any:
    """`multiply_part(x, rows, inputs, weight, width, out, columns)`: all rows times a part of a block.

    It computes a whole block from a panel with zeros, in memory of its own.

    Args:
        dtype: of the weight.
        rounded: see `multiply_block`.
    """
    block, most, rows_of_input = matmul.BLOCK, matmul.MAX_TILE_ROWS, 2 if rounded else 1
    size = rows_of_input * ITEMSIZE[dtype]
    load_block, tile = matmul.load_block(dtype), matmul.tiles(dtype, "panel", 0, 1, rounded)
    join_rows = matmul.join_rows()

    @njit(**EXACT)
    def multiply_part(x, rows, inputs, weight, width, out, columns):
        memory, sums = matmul.panel_memory(), matmul.tile_memory()
        sum_array = floats(sums, (most, block))
        out_array = floats(out, ((rows - 1) * width + columns,))
        for begin in range(0, inputs, PANEL):
            end = min(begin + PANEL, inputs)
            number = rows_of_input * (end - begin)
            load_block(weight + begin * size * width, width, number, columns, memory)
            if rounded:
                join_rows(memory, end - begin)
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


@cache
def pass_end(rows_of_pass: int = 0) -> Any:
    """`pass_end(first, rows, inputs)`: the row behind the last of the pass that begins with the row `first`.

    Args:
        rows_of_pass: a multiple of `ROW_STEP`; 0 for what the cache holds.
    """

    @njit(**EXACT)
    def pass_end(first, rows, inputs):
        number = rows_of_pass
        if rows_of_pass == 0:
            number = max(FEWEST_ROWS, min(MOST_ROWS, PASS_BYTES // (4 * inputs))) & -ROW_STEP
        return rows if rows - first <= number + LAST_ROWS else first + number

    return pass_end


@cache
def block_places(blocked: bool = False) -> tuple[Any, Any, Any, Any]:
    """The functions that divide the columns of a call among the threads.

    Args:
        blocked: whether weights lie block by block, `[blocks, inputs, BLOCK]`.

    Returns:
        `num_blocks(frame)`: blocks of all the weights; `blocks_per_chunk(count)`; `locate(frame, number)`:
        the weight that a block belongs to, and its first column; `next_block(b, end, number, per_chunk)`: the
        block that the thread of block b of the chunk `number` will probably get next.
    """
    block = matmul.BLOCK

    @njit(**EXACT)
    def blocks_of(frame, w):
        shape = operand(frame, 1 + w)[1]
        return shape[0] if blocked else (shape[1] + block - 1) // block

    @njit(**EXACT)
    def num_blocks(frame):
        count = 0
        for w in range(words(frame, 15)[12]):
            count += blocks_of(frame, w)
        return count

    @njit(**EXACT)
    def blocks_per_chunk(count):
        return max(1, min(LONGEST_CHUNK, count // (CHUNKS_PER_THREAD * num_threads())))

    @njit(**EXACT)
    def locate(frame, number):
        w = 0
        while True:
            count = blocks_of(frame, w)
            if number < count:
                return w, number * block
            number -= count
            w += 1

    @njit(**EXACT)
    def next_block(b, end, number, per_chunk):
        # Threads take chunks in turn, from the last one down.
        return b + 1 if b + 1 < end else max(0, number - num_threads()) * per_chunk

    return num_blocks, blocks_per_chunk, locate, next_block


@cache
def scale_columns() -> Any:
    """`scale_columns(frame, w, column, out, rows, width, columns)`: multiplies a block of a result in place.

    The scales of the weights' columns are operands behind all weights.
    """

    @njit(**EXACT)
    def scale_columns(frame, w, column, out, rows, width, columns):
        scale = floats(operand(frame, 1 + words(frame, 15)[12] + w)[0] + 4 * column, (columns,))
        for r in range(rows):
            row = floats(out + 4 * r * width, (columns,))
            for c in range(columns):
                row[c] *= scale[c]

    return scale_columns
