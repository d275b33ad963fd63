"""RMS normalisation on a CPU: one order of summation, whatever the number of rows.

XLA vectorises the sum of squares differently for different numbers of rows, and contracts the square and the
addition in some of these forms only. A row of a batch would not have the bits that it has alone.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ...cpu_runtime import check_supported
from ...cpu_runtime.custom_call import register
from ...cpu_runtime.run_once import run_once

CHUNK = 32768  # elements that a thread takes at once


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """Float32 only. The contract is in the package's docstring."""
    check_supported(x.dtype, weight.dtype)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call(_register(x.shape[1], float(epsilon)), shape, vmap_method="sequential")(x, weight)


@run_once
def _register(size: int, epsilon: float) -> str:
    """Register the normalisation of vectors of one size with XLA; returns its name there."""
    name = f"entropic_rms_norm_{size}_{epsilon.hex().translate(str.maketrans('.-+', 'pmp'))}"
    register(name, lambda: _compile(name, size, epsilon))
    return name


def _compile(name: str, size: int, epsilon: float) -> Iterator[tuple[str, Any]]:
    from ...cpu_runtime.kernel import (
        compiled,
        njit,
        operand,
        operand_floats,
        parallel_kernel,
        result_floats,
    )

    added, inverse_size = np.float32(epsilon), np.float32(1 / size)
    rows_per_chunk = max(1, CHUNK // size)

    # Lanes may be summed in any order that the compiler likes: the size is a constant, so it is one order.
    @njit(fastmath={"reassoc", "contract", "nsz"}, nogil=True)
    def sum_of_squares(x):
        total = np.float32(0)
        for i in range(size):
            total += x[i] * x[i]
        return total

    @njit(nogil=True, error_model="numpy")
    def normalise(frame, number):
        rows = operand(frame, 0)[1][0]
        x, out = operand_floats(frame, 0, (rows, size)), result_floats(frame, 0, (rows, size))
        weight = operand_floats(frame, 1, (size,))
        for row in range(number * rows_per_chunk, min(rows, (number + 1) * rows_per_chunk)):
            scale = np.float32(1) / np.sqrt(sum_of_squares(x[row]) * inverse_size + added)
            for i in range(size):
                out[row, i] = x[row, i] * scale * weight[i]

    @compiled
    def num_chunks(frame):
        return (operand(frame, 0)[1][0] + rows_per_chunk - 1) // rows_per_chunk

    yield from parallel_kernel(name, normalise, num_chunks)
