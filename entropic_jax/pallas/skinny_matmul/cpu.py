"""Products of few rows on a CPU: every weight is read once, a block of columns by whichever thread is free.

XLA hands each product to threads of its own and waits for them, however small it is, and multiplies bfloat16
at a small part of the memory's speed. Here bfloat16 is widened in registers: weights that were published in
it take half of the time that float32 takes, for the same numbers.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import cpu_runtime
from ...cpu_runtime.custom_call import register
from ...cpu_runtime.run_once import once

BLOCK = 64  # columns that a thread takes at once, at least
ROWS = (8, 4, 2, 1)  # rows that are multiplied together
WIDTHS = {8: 2, 4: 4, 2: 4, 1: 4}  # and by how many vectors of columns
KINDS = ("float32", "bfloat16")


def serves(shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether `project` accepts float32 rows and a weight of this shape and dtype."""
    return cpu_runtime.why_not() is None and shape[-1] % BLOCK == 0 and jnp.dtype(dtype).name in KINDS


def project(x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """See the package; float32 rows, weights of float32 or bfloat16 with a multiple of 64 columns."""
    if reason := cpu_runtime.why_not():
        raise NotImplementedError(reason)
    kinds = {weight.dtype.name for weight in weights}
    if x.dtype != jnp.float32 or len(kinds) > 1 or not kinds <= {*KINDS}:
        found = ", ".join(sorted(kinds))
        raise NotImplementedError(
            f"{x.dtype} times {found}: float32 times one of {', '.join(KINDS)} is served"
        )
    if x.shape[0] == 1 and kinds == {"float32"}:
        raise NotImplementedError(
            "one row of float32: XLA reads weights of float32 in order, which is faster"
        )
    columns = tuple(weight.shape[1] for weight in weights)
    if any(count % BLOCK for count in columns):
        raise NotImplementedError(f"weights of {columns} columns: multiples of {BLOCK} are served")
    name = _register(x.shape[1], columns, *kinds)
    shapes = tuple(jax.ShapeDtypeStruct((x.shape[0], count), x.dtype) for count in columns)
    return tuple(jax.ffi.ffi_call(name, shapes, vmap_method="sequential")(x, *weights))


@once
def _register(inputs: int, columns: tuple[int, ...], kind: str) -> str:
    """Make the product with weights of one shape known to XLA; returns its name there."""
    name = f"entropic_project_{kind}_{inputs}_{'_'.join(map(str, columns))}"
    register(name, lambda: _compile(name, inputs, columns, kind))
    return name


def _compile(name: str, inputs: int, columns: tuple[int, ...], kind: str) -> Iterator[tuple[str, Any]]:
    from numba import njit

    from ...cpu_runtime import vector
    from ...cpu_runtime.call_frame import handler, operand, result, symbol, task
    from ...cpu_runtime.thread_pool import parallel

    tiles = [vector.tile(rows, WIDTHS[rows], kind) for rows in ROWS]
    eight, four, two, one = tiles
    size = jnp.dtype(kind).itemsize
    narrow = WIDTHS[8] * vector.LANES
    blocks = [0, *np.cumsum([count // BLOCK for count in columns]).tolist()]
    number_of_blocks, starts, widths = blocks[-1], tuple(blocks[:-1]), columns

    @njit(nogil=True)
    def block(frame, number):
        """All rows times one block of columns."""
        which = 0
        while which + 1 < len(starts) and number >= starts[which + 1]:
            which += 1
        count = widths[which]
        column = (number - starts[which]) * BLOCK
        x, shape = operand(frame, 0)
        weight = operand(frame, 1 + which)[0]
        out = result(frame, which)[0]
        rows, row = shape[0], 0
        while row < rows:
            left = rows - row
            source, target = x + 4 * row * inputs, out + 4 * row * count
            if left >= 8:
                for c in range(column, column + BLOCK, narrow):
                    eight(source, weight + size * c, target + 4 * c, inputs, count)
                row += 8
            elif left >= 4:
                four(source, weight + size * column, target + 4 * column, inputs, count)
                row += 4
            elif left >= 2:
                two(source, weight + size * column, target + 4 * column, inputs, count)
                row += 2
            else:
                one(source, weight + size * column, target + 4 * column, inputs, count)
                row += 1

    yield f"{name}_block", task(block)
    place_of_block = symbol(f"{name}_block")

    @njit(nogil=True)
    def body(frame):
        parallel(place_of_block(), frame, number_of_blocks)

    yield name, handler(body)
