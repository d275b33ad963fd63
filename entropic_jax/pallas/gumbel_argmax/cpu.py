"""Gumbel-max sampling on a CPU: noise and maximum in one pass over the row, in registers.

XLA takes ten times as long: it computes the random bits a lane at a time and writes them to memory.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ...cpu_runtime import check_supported
from ...cpu_runtime.custom_call import register
from ...cpu_runtime.run_once import run_once
from .reference import PARITY, ROTATIONS

SMALLEST_VOCABULARY = 16  # the lanes of a vector


def gumbel_argmax(logits: jax.Array, keys: jax.Array, noisy: jax.Array, active: jax.Array) -> jax.Array:
    """The contract is in the package's docstring."""
    check_supported(logits.dtype)
    rows, vocabulary = logits.shape
    if vocabulary < SMALLEST_VOCABULARY:
        raise NotImplementedError(
            f"a vocabulary of {vocabulary}: at least {SMALLEST_VOCABULARY} is supported"
        )
    shape = jax.ShapeDtypeStruct((rows,), jnp.int32)
    call = jax.ffi.ffi_call(_register(), shape, vmap_method="sequential")
    words = jax.lax.bitcast_convert_type(keys, jnp.int32)
    return call(logits, words, noisy.astype(jnp.int32), active.astype(jnp.int32))


@run_once
def _register() -> str:
    """Register the kernel with XLA; returns its name there."""
    name = "entropic_gumbel_argmax"
    register(name, lambda: _compile(name))
    return name


def _compile(name: str) -> Iterator[tuple[str, Any]]:
    from ...cpu_runtime.kernel import (
        compiled,
        operand,
        operand_integers,
        parallel_kernel,
        result,
        result_integers,
    )

    draw, take_largest = _row_argmax(noisy=True), _row_argmax(noisy=False)

    @compiled
    def draw_row(frame, row):
        logits, shape = operand(frame, 0)
        rows, vocabulary = shape[0], shape[1]
        keys = operand_integers(frame, 1, (rows, 2))
        source, target = logits + 4 * row * vocabulary, result(frame, 0)[0] + 4 * row
        if operand_integers(frame, 3, (rows,))[row] == 0:
            result_integers(frame, 0, (rows,))[row] = 0
        elif operand_integers(frame, 2, (rows,))[row] != 0:
            draw(source, vocabulary, keys[row, 0], keys[row, 1], target)
        else:
            take_largest(source, vocabulary, 0, 0, target)

    @compiled
    def num_rows(frame):
        return operand(frame, 0)[1][0]

    yield from parallel_kernel(name, draw_row, num_rows)


def _row_argmax(noisy: bool) -> Any:
    """`row_argmax(logits, vocabulary, key0, key1, target)`: writes the index of the largest value, int32.

    Args:
        noisy: whether Gumbel noise is added first.
    """
    from llvmlite import ir

    from ...cpu_runtime.instructions import (
        INTEGERS,
        LANE_NUMBERS,
        LANES,
        NARROW,
        WORD,
        constant,
        intrinsic_of,
        load,
        loop,
        permute,
        splat,
    )

    def emit(builder, values):
        logits, vocabulary, *key, target = values
        words = [splat(builder, builder.trunc(word, NARROW)) for word in key]

        def advance(start, carried):
            # The last vector ends with the row, and so may repeat tokens: a value replaces smaller ones only.
            last = builder.sub(vocabulary, WORD(LANES))
            start = builder.select(builder.icmp_signed("<", start, last), start, last)
            largest, index = carried
            number = builder.add(splat(builder, builder.trunc(start, NARROW)), LANE_NUMBERS)
            value = load(builder, logits, start)
            if noisy:
                value = builder.fadd(value, _noise(builder, words, number))
            better = builder.fcmp_ordered(">", value, largest)
            return [builder.select(better, value, largest), builder.select(better, number, index)]

        none = [constant(float("-inf")), ir.Constant(INTEGERS, [0] * LANES)]
        largest, index = loop(builder, WORD(0), vocabulary, LANES, none, advance)
        for step in (8, 4, 2, 1):
            lanes = [i ^ step for i in range(LANES)]
            value, number = permute(builder, [largest], lanes), permute(builder, [index], lanes)
            tied = builder.and_(
                builder.fcmp_ordered("==", value, largest), builder.icmp_signed("<", number, index)
            )
            better = builder.or_(builder.fcmp_ordered(">", value, largest), tied)
            largest, index = builder.select(better, value, largest), builder.select(better, number, index)
        first = builder.extract_element(index, NARROW(0))
        builder.store(first, builder.inttoptr(target, NARROW.as_pointer()))

    return intrinsic_of(5, emit)


def _noise(builder: Any, key: list[Any], number: Any) -> Any:
    """Gumbel noise for the tokens of these numbers, as `reference.gumbel` of the bits of Threefry."""
    from ...cpu_runtime.instructions import VECTOR, constant, integers, logarithm, rotate_left

    words = [*key, builder.xor(builder.xor(key[0], key[1]), integers(int(PARITY)))]
    x, y = words[0], builder.add(number, words[1])
    for group in range(5):
        for bits in ROTATIONS[group % 2]:
            x = builder.add(x, y)
            y = builder.xor(x, rotate_left(builder, y, bits))
        x = builder.add(x, words[(group + 1) % 3])
        y = builder.add(builder.add(y, words[(group + 2) % 3]), integers(group + 1))
    uniform = builder.uitofp(builder.xor(x, y), VECTOR)
    uniform = builder.fmul(builder.fadd(uniform, constant(0.5)), constant(2.0**-32))
    highest = constant(1 - 2.0**-24)
    uniform = builder.select(builder.fcmp_ordered("<", uniform, highest), uniform, highest)
    unit = constant(1.0)
    rest = builder.fsub(unit, uniform)
    # 1 − u is rounded; what it lost is added to the logarithm, since small u are the large noise.
    lost = builder.fsub(builder.fsub(unit, rest), uniform)
    surprisal = builder.fneg(builder.fadd(logarithm(builder, rest), builder.fdiv(lost, rest)))
    return builder.fneg(logarithm(builder, surprisal))
