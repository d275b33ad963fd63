"""Gumbel-max sampling on a CPU: noise and maximum in one pass over the row, in registers.

XLA takes ten times as long: it computes the random bits a lane at a time and writes them to memory.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ...cpu_runtime import check_supported
from ...cpu_runtime.custom_call import register
from ...cpu_runtime.run_once import run_once
from .reference import PARITY, ROTATIONS, SMALLEST

LEAST_COLUMNS = 16  # the lanes of a vector
UNROLLED = 4  # vectors of a turn: the rounds of Threefry wait for one another within a vector
FARTHEST = 23.0  # above all noise
MARGIN = 0.01  # of the bound of a token's noise: more than all rounding


def gumbel_argmax(
    logits: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    active: jax.Array,
    numbers: jax.Array | None = None,
) -> jax.Array:
    """The contract is in the package's docstring."""
    check_supported(logits.dtype)
    rows, columns = logits.shape
    if columns < LEAST_COLUMNS:
        raise NotImplementedError(f"a vocabulary of {columns}: at least {LEAST_COLUMNS} is supported")
    shape = jax.ShapeDtypeStruct((rows,), jnp.int32)
    call = jax.ffi.ffi_call(_register(numbers is not None), shape, vmap_method="sequential")
    words = jax.lax.bitcast_convert_type(key, jnp.int32)
    seed, position, active = (x.astype(jnp.int32) for x in (seed, position, active))
    listed = () if numbers is None else (numbers.astype(jnp.int32),)
    return call(logits, temperature.astype(jnp.float32), words, seed, position, active, *listed)


@run_once
def _register(listed: bool) -> str:
    """Register the kernel with XLA; returns its name there.

    Args:
        listed: whether the columns are those of a list of tokens.
    """
    name = "entropic_gumbel_argmax" + "_listed" * listed
    register(name, lambda: _compile(name, listed))
    return name


def _compile(name: str, listed: bool) -> Iterator[tuple[str, Any]]:
    from ...cpu_runtime.kernel import (
        compiled,
        operand,
        operand_floats,
        operand_integers,
        parallel_kernel,
        result,
        result_integers,
    )

    draw, take_largest = _row_argmax(True, listed), _row_argmax(False, False)

    @compiled
    def draw_row(frame, row):
        logits, shape = operand(frame, 0)
        rows, columns = shape[0], shape[1]
        source, target = logits + 4 * row * columns, result(frame, 0)[0] + 4 * row
        if operand_integers(frame, 5, (rows,))[row] == 0:
            result_integers(frame, 0, (rows,))[row] = 0
        elif operand_floats(frame, 1, (rows,))[row] > 0:
            temperature, key = operand(frame, 1)[0] + 4 * row, operand(frame, 2)[0]
            seed, position = operand(frame, 3)[0] + 4 * row, operand(frame, 4)[0] + 4 * row
            numbers = operand(frame, 6)[0] if listed else 0
            draw(source, columns, temperature, key, seed, position, numbers, target)
        else:
            take_largest(source, columns, 0, 0, 0, 0, 0, target)

    @compiled
    def num_rows(frame):
        return operand(frame, 0)[1][0]

    yield from parallel_kernel(name, draw_row, num_rows)


