"""Entropy moments on a CPU: one pass for the maximum and one for the sums, with one row per thread.

XLA makes a dozen operations of them, each of which goes through memory, on one core.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ...cpu_runtime import check_supported
from ...cpu_runtime.custom_call import register
from ...cpu_runtime.run_once import run_once
from .reference import Moments

PIECE = 1024  # logits whose exponentials are summed in float32; pieces are summed in float64
LOWEST = np.float32(-87)  # smaller exponents count as this: e^−87 vanishes beside the 1 of the largest logit


def entropy_moments(logits: jax.Array, inverse_temperature: jax.Array) -> Moments:
    """Float32 only. The contract is in the package's docstring."""
    check_supported(logits.dtype, inverse_temperature.dtype)
    per_row = jax.ShapeDtypeStruct(inverse_temperature.shape, inverse_temperature.dtype)
    call = jax.ffi.ffi_call(_register(), (per_row,) * 4, vmap_method="sequential")
    return Moments(*call(logits, inverse_temperature))


@run_once
def _register() -> str:
    """Register the kernel with XLA; returns its name there."""
    name = "entropic_entropy_moments"
    register(name, lambda: _compile(name))
    return name


def _compile(name: str) -> Iterator[tuple[str, Any]]:
    from numba import carray, njit

    from ...cpu_runtime import vector
    from ...cpu_runtime.call_frame import (
        allocate,
        as_pointer,
        floats,
        free,
        operand,
        result,
        symbol_address,
        thread_task,
        xla_handler,
    )
    from ...cpu_runtime.thread_pool import parallel_for

    exponentials = vector.exponentials()
    zero, infinity, nan = np.float32(0), np.float32(np.inf), np.float32(np.nan)
    any_order = {"reassoc", "contract", "nsz"}

    @njit(fastmath={*any_order, "nnan"}, nogil=True)
    def largest(z):
        top = -infinity
        for t in range(z.shape[0]):
            top = max(top, z[t])
        return top

    @njit(nogil=True)
    def has_nan(z):
        count = 0
        for t in range(z.shape[0]):
            count += z[t] != z[t]
        return count > 0

    @njit(fastmath=any_order, nogil=True)
    def sums(distance, ratio):
        first, second = zero, zero
        for t in range(distance.shape[0]):
            part = ratio[t] * distance[t]
            first += part
            second += part * distance[t]
        return first, second

    @njit(nogil=True)
    def row(frame, number):
        data, shape = operand(frame, 0)
        rows, vocabulary = shape[0], shape[1]
        z = carray(as_pointer(data), (rows, vocabulary), np.float32)[number]
        inverse = carray(as_pointer(operand(frame, 1)[0]), (rows,), np.float32)[number]
        highest = carray(as_pointer(result(frame, 0)[0]), (rows,), np.float32)
        log_total = carray(as_pointer(result(frame, 1)[0]), (rows,), np.float32)
        mean = carray(as_pointer(result(frame, 2)[0]), (rows,), np.float32)
        square = carray(as_pointer(result(frame, 3)[0]), (rows,), np.float32)
        top = nan if has_nan(z) else largest(z)
        if not abs(top) < infinity or inverse != inverse:
            highest[number] = top if abs(top) < infinity else zero
            log_total[number] = top + inverse * zero
            mean[number], square[number] = nan, nan
            return
        memory = allocate(3 * 4 * PIECE)
        distance, ratio = floats(memory, (PIECE,)), floats(memory + 4 * PIECE, (PIECE,))
        power = carray(as_pointer(memory + 8 * PIECE), (PIECE,), np.int32)
        total, first, second = np.float64(0), np.float64(0), np.float64(0)
        for begin in range(0, vocabulary, PIECE):
            count = min(PIECE, vocabulary - begin)
            for t in range(count):
                d = (z[begin + t] - top) * inverse
                distance[t] = d if d > LOWEST else zero
                ratio[t] = d if d > LOWEST else LOWEST
            total += exponentials(ratio[:count], zero, power[:count])
            first_sum, second_sum = sums(distance[:count], ratio[:count])
            first += first_sum
            second += second_sum
        highest[number], log_total[number] = top, np.log(np.float32(total))
        mean[number], square[number] = np.float32(first / total), np.float32(second / total)
        free(memory)

    yield f"{name}_row", thread_task(row)
    row_address = symbol_address(f"{name}_row")

    @njit(nogil=True)
    def body(frame):
        parallel_for(row_address(), frame, operand(frame, 0)[1][0])

    yield name, xla_handler(body)
