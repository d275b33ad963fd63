"""Matrix product tiles: inner loops of products whose sums are the same for every number of rows.

Every element of a product is one chain of fused multiply-adds over the inputs, in ascending order:
s ← x[r, i] · w[i, c] + s. A tile computes some rows and columns at once, over a range of inputs. It may
begin from the sums that an earlier tile stored, since storing a float32 changes no bit. So neither the size
of a tile nor that of a range of inputs changes a result.

Rounded operands are multiplied in pairs: a link of the chain adds the products of two neighbouring inputs
(see `pairs`). What is said of an input below then holds of a pair, whose numbers lie in two rows of the
weight.
"""

from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from .call_frame import stack_memory
from .control_flow import loop
from .instructions import (
    CACHE_LINE,
    FLOAT,
    ITEMSIZE,
    LANES,
    VECTOR,
    WORD,
    broadcast,
    intrinsic_of,
    load,
    load_widened,
    multiply_add,
    prefetch,
    store,
)
from .pairs import add_dot, load_pairs

BLOCK = 64  # columns
MAX_PANEL = 128  # inputs
MAX_TILE_ROWS = 6


def has_wide_registers() -> bool:
    """Whether this processor has the 32 registers of 512 bits of AVX-512."""
    return bool(llvm.get_host_cpu_features().get("avx512f"))


def tile_vectors(rows: int, wide: bool) -> int:
    """Vectors of columns in a tile that keeps its sums in registers.

    Args:
        rows: of the tile.
        wide: whether registers are those of AVX-512; if not, a vector takes two registers or four.
    """
    return 4 if wide else 2 if rows < 3 else 1


@cache
def tile(rows: int, dtype: str, source: str, prefetches: int, wide: bool, rounded: bool = False) -> Any:
    """`tile(x, inputs, begin, end, weight, columns, out, stride, panel, ahead)`: rows times a block.

        out[r, c] = Σ x[r, i] weight[i, c],   begin ≤ i < end, 0 ≤ c < `BLOCK`

    If begin > 0, the sums continue from those in out. A row of x has `inputs` elements, one of the weight
    `columns`, one of out `stride`.

    Args:
        rows: of the tile.
        dtype: of the weight.
        source: "weight"; "panel" for a copy of the block, float32 `[end − begin, BLOCK]`; or "both" to read
            the weight and write that copy.
        prefetches: cache lines that each input prefetches, in its row of the block at `ahead`.
        wide: see `tile_vectors`.
        rounded: whether operands are pairs of bfloat16.
    """

    def call(builder, values):
        # A function of its own, so that the compiler assigns registers for this loop alone.
        name = f"matmul_tile_{source}_{rows}_{dtype}_{prefetches}{'_rounded' * rounded}"
        function = builder.module.globals.get(name)
        if function is None:
            signature = ir.FunctionType(ir.VoidType(), [WORD] * len(values))
            function = ir.Function(builder.module, signature, name)
            function.linkage = "internal"
            function.attributes.add("noinline")
            emit_tile(function, rows, dtype, source, prefetches, tile_vectors(rows, wide), rounded)
        builder.call(function, values)

    return intrinsic_of(10, call)


