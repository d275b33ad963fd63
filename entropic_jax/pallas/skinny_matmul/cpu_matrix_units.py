"""Skinny products on the matrix units of a CPU (AMX): operands of bfloat16, sums of float32.

Rows are rounded and laid out as tiles once per call. A block of columns is laid out as tiles one panel of
inputs at a time, and every tile of rows is multiplied by that. A weight of 8 bits becomes bfloat16 on the
way, which holds its numbers exactly.

Only a process that compiles imports this module, because it imports Numba.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from ...cpu_runtime import matmul
from ...cpu_runtime import matrix_tiles as tiles
from ...cpu_runtime.instructions import CACHE_LINE, ITEMSIZE
from ...cpu_runtime.kernel import (
    EXACT,
    allocate,
    array,
    floats,
    free,
    njit,
    operand,
    parallel_for,
    result,
    stack_memory,
    symbol_address,
    thread_task,
    words,
    xla_handler,
)
from .cpu_blocks import block_places, scale_columns

PANEL = 256  # inputs: a panel of a block, and two tiles of rows, fit into the first-level cache
COLUMN_TILES = matmul.BLOCK // tiles.TILE
COLUMN_STRIDE = PANEL // tiles.STEP * tiles.TILE_BYTES
PART = matmul.MAX_PANEL  # inputs of a part of a block that are widened at a time

panel_memory = stack_memory(COLUMN_TILES * COLUMN_STRIDE)
sum_memory = stack_memory(4 * tiles.TILE * matmul.BLOCK)
configuration_memory = stack_memory(2 * tiles.CONFIGURATION)


def build(name: str, dtype: str, scaled: bool, blocked: bool) -> Iterator[tuple[str, Any]]:
    """The builder of the product with weights of a dtype; see `code_cache`.

    Args:
        name: the symbol of the kernel.
        dtype: of the weights.
        scaled: whether their columns have scales.
        blocked: whether they lie block by block.
    """
    num_blocks, blocks_per_chunk, locate, next_block = block_places(blocked)
    multiply, scale, size = multiply_block(dtype), scale_columns(), ITEMSIZE[dtype]
    store_rows, configure = tiles.store_rows(), tiles.configure()

    @njit(**EXACT)
    def row_tile_bytes(inputs):
        return (inputs + tiles.STEP - 1) // tiles.STEP * tiles.TILE_BYTES

    @njit(**EXACT)
    def round_rows(job_address, number):
        """One tile of rows, rounded."""
        job = words(job_address, 2)
        x, shape = operand(job[0], 0)
        target = job[1] + number * row_tile_bytes(shape[1])
        store_rows(x, shape[0], shape[1], number * tiles.TILE, target)

    @njit(**EXACT)
    def chunk(job_address, number):
        """All rows times some neighbouring blocks of columns."""
        job = words(job_address, 2)
        frame = job[0]
        count = num_blocks(frame)
        per_chunk = blocks_per_chunk(count)
        shape = operand(frame, 0)[1]
        rows, inputs = shape[0], shape[1]
        end = min(count, (number + 1) * per_chunk)
        before = configuration_memory()
        tiles.store_configuration(before)
        configure(before + tiles.CONFIGURATION, min(rows, tiles.TILE))
        for b in range(number * per_chunk, end):
            w, column = locate(frame, b)
            weight, weight_shape = operand(frame, 1 + w)
            width = weight_shape[0] * matmul.BLOCK if blocked else weight_shape[1]
            stride = matmul.BLOCK if blocked else width
            column_size = size * inputs if blocked else size
            next_weight, next_column = locate(frame, next_block(b, end, number, per_chunk))
            following = operand(frame, 1 + next_weight)[0] + column_size * next_column
            out, columns = result(frame, w)[0] + 4 * column, min(matmul.BLOCK, width - column)
            weight += column_size * column
            multiply(job[1], rows, inputs, weight, stride, width, out, columns, following)
            if scaled:
                scale(frame, w, column, out, rows, width, columns)
        tiles.load_configuration(before)

    yield f"{name}_rows", thread_task(round_rows)
    yield f"{name}_chunk", thread_task(chunk)
    rows_address, chunk_address = symbol_address(f"{name}_rows"), symbol_address(f"{name}_chunk")

    @njit(**EXACT)
    def body(frame):
        shape = operand(frame, 0)[1]
        row_tiles = (shape[0] + tiles.TILE - 1) // tiles.TILE
        memory = allocate(2 * CACHE_LINE + row_tiles * row_tile_bytes(shape[1]))
        job_address = (memory + CACHE_LINE - 1) & -CACHE_LINE
        job = words(job_address, 2)
        job[0], job[1] = frame, job_address + CACHE_LINE
        parallel_for(rows_address(), job_address, row_tiles)
        count = num_blocks(frame)
        per_chunk = blocks_per_chunk(count)
        parallel_for(chunk_address(), job_address, (count + per_chunk - 1) // per_chunk)
        free(memory)

    yield name, xla_handler(body)


@cache
def multiply_block(dtype: str) -> Any:
    """`multiply_block(tiled, rows, inputs, weight, weight_stride, width, out, columns, following)`: all rows.

    `tiled` is the address of the rows as tiles; the others are those of `cpu_blocks.multiply_block`, with the
    columns of the block.
    """
    block, size, edge = matmul.BLOCK, ITEMSIZE[dtype], tiles.TILE
    store_pairs, store_column = tiles.store_pairs(dtype, block), tiles.store_pairs(dtype, edge)
    store_part = _store_part(dtype)
    pair_of_tiles, single_tile = tiles.product(2, 2), tiles.product(1, COLUMN_TILES)
    one_tile, two_tiles = tiles.stream(dtype, 1), tiles.stream(dtype, 2)

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
            for half in (0, 1):
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


@njit(**EXACT)
def _copy(source, source_stride, target, target_stride, rows, columns):
    """Copy rows of float32; strides are in bytes."""
    for r in range(rows):
        row = floats(target + r * target_stride, (columns,))
        row[:] = floats(source + r * source_stride, (columns,))


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