def _row_argmax(noisy: bool, listed: bool) -> Any:
    """`row_argmax(logits, columns, temperature, key, seed, position, numbers, target)` writes a column.

    All but `columns` are addresses, `target` that of an int32. The noise follows from the others between.

    The random bits of a token bound its noise, and most tokens are not the largest even with the bound. So
    the logarithms of noise are taken only where a token may be the largest so far; and no bits are made where
    none is with any noise, as in a row that is truncated.

    Args:
        noisy: whether Gumbel noise is added first.
        listed: whether it is that of the tokens of a list.
    """
    from ...cpu_runtime.control_flow import loop, when
    from ...cpu_runtime.instructions import (
        INTEGERS,
        LANES,
        NARROW,
        WORD,
        any_lane,
        broadcast,
        constant,
        integers,
        intrinsic_of,
        largest_lane,
        load,
    )

    def emit(builder, values):
        logits, columns, temperature, *randomness, numbers, target = values
        none = constant(float("-inf"))
        if noisy:
            highest, divisor = _scale(builder, logits, columns, temperature)
            words = _row_key(builder, *randomness)

        def may_change(values, bounds, best):
            above = [
                builder.fcmp_ordered(">", builder.fadd(value, bound), best)
                for value, bound in zip(values, bounds, strict=True)
            ]
            return any_lane(builder, functools.reduce(builder.or_, above))

        def advance(start, carried):
            places, indices, values = _columns(builder, logits, columns, start)
            if not noisy:
                return [*_take_larger(builder, carried[:2], indices, values), carried[2]]
            tokens = [load(builder, numbers, x, INTEGERS) for x in places] if listed else indices
            values = [builder.fdiv(builder.fsub(z, highest), divisor) for z in values]

            def with_bits(carried):
                uniform = [_uniform(builder, words, token) for token in tokens]

                def with_noise(carried):
                    noisy_values = [
                        builder.fadd(z, _noise(builder, u)) for z, u in zip(values, uniform, strict=True)
                    ]
                    largest, index = _take_larger(builder, carried[:2], indices, noisy_values)
                    return [largest, index, broadcast(builder, largest_lane(builder, largest))]

                bounds = [_bound(builder, u) for u in uniform]
                return when(builder, may_change(values, bounds, carried[2]), carried, with_noise)

            farthest = [constant(FARTHEST)] * UNROLLED
            return when(builder, may_change(values, farthest, carried[2]), carried, with_bits)

        carried = loop(builder, WORD(0), columns, UNROLLED * LANES, [none, integers(0), none], advance)
        first = _first_largest(builder, *carried[:2])
        builder.store(first, builder.inttoptr(target, NARROW.as_pointer()))

    return intrinsic_of(8, emit)


def _scale(builder: Any, logits: Any, columns: Any, temperature: Any) -> tuple[Any, Any]:
    """Offset and divisor of the logits as vectors; see `reference.tempered`.

    Args:
        builder: of the function.
        logits: the address of the row's logits.
        columns: number of them.
        temperature: the address of the temperature, above 0.
    """
    from ...cpu_runtime.control_flow import loop
    from ...cpu_runtime.instructions import (
        FLOAT,
        LANES,
        WORD,
        broadcast,
        constant,
        larger,
        largest_lane,
        load,
    )

    def advance(start, carried):
        for value in _columns(builder, logits, columns, start)[2]:
            carried = [larger(builder, value, carried[0])]
        return carried

    lowest = constant(float("-inf"))
    (largest,) = loop(builder, WORD(0), columns, UNROLLED * LANES, [lowest], advance)
    highest = broadcast(builder, largest_lane(builder, largest))
    distance = builder.fsub(highest, highest)  # 0, or NaN where it is not finite
    finite = builder.fcmp_ordered("==", distance, constant(0.0))
    divisor = larger(
        builder, broadcast(builder, load(builder, temperature, 0, FLOAT)), constant(float(SMALLEST))
    )
    return builder.select(finite, highest, constant(0.0)), divisor


def _row_key(builder: Any, key: Any, seed: Any, position: Any) -> list[Any]:
    """The two words of a row's key, as `reference.folded`, vectors; all but the builder are addresses."""
    from ...cpu_runtime.instructions import NARROW, integers, load, splat

    words = [splat(builder, load(builder, key, number, NARROW)) for number in (0, 1)]
    for address in (seed, position):
        data = splat(builder, load(builder, address, 0, NARROW))
        words = list(_threefry(builder, words, integers(0), data))
    return words


