"""Entropy moments on a CPU: one pass for the maximum and one for the sums, with one row per thread.

XLA makes a dozen operations of them, each of which goes through memory, on one core.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...cpu_runtime import check_supported
from ...cpu_runtime.custom_call import register
from ...cpu_runtime.run_once import run_once
from .reference import Moments

PIECE = 1024  # logits whose exponentials are summed in float32; pieces are summed in float64
LOWEST = np.float32(-87)  # smaller exponents count as this: e^−87 vanishes next to the 1 of the largest logit


def entropy_moments(logits: jax.Array, inverse_temperature: jax.Array, active: jax.Array) -> Moments:
    """Float32 only. The contract is in the package's docstring."""
    check_supported(logits.dtype, inverse_temperature.dtype)
    per_row = jax.ShapeDtypeStruct(inverse_temperature.shape, inverse_temperature.dtype)
    call = jax.ffi.ffi_call(_register(), (per_row,) * 4, vmap_method="sequential")
    return Moments(*call(logits, inverse_temperature, active.astype(jnp.int32)))


@run_once
def _register() -> str:
    """Register the kernel with XLA; returns its name there."""
    name = "entropic_entropy_moments"
    register(name, lambda: _compile(name))
    return name


def _compile(name: str) -> Iterator[tuple[str, Any]]:
    from ...cpu_runtime.kernel import compiled, operand, parallel_kernel

    @compiled
    def num_rows(frame):
        return operand(frame, 0)[1][0]

    yield from parallel_kernel(name, _row_moments(), num_rows)


def _row_reductions() -> tuple[Any, Any, Any]:
    """Compile `largest(z)`, `has_nan(z)`, and `sums(d, r)`: Σ r d and Σ r d²."""
    from ...cpu_runtime.kernel import compiled, njit

    any_order, zero = {"reassoc", "contract", "nsz"}, np.float32(0)

    @njit(fastmath={*any_order, "nnan"}, nogil=True)
    def largest(z):
        top = np.float32(-np.inf)
        for t in range(z.shape[0]):
            top = max(top, z[t])
        return top

    @compiled
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

    return largest, has_nan, sums


def _row_moments() -> Any:
    """Compile the task of a thread: the moments of one row."""
    from ...cpu_runtime import vector
    from ...cpu_runtime.kernel import (
        EXACT,
        allocate,
        floats,
        free,
        integers,
        njit,
        operand,
        operand_floats,
        operand_integers,
        result_floats,
    )

    exponentials, (largest, has_nan, sums) = vector.exponentials(), _row_reductions()
    zero, infinity, nan = np.float32(0), np.float32(np.inf), np.float32(np.nan)

    @njit(**EXACT)
    def row_moments(frame, number):
        data, shape = operand(frame, 0)
        rows, vocabulary = shape[0], shape[1]
        z = floats(data, (rows, vocabulary))[number]
        inverse = operand_floats(frame, 1, (rows,))[number]
        highest, log_total = result_floats(frame, 0, (rows,)), result_floats(frame, 1, (rows,))
        mean, square = result_floats(frame, 2, (rows,)), result_floats(frame, 3, (rows,))
        if operand_integers(frame, 2, (rows,))[number] == 0:
            highest[number], log_total[number], mean[number], square[number] = zero, zero, zero, zero
            return
        top = nan if has_nan(z) else largest(z)
        if not abs(top) < infinity or inverse != inverse:
            highest[number] = top if abs(top) < infinity else zero
            log_total[number] = top + inverse * zero
            mean[number], square[number] = nan, nan
            return
        memory = allocate(3 * 4 * PIECE)
        distance, ratio = floats(memory, (PIECE,)), floats(memory + 4 * PIECE, (PIECE,))
        power = integers(memory + 8 * PIECE, (PIECE,))
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

    return row_moments
