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
LOWEST = -69.0  # exponents below count as −∞: e^−69 vanishes next to the 1 of the largest logit


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


def _row_moments() -> Any:
    """Compile the task of a thread: the moments of one row."""
    from ...cpu_runtime.instructions import LANES
    from ...cpu_runtime.kernel import (
        EXACT,
        allocate,
        floats,
        free,
        njit,
        operand,
        operand_floats,
        operand_integers,
        result_floats,
    )

    largest, sums = _row_largest(), _row_sums()
    zero, infinity, nan = np.float32(0), np.float32(np.inf), np.float32(np.nan)

    @njit(**EXACT)
    def row_moments(frame, number):
        logits, shape = operand(frame, 0)
        rows, vocabulary = shape[0], shape[1]
        logits += 4 * number * vocabulary
        inverse = operand_floats(frame, 1, (rows,))[number]
        highest, log_total = result_floats(frame, 0, (rows,)), result_floats(frame, 1, (rows,))
        mean, square = result_floats(frame, 2, (rows,)), result_floats(frame, 3, (rows,))
        if operand_integers(frame, 2, (rows,))[number] == 0:
            highest[number], log_total[number], mean[number], square[number] = zero, zero, zero, zero
            return
        # The last logits that fill no vector, and after them masked tokens up to a vector.
        memory = allocate(4 * (LANES + 5))
        rest, scratch = floats(memory, (LANES,)), floats(memory + 4 * LANES, (5,))
        vectors = vocabulary - vocabulary % LANES
        for t in range(LANES):
            rest[t] = floats(logits, (vocabulary,))[vectors + t] if vectors + t < vocabulary else -infinity
        largest(logits, vectors, memory, memory + 4 * LANES)
        top = nan if scratch[1] > 0 else scratch[0]
        if not abs(top) < infinity or inverse != inverse:
            highest[number] = top if abs(top) < infinity else zero
            log_total[number] = top + inverse * zero
            mean[number], square[number] = nan, nan
            free(memory)
            return
        scratch[0], scratch[1] = top, inverse
        sums(memory, 0, LANES, memory + 4 * LANES)
        total, first, second = np.float64(scratch[2]), np.float64(scratch[3]), np.float64(scratch[4])
        for begin in range(0, vectors, PIECE):
            sums(logits, begin, min(begin + PIECE, vectors), memory + 4 * LANES)
            total += scratch[2]
            first += scratch[3]
            second += scratch[4]
        highest[number], log_total[number] = top, np.log(np.float32(total))
        mean[number], square[number] = np.float32(first / total), np.float32(second / total)
        free(memory)

    return row_moments


def _row_largest() -> Any:
    """`largest(logits, vectors, rest, target)`: writes max z, and a number above 0 where there is a NaN.

    The row is the first `vectors` logits, a multiple of the lanes, and one vector `rest`.
    """
    from ...cpu_runtime.control_flow import loop
    from ...cpu_runtime.instructions import (
        LANES,
        WORD,
        constant,
        intrinsic_of,
        larger,
        largest_lane,
        load,
        store,
    )

    def emit(builder, values):
        logits, vectors, rest, target = values

        def compare(address, offset, carried):
            top, unordered = carried
            value = load(builder, address, offset)
            is_nan = builder.fcmp_unordered("uno", value, value)
            return larger(builder, value, top), builder.select(is_nan, constant(1), unordered)

        def advance(index, carried):
            second = builder.add(index, WORD(LANES))
            return [*compare(logits, index, carried[:2]), *compare(logits, second, carried[2:])]

        none = [constant(float("-inf")), constant(0)]
        pairs = builder.and_(vectors, WORD(-2 * LANES))
        *even, top, unordered = loop(builder, WORD(0), pairs, 2 * LANES, none + none, advance)
        single = lambda index, carried: list(compare(logits, index, carried))
        carried = loop(builder, pairs, vectors, LANES, even, single)
        carried = compare(rest, WORD(0), carried)
        for offset, pair in enumerate(zip(carried, (top, unordered), strict=True)):
            store(builder, largest_lane(builder, larger(builder, *pair)), target, offset)

    return intrinsic_of(4, emit)


def _row_sums() -> Any:
    """`sums(logits, begin, end, scratch)`: Σ r, Σ r d and Σ r d² of logits, r = eᵈ and d = (z − top) / T.

    The first two floats of `scratch` are `top` and 1 / T; the sums are written behind them. The number of
    logits is a multiple of the lanes.
    """
    from ...cpu_runtime.control_flow import loop
    from ...cpu_runtime.instructions import (
        FLOAT,
        LANES,
        broadcast,
        constant,
        exponential,
        intrinsic_of,
        load,
        multiply_add,
        store,
        sum_lanes,
    )

    def emit(builder, values):
        logits, begin, end, scratch = values
        top, inverse = (broadcast(builder, load(builder, scratch, place, FLOAT)) for place in (0, 1))
        zero = constant(0)

        def advance(index, carried):
            total, first, second = carried
            distance = builder.fmul(builder.fsub(load(builder, logits, index), top), inverse)
            counts = builder.fcmp_ordered(">", distance, constant(LOWEST))
            distance = builder.select(counts, distance, zero)
            ratio = builder.select(counts, exponential(builder, distance), zero)
            part = builder.fmul(ratio, distance)
            return [
                builder.fadd(total, ratio),
                builder.fadd(first, part),
                multiply_add(builder, part, distance, second),
            ]

        totals = loop(builder, begin, end, LANES, [zero] * 3, advance)
        for place, total in enumerate(totals):
            store(builder, sum_lanes(builder, total), scratch, 2 + place)

    return intrinsic_of(4, emit)