def _columns(builder: Any, logits: Any, columns: Any, start: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Where the vectors of a turn begin, the numbers of their columns, and their logits.

    The last ends with the row, and so may repeat columns.

    Args:
        builder: of the function.
        logits: the address of the row's logits.
        columns: number of them.
        start: the first column of the turn.
    """
    from ...cpu_runtime.instructions import LANE_NUMBERS, LANES, NARROW, WORD, load, splat

    last, places, numbers, values = builder.sub(columns, WORD(LANES)), [], [], []
    for offset in range(0, UNROLLED * LANES, LANES):
        place = builder.add(start, WORD(offset))
        place = builder.select(builder.icmp_signed("<", place, last), place, last)
        places.append(place)
        numbers.append(builder.add(splat(builder, builder.trunc(place, NARROW)), LANE_NUMBERS))
        values.append(load(builder, logits, place))
    return places, numbers, values


def _take_larger(builder: Any, carried: list[Any], numbers: list[Any], values: list[Any]) -> list[Any]:
    """The largest value of each lane and the number of its column, the first of ties.

    Args:
        builder: of the function.
        carried: both of the columns before.
        numbers: of the columns, vectors.
        values: theirs.
    """
    largest, index = carried
    for value, number in zip(values, numbers, strict=True):
        better = builder.fcmp_ordered(">", value, largest)
        largest, index = builder.select(better, value, largest), builder.select(better, number, index)
    return [largest, index]


def _first_largest(builder: Any, largest: Any, index: Any) -> Any:
    """The number of the largest value of all lanes, the first of ties, from those of each lane."""
    from ...cpu_runtime.instructions import LANES, NARROW, permute

    for step in (8, 4, 2, 1):
        lanes = [i ^ step for i in range(LANES)]
        value, number = permute(builder, [largest], lanes), permute(builder, [index], lanes)
        tied = builder.and_(
            builder.fcmp_ordered("==", value, largest), builder.icmp_signed("<", number, index)
        )
        better = builder.or_(builder.fcmp_ordered(">", value, largest), tied)
        largest, index = builder.select(better, value, largest), builder.select(better, number, index)
    return builder.extract_element(index, NARROW(0))


def _uniform(builder: Any, key: list[Any], number: Any) -> Any:
    """The uniform numbers of tokens, above 0 and below 1, from the bits of Threefry."""
    from ...cpu_runtime.instructions import VECTOR, constant, integers

    x, y = _threefry(builder, key, integers(0), number)
    uniform = builder.uitofp(builder.xor(x, y), VECTOR)
    uniform = builder.fmul(builder.fadd(uniform, constant(0.5)), constant(2.0**-32))
    highest = constant(1 - 2.0**-24)
    return builder.select(builder.fcmp_ordered("<", uniform, highest), uniform, highest)


def _threefry(builder: Any, key: list[Any], x: Any, y: Any) -> tuple[Any, Any]:
    """Vector form of `reference.threefry`.

    Args:
        builder: of the function.
        key: two words.
        x: the first word of the counter.
        y: the second.
    """
    from ...cpu_runtime.instructions import integers, rotate_left

    words = [*key, builder.xor(builder.xor(key[0], key[1]), integers(int(PARITY)))]
    x, y = builder.add(x, words[0]), builder.add(y, words[1])
    for group in range(5):
        for bits in ROTATIONS[group % 2]:
            x = builder.add(x, y)
            y = builder.xor(x, rotate_left(builder, y, bits))
        x = builder.add(x, words[(group + 1) % 3])
        y = builder.add(builder.add(y, words[(group + 2) % 3]), integers(group + 1))
    return x, y


def _bound(builder: Any, uniform: Any) -> Any:
    """An upper bound of noise, larger by up to 0.07 where the noise is large.

    With u = 2ⁿ (1 + m), noise −ln(−ln(1 − u)) ≤ −ln u ≤ −ln 2 (n + m), and n + m is in the bits of u.
    """
    from ...cpu_runtime.instructions import INTEGERS, VECTOR, constant, multiply_add

    bits = builder.sitofp(builder.bitcast(uniform, INTEGERS), VECTOR)
    return multiply_add(
        builder, bits, constant(-math.log(2) * 2.0**-23), constant(127 * math.log(2) + MARGIN)
    )


def _noise(builder: Any, uniform: Any) -> Any:
    """Gumbel noise, as `reference.gumbel`, of uniform numbers."""
    from ...cpu_runtime.instructions import constant, logarithm

    unit = constant(1.0)
    rest = builder.fsub(unit, uniform)
    # 1 − u is rounded; what it lost is added to the logarithm, since small u are the large noise.
    lost = builder.fsub(builder.fsub(unit, rest), uniform)
    surprisal = builder.fneg(builder.fadd(logarithm(builder, rest), builder.fdiv(lost, rest)))
    return builder.fneg(logarithm(builder, surprisal))
