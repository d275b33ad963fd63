"""The gated product on a CPU: on all threads, where XLA's loop has one."""

from collections.abc import Iterator
from typing import Any

import jax

from ...cpu_runtime import check_supported
from ...cpu_runtime.custom_call import register
from ...cpu_runtime.run_once import run_once

NAME = "entropic_silu_and_mul"
CHUNK = 32768  # elements that a thread takes at once
MULTIPLE = 16  # elements of a vector
LARGEST = 80.0  # of −gate in the exponential, which more would make infinite


def silu_and_mul(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Float32 only, and a multiple of 16 elements. The contract is in the package's docstring."""
    check_supported(gate.dtype, up.dtype)
    if gate.size % MULTIPLE:
        raise NotImplementedError(f"{gate.size} elements: only multiples of {MULTIPLE} are supported")
    _register()
    flat = jax.ShapeDtypeStruct((gate.size,), gate.dtype)
    call = jax.ffi.ffi_call(NAME, flat, vmap_method="broadcast_all")
    return call(gate.reshape(-1), up.reshape(-1)).reshape(gate.shape)


@run_once
def _register() -> None:
    """Register the kernel with XLA."""
    register(NAME, _compile)


def _compile() -> Iterator[tuple[str, Any]]:
    from ...cpu_runtime.kernel import compiled, njit, operand, parallel_kernel, result
    from ...cpu_runtime.vector import gated_products

    products = gated_products(LARGEST)

    @compiled
    def num_elements(frame):
        count = 1
        for size in operand(frame, 0)[1]:  # under `vmap` there are more axes
            count *= size
        return count

    @njit(nogil=True)
    def multiply(frame, number):
        begin = number * CHUNK
        length = min(CHUNK, num_elements(frame) - begin)
        gate, up, out = operand(frame, 0)[0], operand(frame, 1)[0], result(frame, 0)[0]
        products(gate + 4 * begin, up + 4 * begin, out + 4 * begin, length)

    @compiled
    def num_chunks(frame):
        return (num_elements(frame) + CHUNK - 1) // CHUNK

    yield from parallel_kernel(NAME, multiply, num_chunks)
