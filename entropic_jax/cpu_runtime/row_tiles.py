"""Rows as tiles of bfloat16 for matrix units: each number rounded, or split into three whose sum it is.

A float32 has 24 significant bits, a bfloat16 has 8: the first part is the number cut off after 8 bits, the
second what that leaves, cut off again, and the third the rest, so nothing is lost. (Parts below 2⁻¹²⁶ count
as 0, as matrix units take them.) Products of the three parts and a weight of bfloat16 are exact in float32,
and so is their sum but for rounding, as one product of float32 is.

The parts of a row are neighbouring rows of tiles, and are multiplied like any others: `add_parts` adds their
products at the end. Tiles lie in memory by tiles of rows, then by steps.
"""

from functools import cache
from typing import Any

import numpy as np

from .control_flow import loop
from .instructions import (
    INTEGERS,
    LANES,
    VECTOR,
    WORD,
    integers,
    intrinsic_of,
    load,
)
from .matrix_tiles import STEP, TILE, TILE_BYTES
from .pairs import nearest, store_shorts, upper_halves

SPLIT = 3  # parts of a number that is not rounded


def _rest(builder: Any, value: Any) -> Any:
    """The rest of a vector after its upper halves are subtracted."""
    upper = builder.and_(builder.bitcast(value, INTEGERS), integers(-65536))
    return builder.fsub(value, builder.bitcast(upper, VECTOR))


@cache
def _store_steps(parts: int) -> Any:
    """`store_steps(x, first, second, third, steps)`: one row of x, float32, as `parts` rows of tiles.

    The addresses of the rows beyond `parts` are not used.
    """

    def emit(builder, values):
        *places, steps = values

        def advance(step, carried):
            source, *targets = carried
            halves = [load(builder, source, LANES * half) for half in (0, 1)]
            if parts == 1:
                halves = [nearest(builder, half) for half in halves]
            for target in targets:
                shorts = upper_halves(builder, *halves)
                store_shorts(builder, shorts, target)
                halves = [_rest(builder, half) for half in halves]
            return [
                builder.add(source, WORD(4 * STEP)),
                *(builder.add(target, WORD(TILE_BYTES)) for target in targets),
            ]

        loop(builder, WORD(0), steps, 1, places[: 1 + parts], advance)

    return intrinsic_of(5, emit)


@cache
def store_rows(parts: int) -> Any:
    """`store_rows(x, begin, end, inputs, target)`: the rows from `begin` to before `end`, in their tiles.

    x is float32 `[rows, inputs]`; the last step is filled up with zeros. `target` is the first tile of all.

    Args:
        parts: 1 to round the numbers, `SPLIT` to split them.
    """
    from .call_frame import stack_memory
    from .kernel import EXACT, floats, njit

    store_steps = _store_steps(parts)
    last_step = stack_memory(4 * STEP)

    @njit(**EXACT)
    def place(number, row_stride):
        return number // TILE * row_stride + number % TILE * 2 * STEP

    @njit(**EXACT)
    def store_rows(x, begin, end, inputs, target):
        full = inputs // STEP
        row_stride = (inputs + STEP - 1) // STEP * TILE_BYTES
        for row in range(begin, end):
            source = x + 4 * row * inputs
            first = target + place(parts * row, row_stride)
            second = target + place(parts * row + 1, row_stride)
            third = target + place(parts * row + 2, row_stride)
            store_steps(source, first, second, third, full)
            if full * STEP < inputs:
                memory, left = last_step(), inputs - full * STEP
                padded, rest = floats(memory, (STEP,)), floats(source + 4 * full * STEP, (left,))
                for i in range(STEP):
                    padded[i] = rest[i] if i < left else np.float32(0)
                end_of_full = full * TILE_BYTES
                store_steps(memory, first + end_of_full, second + end_of_full, third + end_of_full, 1)

    return store_rows


@cache
def add_parts() -> Any:
    """`add_parts(sums, rows, columns, out, out_stride)`: the products of rows from those of their parts.

    `sums` is `[SPLIT * rows, BLOCK]`, float32; out_stride is in bytes.
    """
    from .kernel import EXACT, floats, njit
    from .matmul import BLOCK

    @njit(**EXACT)
    def add_parts(sums, rows, columns, out, out_stride):
        for r in range(rows):
            parts = floats(sums + 4 * BLOCK * SPLIT * r, (SPLIT, BLOCK))
            row = floats(out + r * out_stride, (columns,))
            if columns == BLOCK:  # a number of turns that the compiler knows
                for c in range(BLOCK):
                    row[c] = (parts[2, c] + parts[1, c]) + parts[0, c]
            else:
                for c in range(columns):
                    row[c] = (parts[2, c] + parts[1, c]) + parts[0, c]

    return add_parts
