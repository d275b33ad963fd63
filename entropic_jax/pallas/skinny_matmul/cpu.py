"""Skinny matrix products on a CPU: the threads share the columns, and every weight is read once.

XLA hands each product to threads of its own and waits for them, however small it is, and multiplies bfloat16
at a fraction of the memory's bandwidth. Here bfloat16 is widened in registers: weights that were published in
bfloat16 take half of the time of float32, with the same result.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import cpu_runtime
from ...cpu_runtime.custom_call import register
from ...cpu_runtime.run_once import run_once

BLOCK = 64  # columns of one chunk of work
ROWS = (8, 4, 2, 1)  # rows that are multiplied together
VECTORS = {8: 2, 4: 4, 2: 4, 1: 4}  # vectors of columns in a tile, by its rows
WEIGHT_DTYPES = ("float32", "bfloat16")


def supports_weight(shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether `skinny_matmul` accepts float32 rows and a weight of this shape and dtype."""
    available = cpu_runtime.unavailable_reason() is None
    return available and shape[-1] % BLOCK == 0 and jnp.dtype(dtype).name in WEIGHT_DTYPES


def skinny_matmul(x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Float32 rows times weights of float32, or of bfloat16 with a multiple of 64 columns.

    The contract is in the package's docstring.
    """
    if reason := cpu_runtime.unavailable_reason():
        raise NotImplementedError(reason)
    dtypes = {weight.dtype.name for weight in weights}
    if x.dtype != jnp.float32 or len(dtypes) > 1 or not dtypes <= {*WEIGHT_DTYPES}:
        names = ", ".join(sorted(dtypes))
        raise NotImplementedError(
            f"{x.dtype} times {names}: only float32 times one of {', '.join(WEIGHT_DTYPES)} is supported"
        )
    columns = tuple(weight.shape[1] for weight in weights)
    if dtypes == {"bfloat16"} and any(count % BLOCK for count in columns):
        raise NotImplementedError(f"bfloat16 of {columns} columns: only multiples of {BLOCK} are supported")
    name = _register(x.shape[1], columns, *dtypes)
    shapes = tuple(jax.ShapeDtypeStruct((x.shape[0], count), x.dtype) for count in columns)
    return tuple(jax.ffi.ffi_call(name, shapes, vmap_method="sequential")(x, *weights))


@run_once
def _register(inputs: int, columns: tuple[int, ...], dtype: str) -> str:
    """Register the product with weights of one shape with XLA; returns its name there."""
    name = f"entropic_skinny_matmul_{dtype}_{inputs}_{'_'.join(map(str, columns))}"
    register(name, lambda: _compile(name, inputs, columns, dtype))
    return name


def _compile(name: str, inputs: int, columns: tuple[int, ...], dtype: str) -> Iterator[tuple[str, Any]]:
    from numba import njit

    from ...cpu_runtime import vector
    from ...cpu_runtime.call_frame import floats, operand, result, symbol_address, thread_task, xla_handler
    from ...cpu_runtime.thread_pool import parallel_for

    eight_rows, four_rows, two_rows, single_row = (
        vector.matmul_tile(rows, VECTORS[rows], dtype) for rows in ROWS
    )
    size = jnp.dtype(dtype).itemsize
    narrow = VECTORS[8] * vector.LANES
    blocks = [0, *np.cumsum([-(-count // BLOCK) for count in columns]).tolist()]
    num_blocks, first_blocks, widths = blocks[-1], tuple(blocks[:-1]), columns

    @njit(nogil=True)
    def narrow_block(x, weight, out, rows, width, column):
        """All rows times the last columns, which do not fill a block; float32."""
        factors, outputs = floats(x, (rows, inputs)), floats(out, (rows, width))
        matrix = floats(weight, (inputs, width))
        for row in range(rows):
            outputs[row, column:] = np.float32(0)
            for i in range(inputs):
                for c in range(column, width):
                    outputs[row, c] += factors[row, i] * matrix[i, c]

    @njit(nogil=True)
    def block(frame, number):
        """All rows times one block of columns."""
        w = 0  # the weight that the block belongs to
        while w + 1 < len(first_blocks) and number >= first_blocks[w + 1]:
            w += 1
        width = widths[w]
        column = (number - first_blocks[w]) * BLOCK
        x, shape = operand(frame, 0)
        weight = operand(frame, 1 + w)[0]
        out = result(frame, w)[0]
        rows, row = shape[0], 0
        if column + BLOCK > width:
            narrow_block(x, weight, out, rows, width, column)
            return
        while row < rows:
            left = rows - row
            source, target = x + 4 * row * inputs, out + 4 * row * width
            if left >= 8:
                for c in range(column, column + BLOCK, narrow):
                    eight_rows(source, weight + size * c, target + 4 * c, inputs, width)
                row += 8
            elif left >= 4:
                four_rows(source, weight + size * column, target + 4 * column, inputs, width)
                row += 4
            elif left >= 2:
                two_rows(source, weight + size * column, target + 4 * column, inputs, width)
                row += 2
            else:
                single_row(source, weight + size * column, target + 4 * column, inputs, width)
                row += 1

    yield f"{name}_block", thread_task(block)
    block_address = symbol_address(f"{name}_block")

    @njit(nogil=True)
    def body(frame):
        parallel_for(block_address(), frame, num_blocks)

    yield name, xla_handler(body)
