"""Pairs of bfloat16, two neighbouring inputs in a lane of 32 bits, as AVX512-BF16 multiplies them.

One instruction adds the two products of each lane to a sum of float32. It rounds after each addition, and
takes numbers below 2⁻¹²⁶ as 0.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from .control_flow import loop
from .instructions import (
    INTEGERS,
    LANES,
    VECTOR,
    WORD,
    integers,
    intrinsic_of,
    load,
    load_widened,
    permute,
)

SHORT = ir.IntType(16)
STEP = 2 * LANES  # inputs that are rounded at once


class _BFloat(ir.types.Type):
    """The type of LLVM that llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


SHORTS = ir.VectorType(_BFloat(), 2 * LANES)


def upper_halves(builder: Any, first: Any, second: Any) -> Any:
    """The upper halves of the lanes of two vectors, one after the other.

    Args:
        builder: of the function.
        first: vector.
        second: vector.
    """
    words = ir.VectorType(SHORT, 2 * LANES)
    halves = [builder.bitcast(value, words) for value in (first, second)]
    return permute(builder, halves, range(1, 4 * LANES, 2))


def nearest(builder: Any, value: Any) -> Any:
    """A vector whose upper halves are its numbers rounded to nearest, with ties to even; NaN stays NaN."""
    bits = builder.bitcast(value, INTEGERS)
    odd = builder.and_(builder.lshr(bits, integers(16)), integers(1))
    rounded = builder.add(builder.add(bits, integers(0x7FFF)), odd)
    rounded = builder.select(builder.fcmp_unordered("uno", value, value), integers(0x7FC00000), rounded)
    return builder.bitcast(rounded, VECTOR)


def as_short(builder: Any, value: Any) -> Any:
    """The upper halves of the lanes of a vector: the same numbers where these are numbers of bfloat16."""
    bits = builder.lshr(builder.bitcast(value, INTEGERS), integers(16))
    return builder.trunc(bits, ir.VectorType(SHORT, LANES))


def store_shorts(builder: Any, value: Any, address: Any) -> None:
    """Store a vector of 16-bit numbers.

    Args:
        builder: of the function.
        value: the vector.
        address: of the first of them.
    """
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=2)


def load_pairs(
    builder: Any,
    address: Any,
    row_bytes: Any,
    column: int,
    dtype: str,
    seen: tuple[bool, bool] = (True, True),
) -> Any:
    """A vector of pairs of two rows, as bits of float32.

    Args:
        builder: of the function.
        address: of the first row.
        row_bytes: between the two rows.
        column: the first of the columns.
        dtype: of the rows, whose elements bfloat16 can hold.
        seen: which of the rows are read; 0 stands for the elements of another.
    """

    def bits_of(row):
        return builder.bitcast(load_widened(builder, row, column, dtype), INTEGERS)

    lower = upper = None
    if seen[0]:
        lower = builder.lshr(bits_of(address), integers(16))
    if seen[1]:
        upper = builder.and_(bits_of(builder.add(address, row_bytes)), integers(-65536))
    both = upper if lower is None else lower if upper is None else builder.or_(lower, upper)
    return builder.bitcast(both, VECTOR)


def add_dot(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """The sum of z and, lane by lane, both products of the pairs of x and y.

    Args:
        builder: of the function.
        x: vector of pairs.
        y: vector of pairs.
        z: vector of float32.
    """
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(VECTOR, [VECTOR, SHORTS, SHORTS]), name
    )
    return builder.call(function, [z, builder.bitcast(x, SHORTS), builder.bitcast(y, SHORTS)])


@cache
def _store_steps() -> Any:
    """`store_steps(x, target, steps)`: numbers of float32, rounded to bfloat16, `STEP` at a time."""

    def emit(builder, values):
        def advance(step, carried):
            source, target = carried
            halves = [nearest(builder, load(builder, source, LANES * half)) for half in (0, 1)]
            shorts = upper_halves(builder, *halves)
            store_shorts(builder, shorts, target)
            return [builder.add(source, WORD(4 * STEP)), builder.add(target, WORD(2 * STEP))]

        x, target, steps = values
        loop(builder, WORD(0), steps, 1, [x, target], advance)

    return intrinsic_of(3, emit)


@cache
def store_rows() -> Any:
    """`store_rows(x, begin, end, inputs, target)`: the rows from `begin` to before `end`, rounded.

    x is float32 `[rows, inputs]`, and so is `target`, of bfloat16.
    """
    from .call_frame import stack_memory
    from .kernel import EXACT, array, floats, njit

    store_steps = _store_steps()
    last_step, last_shorts = stack_memory(4 * STEP), stack_memory(2 * STEP)

    @njit(**EXACT)
    def store_rows(x, begin, end, inputs, target):
        numbers = (end - begin) * inputs
        full = numbers // STEP
        source, to = x + 4 * begin * inputs, target + 2 * begin * inputs
        store_steps(source, to, full)
        left = numbers - full * STEP
        if left > 0:
            memory, shorts = last_step(), last_shorts()
            padded, rest = floats(memory, (STEP,)), floats(source + 4 * full * STEP, (left,))
            for i in range(STEP):
                padded[i] = rest[i] if i < left else np.float32(0)
            store_steps(memory, shorts, 1)
            halves = array(shorts, (STEP,), np.uint16)
            end_of_row = array(to + 2 * full * STEP, (left,), np.uint16)
            for i in range(left):
                end_of_row[i] = halves[i]

    return store_rows
