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
    from numba import carray, njit

    from ...cpu_runtime.call_frame import as_pointer, operand, result, symbol_address, thread_task, xla_handler
    from ...cpu_runtime.thread_pool import parallel_for

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
    def chunk(frame, number):
        data, shape = operand(frame, 0)
        x = carray(as_pointer(data), (shape[0], size), np.float32)
        weight = carray(as_pointer(operand(frame, 1)[0]), (size,), np.float32)
        out = carray(as_pointer(result(frame, 0)[0]), (shape[0], size), np.float32)
        for row in range(number * rows_per_chunk, min(shape[0], (number + 1) * rows_per_chunk)):
            scale = np.float32(1) / np.sqrt(sum_of_squares(x[row]) * inverse_size + added)
            for i in range(size):
                out[row, i] = x[row, i] * scale * weight[i]

    yield f"{name}_chunk", thread_task(chunk)
    chunk_address = symbol_address(f"{name}_chunk")

    @njit(nogil=True)
    def body(frame):
        rows = operand(frame, 0)[1][0]
        parallel_for(chunk_address(), frame, (rows + rows_per_chunk - 1) // rows_per_chunk)

    yield name, xla_handler(body)
