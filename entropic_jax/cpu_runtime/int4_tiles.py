"""Product tiles of packed 4-bit weights: `matmul` with weights that have a scale for each group of inputs.

The byte [i / 2, c] of a packed weight holds the element of input i in its low half and that of input i + 1 in
its high half, for even i. A number n of 4 bits stands for the weight s (n − 8), where s is the scale of its
column and group. The scale is bfloat16, so that the weight is exact in float32, and the sums are those of
`matmul`: a chain of fused multiply-adds over the inputs, in ascending order.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from .control_flow import loop
from .instructions import (
    CACHE_LINE,
    FLOAT,
    INTEGERS,
    LANES,
    VECTOR,
    WORD,
    broadcast,
    constant,
    integers,
    intrinsic_of,
    load,
    load_widened,
    multiply_add,
    prefetch,
    store,
)
from .matmul import BLOCK, MAX_TILE_ROWS, has_wide_registers, stored_sums

RUN = 32  # inputs that are multiplied with the same scales in registers; a divisor of every group
ZERO = 8  # the number that stands for a weight of 0
BYTES = ir.VectorType(ir.IntType(8), LANES)


@cache
def tile(rows: int, copies: bool, prefetches: bool, wide: bool) -> Any:
    """`tile(x, inputs, begin, end, weight, columns, out, stride, panel, ahead, scale, group)`.

    It computes what `matmul.tile` computes, from a packed weight `[inputs / 2, columns]` and its scales,
    bfloat16 `[inputs / group, columns]`; `begin` and `end` are multiples of `RUN`.

    Args:
        rows: of the tile.
        copies: whether the widened block is written to the panel, float32 `[end − begin, BLOCK]`.
        prefetches: whether each row of bytes prefetches a cache line, in its row of the block at `ahead`.
        wide: whether registers are those of AVX-512.
    """
    vectors = (4 if rows < 5 else 2) if wide else 1

    def call(builder, values):
        # A function of its own, so that the compiler assigns registers for this loop alone.
        name = f"int4_tile_{rows}_{copies}_{prefetches}"
        function = builder.module.globals.get(name)
        if function is None:
            signature = ir.FunctionType(ir.VoidType(), [WORD] * len(values))
            function = ir.Function(builder.module, signature, name)
            function.linkage = "internal"
            function.attributes.add("noinline")
            emit_tile(function, rows, copies, prefetches, vectors)
        builder.call(function, values)

    return intrinsic_of(12, call)


def emit_tile(function: Any, rows: int, copies: bool, prefetches: bool, vectors: int) -> None:
    """The body of a tile's function.

    Args:
        function: of llvmlite, with the arguments of `tile` and no code.
        rows: see `tile`.
        copies: see `tile`.
        prefetches: see `tile`.
        vectors: of columns whose sums are in registers at once; a divisor of those in a block.
    """
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x, inputs, begin, end, weight, columns, out, stride, panel, ahead, scale, group = function.args
    begin_bytes = builder.mul(builder.lshr(begin, WORD(1)), columns)
    scale_bytes = builder.shl(columns, WORD(1))
    for first in range(0, BLOCK, vectors * LANES):

        def run(begin_of_run, carried, first=first):
            row = builder.add(scale, builder.mul(builder.udiv(begin_of_run, group), scale_bytes))
            scales = [load_widened(builder, row, first + j * LANES, "bfloat16") for j in range(vectors)]
            offsets = [builder.fmul(s, constant(-ZERO)) for s in scales]

            def advance(i, carried):
                from_weight, from_panel, from_ahead, *sums = carried
                if prefetches and first == 0:
                    prefetch(builder, from_ahead)
                halves = widened(builder, from_weight, scales, offsets)
                for number, values in enumerate(halves):
                    if copies:
                        for j, value in enumerate(values):
                            store(builder, value, from_panel, number * BLOCK + j * LANES)
                    sums = add_products(builder, x, inputs, builder.add(i, WORD(number)), values, sums)
                next_row = builder.add(from_weight, columns), builder.add(from_panel, WORD(8 * BLOCK))
                return [*next_row, builder.add(from_ahead, columns), *sums]

            return loop(builder, begin_of_run, builder.add(begin_of_run, WORD(RUN)), 2, carried, advance)

        cells = [
            builder.add(builder.mul(stride, WORD(r)), WORD(first + j * LANES))
            for r in range(rows)
            for j in range(vectors)
        ]
        addresses = [
            builder.add(builder.add(weight, WORD(first)), begin_bytes),
            builder.add(panel, WORD(4 * first)),
            ahead,
        ]
        start = stored_sums(builder, begin, out, cells)
        sums = loop(builder, begin, end, RUN, addresses + start, run)[len(addresses) :]
        for cell, value in zip(cells, sums, strict=True):
            store(builder, value, out, cell)
    builder.ret_void()


def widened(builder: Any, address: Any, scales: list[Any], offsets: list[Any]) -> tuple[list[Any], list[Any]]:
    """The weights of two inputs, low halves and high halves, as vectors of neighbouring columns.

    Args:
        builder: of the function.
        address: of the first byte.
        scales: a vector for each vector of columns.
        offsets: −`ZERO` times the scales.
    """
    low, high = [], []
    for j, (scale, offset) in enumerate(zip(scales, offsets, strict=True)):
        pointer = builder.inttoptr(builder.add(address, WORD(j * LANES)), BYTES.as_pointer())
        numbers = builder.zext(builder.load(pointer, align=1), INTEGERS)
        for half, values in (
            (builder.and_(numbers, integers(15)), low),
            (builder.lshr(numbers, integers(4)), high),
        ):
            # The product and the sum have 12 bits, so nothing is rounded.
            values.append(multiply_add(builder, builder.sitofp(half, VECTOR), scale, offset))
    return low, high


def add_products(builder: Any, x: Any, inputs: Any, i: Any, values: list[Any], sums: list[Any]) -> list[Any]:
    """The sums of all rows after input i.

    Args:
        builder: of the function.
        x: address of the rows.
        inputs: numbers in a row of x.
        i: number of the input.
        values: its weights, a vector for each vector of columns.
        sums: before it: for each row, a vector for each vector of columns.
    """
    after, vectors = [], len(values)
    for r in range(len(sums) // vectors):
        factor = broadcast(builder, load(builder, x, builder.add(builder.mul(inputs, WORD(r)), i), FLOAT))
        row_sums = sums[r * vectors : (r + 1) * vectors]
        after += [multiply_add(builder, factor, v, s) for v, s in zip(values, row_sums, strict=True)]
    return after


@cache
def tiles(copies: bool, fewest: int = 1) -> Any:
    """`tiles(rows, *arguments)`: the `tile` of `rows` rows with these arguments.

    Args:
        copies: see `tile`.
        fewest: rows that a tile has at least; `MAX_TILE_ROWS` at most.
    """
    from .numba_compiler import njit

    wide = has_wide_registers()
    single, two, three, four, five, six = (
        tile(max(rows, fewest), copies, True, wide) for rows in range(1, MAX_TILE_ROWS + 1)
    )

    @njit(nogil=True)
    def tiles(rows, *arguments):
        if rows == 6:
            six(*arguments)
        elif rows == 5:
            five(*arguments)
        elif rows == 4:
            four(*arguments)
        elif rows == 3:
            three(*arguments)
        elif rows == 2:
            two(*arguments)
        else:
            single(*arguments)

    return tiles


@cache
def load_block() -> Any:
    """`load_block(weight, width, begin, inputs, columns, scale, group, panel)`: a widened part of a block.

    Fewer than `BLOCK` columns of the inputs from `begin` on, zeros after them; weight and scale are addresses
    of the first column.
    """
    from .kernel import EXACT, array, floats, njit

    @njit(**EXACT)
    def load_block(weight, width, begin, inputs, columns, scale, group, panel):
        for i in range(begin, begin + inputs):
            address = panel + 4 * (i - begin) * BLOCK
            target, bits = floats(address, (BLOCK,)), array(address, (BLOCK,), np.uint32)
            packed = array(weight + (i // 2) * width, (columns,), np.uint8)
            scales = array(scale + 2 * (i // group) * width, (columns,), np.uint16)
            for c in range(columns):
                bits[c] = np.uint32(scales[c]) << np.uint32(16)
            for c in range(columns):
                number = (np.int32(packed[c]) >> np.int32(4 * (i % 2))) & np.int32(15)
                target[c] *= np.float32(number - np.int32(ZERO))
            for c in range(columns, BLOCK):
                target[c] = np.float32(0)

    return load_block


assert BLOCK == CACHE_LINE  # a row of a block is a cache line
