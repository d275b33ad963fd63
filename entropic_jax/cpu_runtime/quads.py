"""Quads of int8, four neighbouring inputs in a lane of 32 bits, as AVX512-VNNI multiplies them.

One instruction adds the four products of each lane to a sum of int32, which is exact. It takes one of its
operands as unsigned: the numbers of a row are stored plus 128, and 128 times the sum of each column of the
weight is subtracted at the end.

A row is stored as its scale, float32, in a cache line of its own, and its numbers after that. The scale is
the largest magnitude in the row divided by 127.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from .call_frame import stack_memory
from .control_flow import loop
from .instructions import (
    CACHE_LINE,
    FLOAT,
    INTEGERS,
    LANES,
    NARROW,
    VECTOR,
    WORD,
    broadcast,
    integers,
    intrinsic_of,
    load,
    prefetch,
    splat,
    store,
)
from .matmul import BLOCK

HEADER = CACHE_LINE  # bytes of a row before its numbers
OFFSET = 128  # added to the numbers of a row
LARGEST = 127  # magnitude of a number of a row
SMALLEST = 1e-30  # rows whose largest magnitude is no larger count as 0
MAX_TILE_ROWS = 5  # whose sums are in registers, with those of the columns of the weight
VECTORS = BLOCK // LANES

column_sum_memory = stack_memory(4 * BLOCK)


def add_quads(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """The sum of z and, lane by lane, the four products of the quads of x and y.

    Args:
        builder: of the function.
        x: vector of quads of uint8.
        y: vector of quads of int8.
        z: vector of int32.
    """
    name = "llvm.x86.avx512.vpdpbusd.512"
    function = builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(INTEGERS, [INTEGERS] * 3), name
    )
    return builder.call(function, [z, x, y])


@cache
def store_rows() -> Any:
    """`store_rows(x, begin, end, inputs, target)`: the rows from `begin` to before `end` in 8 bits.

    x is float32 `[rows, inputs]`; the rows at `target` have `HEADER + inputs` bytes each.
    """
    from .kernel import EXACT, array, floats, njit

    @njit(**EXACT)
    def store_rows(x, begin, end, inputs, target):
        for row in range(begin, end):
            values = floats(x + 4 * row * inputs, (inputs,))
            bits = array(x + 4 * row * inputs, (inputs,), np.int32)
            stored = target + row * (HEADER + inputs)
            scale, scale_bits = floats(stored, (1,)), array(stored, (1,), np.int32)
            most = np.int32(0)  # magnitudes are ordered like their bits
            for i in range(inputs):
                most = max(most, bits[i] & np.int32(0x7FFFFFFF))
            scale_bits[0] = most
            largest = scale[0]
            scale[0] = largest / np.float32(LARGEST)
            inverse = np.float32(0)
            if largest > np.float32(SMALLEST):
                inverse = np.float32(LARGEST) / largest
            numbers = array(stored + HEADER, (inputs,), np.uint8)
            for i in range(inputs):
                value = values[i] * inverse
                value = value if abs(value) <= np.float32(LARGEST + 1) else np.float32(0)  # of infinity
                numbers[i] = np.uint8(np.int32(np.rint(value)) + np.int32(OFFSET))

    return store_rows


@cache
def tile(rows: int, first: bool) -> Any:
    """`tile(x, inputs, weight, out, stride, sums, ahead)`: rows times a block of columns.

        out[r, c] = scale[r] Σ x[r, i] weight[i, c],   0 ≤ i < inputs, 0 ≤ c < `BLOCK`

    x is the address of rows as `store_rows` stores them, weight that of `[inputs / 4, BLOCK, 4]`. A row of
    out has `stride` elements. At `sums` are those of the weight's columns, int32 `[BLOCK]`.

    Args:
        rows: of the tile.
        first: whether this tile computes the sums of the columns, which others read, and prefetches the block
            at `ahead`.
    """

    def call(builder, values):
        # A function of its own, so that the compiler assigns registers for this loop alone.
        name = f"quad_tile_{rows}_{'first' if first else 'later'}"
        function = builder.module.globals.get(name)
        if function is None:
            signature = ir.FunctionType(ir.VoidType(), [WORD] * len(values))
            function = ir.Function(builder.module, signature, name)
            function.linkage = "internal"
            function.attributes.add("noinline")
            _emit_tile(function, rows, first)
        builder.call(function, values)

    return intrinsic_of(7, call)


def _emit_tile(function: Any, rows: int, first: bool) -> None:
    """The body of a tile's function.

    Args:
        function: of llvmlite, with the arguments of `tile` and no code.
        rows: see `tile`.
        first: see `tile`.
    """
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x, inputs, weight, out, stride, sums, ahead = function.args
    row_bytes = builder.add(inputs, WORD(HEADER))
    places = [builder.add(x, builder.mul(row_bytes, WORD(r))) for r in range(rows)]
    ones = integers(0x01010101)

    def advance(i, carried):
        from_weight, from_ahead, *totals = carried
        weights = [load(builder, from_weight, j * LANES, INTEGERS) for j in range(VECTORS)]
        factors = []
        for place in places:
            offset = builder.add(i, WORD(HEADER // 4))
            factors.append(splat(builder, load(builder, place, offset, NARROW)))
        if first:
            for j in range(VECTORS):
                prefetch(builder, builder.add(from_ahead, WORD(j * CACHE_LINE)))
            factors.append(ones)
        pairs = [(factor, w) for factor in factors for w in weights]
        after = [add_quads(builder, *pair, z) for pair, z in zip(pairs, totals, strict=True)]
        step = WORD(4 * BLOCK)
        return [builder.add(from_weight, step), builder.add(from_ahead, step), *after]

    zeros = [integers(0)] * (VECTORS * (rows + first))
    steps = builder.lshr(inputs, WORD(2))
    totals = loop(builder, WORD(0), steps, 1, [weight, ahead, *zeros], advance)[2:]
    if first:
        column_sums = totals[VECTORS * rows :]
        for j, value in enumerate(column_sums):
            store(builder, builder.bitcast(value, VECTOR), sums, j * LANES)
    else:
        column_sums = [load(builder, sums, j * LANES, INTEGERS) for j in range(VECTORS)]
    for r, place in enumerate(places):
        scale = broadcast(builder, load(builder, place, 0, FLOAT))
        for j, column_sum in enumerate(column_sums):
            offset = builder.mul(column_sum, integers(OFFSET))
            total = builder.sitofp(builder.sub(totals[VECTORS * r + j], offset), VECTOR)
            cell = builder.add(builder.mul(stride, WORD(r)), WORD(j * LANES))
            store(builder, builder.fmul(total, scale), out, cell)
    builder.ret_void()


@cache
def tiles(first: bool) -> Any:
    """`tiles(rows, *arguments)`: the `tile` of `rows` rows with these arguments; `MAX_TILE_ROWS` at most.

    Args:
        first: see `tile`.
    """
    from .numba_compiler import njit

    single, two, three, four, five = (tile(rows, first) for rows in range(1, MAX_TILE_ROWS + 1))

    @njit(nogil=True)
    def tiles(rows, *arguments):
        if rows == 5:
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