def emit_tile(
    function: Any,
    rows: int,
    dtype: str,
    source: str,
    prefetches: int,
    vectors: int,
    rounded: bool = False,
) -> None:
    """The body of a tile's function.

    Args:
        function: of llvmlite, with the arguments of `tile` and no code.
        rows: see `tile`.
        dtype: see `tile`.
        source: see `tile`.
        prefetches: see `tile`.
        vectors: of columns whose sums are in registers at once; a divisor of those in a block.
        rounded: see `tile`.
    """
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x, inputs, begin, end, weight, columns, out, stride, panel, ahead = function.args
    size = ITEMSIZE[dtype]
    weight_row = builder.mul(columns, WORD(size))
    row_bytes = builder.mul(weight_row, WORD(2)) if rounded else weight_row
    lines_of_row = BLOCK * size // CACHE_LINE
    begin_bytes = builder.mul(begin, row_bytes)
    for first in range(0, BLOCK, vectors * LANES):

        def advance(i, carried, lines=prefetches if first == 0 else 0):
            from_weight, from_panel, from_ahead, *sums = carried
            for line in range(lines):
                row = builder.add(from_ahead, builder.mul(weight_row, WORD(line // lines_of_row)))
                prefetch(builder, builder.add(row, WORD(line % lines_of_row * CACHE_LINE)))
            if source == "panel":
                values = [load(builder, from_panel, j * LANES) for j in range(vectors)]
            elif rounded:
                values = [
                    load_pairs(builder, from_weight, weight_row, j * LANES, dtype) for j in range(vectors)
                ]
            else:
                values = [load_widened(builder, from_weight, j * LANES, dtype) for j in range(vectors)]
            if source == "both":
                for j, value in enumerate(values):
                    store(builder, value, from_panel, j * LANES)
            after = []
            for r in range(rows):
                offset = builder.add(builder.mul(inputs, WORD(r)), i)
                factor = broadcast(builder, load(builder, x, offset, FLOAT))
                row_sums = sums[r * vectors : (r + 1) * vectors]
                add = add_dot if rounded else multiply_add
                after += [add(builder, factor, v, s) for v, s in zip(values, row_sums, strict=True)]
            next_row = builder.add(from_weight, row_bytes), builder.add(from_panel, WORD(4 * BLOCK))
            return [*next_row, builder.add(from_ahead, row_bytes), *after]

        cells = [
            builder.add(builder.mul(stride, WORD(r)), WORD(first + j * LANES))
            for r in range(rows)
            for j in range(vectors)
        ]
        addresses = [
            builder.add(builder.add(weight, WORD(first * size)), begin_bytes),
            builder.add(panel, WORD(4 * first)),
            ahead,
        ]
        start = stored_sums(builder, begin, out, cells)
        sums = loop(builder, begin, end, 1, addresses + start, advance)[len(addresses) :]
        for cell, value in zip(cells, sums, strict=True):
            store(builder, value, out, cell)
    builder.ret_void()


def stored_sums(builder: Any, begin: Any, out: Any, cells: list[Any]) -> list[Any]:
    """The vectors at some offsets of an array if `begin` is above 0, else zeros.

    Args:
        builder: The builder of the function.
        begin: The first input of the tile, an integer of the program.
        out: The address of the array.
        cells: The offsets, in floats.
    """
    before = builder.block
    with builder.if_then(builder.icmp_signed(">", begin, WORD(0))):
        stored = [load(builder, out, cell) for cell in cells]
        loading = builder.block
    zero, sums = ir.Constant(VECTOR, [0.0] * LANES), []
    for value in stored:
        phi = builder.phi(VECTOR)
        phi.add_incoming(zero, before)
        phi.add_incoming(value, loading)
        sums.append(phi)
    return sums


@cache
def tiles(dtype: str, source: str, prefetches: int, fewest: int = 1, rounded: bool = False) -> Any:
    """`tiles(rows, *arguments)`: the `tile` of `rows` rows with these arguments.

    Args:
        dtype: of the weight.
        source: see `tile`.
        prefetches: see `tile`.
        fewest: rows that a tile has at least; `MAX_TILE_ROWS` at most.
        rounded: see `tile`.
    """
    from .numba_compiler import njit

    most, wide = MAX_TILE_ROWS, has_wide_registers()
    single, two, three, four, five, six = (
        tile(max(rows, fewest), dtype, source, prefetches, wide, rounded) for rows in range(1, most + 1)
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
def load_block(dtype: str) -> Any:
    """`load_block(weight, width, inputs, columns, panel)`: fewer than `BLOCK` columns, zeros after them."""
    from .kernel import EXACT, array, njit

    @njit(**EXACT)
    def load_block(weight, width, inputs, columns, panel):
        if dtype == "float32":
            for i in range(inputs):
                target = array(panel + 4 * i * BLOCK, (BLOCK,), np.float32)
                row = array(weight + 4 * i * width, (columns,), np.float32)
                for c in range(columns):
                    target[c] = row[c]
                for c in range(columns, BLOCK):
                    target[c] = np.float32(0)
        elif dtype == "int8":
            for i in range(inputs):
                target = array(panel + 4 * i * BLOCK, (BLOCK,), np.float32)
                small = array(weight + i * width, (columns,), np.int8)
                for c in range(columns):
                    target[c] = np.float32(small[c])
                for c in range(columns, BLOCK):
                    target[c] = np.float32(0)
        elif dtype == "float8_e4m3fn":
            for i in range(inputs):
                address = panel + 4 * i * BLOCK
                target, bits = array(address, (BLOCK,), np.float32), array(address, (BLOCK,), np.uint32)
                byte = array(weight + i * width, (columns,), np.uint8)
                for c in range(columns):
                    magnitude, sign = np.uint32(byte[c] & 0x7F), np.uint32(byte[c] & 0x80)
                    if magnitude < 8:
                        target[c] = np.float32(magnitude) * np.float32(2.0**-9)
                    else:
                        bits[c] = (magnitude << np.uint32(20)) + np.uint32(120 << 23)
                    bits[c] |= sign << np.uint32(24)
                for c in range(columns, BLOCK):
                    target[c] = np.float32(0)
        else:
            for i in range(inputs):
                bits = array(panel + 4 * i * BLOCK, (BLOCK,), np.uint32)
                row_bits = array(weight + 2 * i * width, (columns,), np.uint16)
                for c in range(columns):
                    bits[c] = np.uint32(row_bits[c]) << np.uint32(16)
                for c in range(columns, BLOCK):
                    bits[c] = np.uint32(0)

    return load_block


@cache
def join_rows() -> Any:
    """`join_rows(panel, pairs)`: rows of 64 numbers of float32, two by two, as rows of pairs, in place."""
    from .kernel import EXACT, array, njit

    @njit(**EXACT)
    def join_rows(panel, pairs):
        bits = array(panel, (2 * pairs, BLOCK), np.uint32)
        for i in range(pairs):
            for c in range(BLOCK):
                upper = bits[2 * i + 1, c] & np.uint32(0xFFFF0000)
                bits[i, c] = (bits[2 * i, c] >> np.uint32(16)) | upper

    return join_rows


panel_memory = stack_memory(4 * MAX_PANEL * BLOCK)
tile_memory = stack_memory(4 * MAX_TILE_ROWS * BLOCK)
