"""Vector instructions: emit LLVM code for float32 vectors, as the kernels of `vector` use it.

Vectors have 16 float32 lanes; LLVM splits them where registers are narrower. Addresses are integers and data
is contiguous. Values are those of llvmlite; a `builder` emits code at its place in the function.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 16
FLOAT, WORD, NARROW = ir.FloatType(), ir.IntType(64), ir.IntType(32)
VECTOR = ir.VectorType(FLOAT, LANES)
ITEMSIZE = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}  # bytes of an element, by dtype
CACHE_LINE = 64  # bytes
FOUR = ir.VectorType(FLOAT, 4)
INTEGERS = ir.VectorType(NARROW, LANES)
LANE_NUMBERS = ir.Constant(INTEGERS, list(range(LANES)))
# Minimax coefficients of 2ᶠ on [−½, ½], ascending: relative error 9e-8.
POWER_OF_TWO = (1, 0.693147004, 0.240222424, 0.0555073358, 0.00967151299, 0.00132647273)
# (ln(1 + f) − f + f²/2) / f³ on [√½ − 1, √2 − 1], ascending: relative error of the logarithm 8e-10.
LOGARITHM = (
    0.333333126,
    -0.250000096,
    0.200021187,
    -0.166679958,
    0.142195523,
    -0.124055891,
    0.11888163,
    -0.116756512,
    0.0674663825,
)
LOWEST_EXPONENT = -100  # of `exponential`: the products of its least value are normal numbers


def intrinsic_of(num_arguments: int, emit: Callable[[Any, list[Any]], None]) -> Any:
    """A Numba function of integers without a result, whose code `emit(builder, values)` generates."""
    names = "".join(f", a{i}" for i in range(num_arguments))

    def typed(context, *values):
        def generate(context, builder, signature, arguments):
            emit(builder, list(arguments))
            return context.get_dummy_value()

        return types.void(*(types.intp,) * num_arguments), generate

    # Numba requires that an intrinsic names its arguments one by one.
    namespace = {"typed": typed}
    exec(f"def operation(context{names}): return typed(context{names})", namespace)
    return intrinsic(namespace["operation"])


def _float_pointer(builder: Any, address: Any, offset: Any, llvm_type: Any = VECTOR) -> Any:
    """A pointer to `llvm_type`, `offset` floats after an address."""
    if isinstance(offset, int):
        offset = WORD(offset)
    return builder.inttoptr(builder.add(address, builder.shl(offset, WORD(2))), llvm_type.as_pointer())


def load(builder: Any, address: Any, offset: Any, llvm_type: Any = VECTOR) -> Any:
    """The value at an address, float32 or a vector of them.

    Args:
        builder: of the function, at the place where the instruction goes.
        address: integer.
        offset: in floats, a number of Python or of the program.
        llvm_type: of the value.
    """
    return builder.load(_float_pointer(builder, address, offset, llvm_type), align=4)


def _element_address(builder: Any, address: Any, offset: Any, dtype: str) -> Any:
    """The address of the element `offset`, a number of Python or of the program, of an array of `dtype`."""
    if isinstance(offset, int):
        offset = WORD(offset)
    return builder.add(address, builder.mul(offset, WORD(ITEMSIZE[dtype])))


def load_widened(builder: Any, address: Any, offset: Any, dtype: str) -> Any:
    """A vector of elements of `dtype`, widened to float32.

    Args:
        builder: of the function.
        address: integer, of an array.
        offset: of the first element, in elements.
        dtype: of the array: "float32", "bfloat16", "int8" or "float8_e4m3fn".
    """
    return _widen(builder, _load_elements(builder, address, offset, dtype, LANES), dtype)


def load_fours(builder: Any, address: Any, offsets: list[Any], first: int, dtype: str) -> Any:
    """A vector of fours of elements of `dtype`, widened to float32: four k begins at `offsets[k] + first`.

    Args:
        builder: of the function.
        address: integer, of an array.
        offsets: four numbers of the program, in elements.
        first: added to all offsets.
        dtype: see `load_widened`.
    """
    places = [builder.add(offset, WORD(first)) for offset in offsets]
    a, b, c, d = (_load_elements(builder, address, place, dtype, 4) for place in places)
    halves = [permute(builder, pair, range(8)) for pair in ((a, b), (c, d))]
    return _widen(builder, permute(builder, halves, range(LANES)), dtype)


def _load_elements(builder: Any, address: Any, offset: Any, dtype: str, number: int) -> Any:
    """A vector of elements, float32 or the integers that hold narrower ones."""
    element = FLOAT if dtype == "float32" else ir.IntType(8 * ITEMSIZE[dtype])
    pointer_type = ir.VectorType(element, number).as_pointer()
    address = _element_address(builder, address, offset, dtype)
    return builder.load(builder.inttoptr(address, pointer_type), align=ITEMSIZE[dtype])


def _widen(builder: Any, bits: Any, dtype: str) -> Any:
    """A vector as `_load_elements` loads it, as float32."""
    if dtype == "float32":
        return bits
    if dtype == "int8":
        return builder.sitofp(builder.sext(bits, INTEGERS), VECTOR)
    if dtype == "float8_e4m3fn":
        return _widen_e4m3(builder, bits)
    return builder.bitcast(builder.shl(builder.zext(bits, INTEGERS), integers(16)), VECTOR)


def _widen_e4m3(builder: Any, bits: Any) -> Any:
    """The numbers of 8 bits of E4M3 as float32, by way of float16, which keeps small ones at full speed."""
    short = ir.VectorType(ir.IntType(16), LANES)
    shifted = builder.shl(builder.sext(bits, short), ir.Constant(short, [7] * LANES))
    half = builder.bitcast(
        builder.and_(shifted, ir.Constant(short, [0xBF80 - 0x10000] * LANES)),
        ir.VectorType(ir.HalfType(), LANES),
    )
    # The bias of the exponent of float16 is larger by 8.
    return builder.fmul(builder.fpext(half, VECTOR), constant(256.0))


def store(builder: Any, value: Any, address: Any, offset: Any) -> None:
    """Writes a value to an address.

    Args:
        builder: of the function.
        value: float32, or a vector of them.
        address: integer.
        offset: in floats, a number of Python or of the program.
    """
    builder.store(value, _float_pointer(builder, address, offset, value.type), align=4)


def broadcast(builder: Any, value: Any) -> Any:
    """A vector with a scalar in every lane."""
    first_lane = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, NARROW(0))
    mask = ir.Constant(ir.VectorType(NARROW, LANES), None)
    return builder.shuffle_vector(first_lane, ir.Constant(VECTOR, ir.Undefined), mask)


def multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """X · y + z, rounded once.

    Args:
        builder: of the function.
        x: vector.
        y: vector.
        z: vector.
    """
    function_type = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return builder.call(_declared(builder, f"llvm.fma.v{LANES}f32", function_type), [x, y, z])


def _declared(builder: Any, name: str, function_type: Any) -> Any:
    return builder.module.globals.get(name) or ir.Function(builder.module, function_type, name)


def prefetch(builder: Any, address: Any) -> None:
    """Prefetch the cache line at an address into the second-level cache.

    A prefetch into the first level would occupy one of its few line-fill buffers until memory answers.
    """
    byte = ir.IntType(8).as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [byte, NARROW, NARROW, NARROW])
    function = _declared(builder, "llvm.prefetch.p0", function_type)
    builder.call(function, [builder.inttoptr(address, byte), NARROW(0), NARROW(1), NARROW(1)])


def prefetch_elements(builder: Any, address: Any, offset: Any, number: int, dtype: str) -> None:
    """Prefetches elements of an array.

    Args:
        builder: of the function.
        address: integer, of an array.
        offset: of the first element, in elements.
        number: of elements.
        dtype: of the array: "float32", "bfloat16" or "int8".
    """
    begin = _element_address(builder, address, offset, dtype)
    for line in range(0, number * ITEMSIZE[dtype], CACHE_LINE):
        prefetch(builder, builder.add(begin, WORD(line)))


def sum_lanes(builder: Any, value: Any) -> Any:
    """The sum of the lanes, added in halves: the compiler has no choice of the order."""
    for step in (8, 4, 2, 1):
        swapped = ir.Constant(ir.VectorType(NARROW, LANES), [i ^ step for i in range(LANES)])
        value = builder.fadd(value, builder.shuffle_vector(value, value, swapped))
    return builder.extract_element(value, NARROW(0))


def broadcast_four(builder: Any, address: Any, offset: Any) -> Any:
    """A vector that repeats the four floats at an address.

    Args:
        builder: of the function.
        address: integer.
        offset: in floats.
    """
    return permute(builder, [load(builder, address, offset, FOUR)], [i % 4 for i in range(LANES)])


def permute(builder: Any, values: Sequence[Any], lanes: Sequence[int]) -> Any:
    """Chosen lanes of one or two vectors.

    Args:
        builder: of the function.
        values: the vectors.
        lanes: numbers of lanes; those of the second vector follow those of the first.
    """
    mask = ir.Constant(ir.VectorType(NARROW, len(lanes)), list(lanes))
    return builder.shuffle_vector(values[0], values[-1], mask)


def transpose_fours(builder: Any, values: Sequence[Any]) -> list[Any]:
    """Transposes four vectors as a matrix of fours: lanes 4 k … 4 k + 3 of vector m come from vector k."""

    def fours(x, y, *numbers):
        return permute(builder, [x, y], [4 * number + i for number in numbers for i in range(4)])

    a, b, c, d = values
    low, high = [(fours(x, y, 0, 1, 4, 5), fours(x, y, 2, 3, 6, 7)) for x, y in ((a, b), (c, d))]
    return [
        fours(low[half], high[half], *numbers) for half in (0, 1) for numbers in ((0, 2, 4, 6), (1, 3, 5, 7))
    ]


def sum_lanes_of_fours(builder: Any, values: Sequence[Any]) -> Any:
    """The sums of the fours of four vectors: lane 4 k + v is lanes 4 k … 4 k + 3 of vector v, by halves."""

    def add(x, y, *orders):
        """The sum of two permutations of the lanes of x and y, the same in each of their fours."""
        return builder.fadd(
            *(
                permute(builder, [x, y], [4 * k + i for k in range(LANES // 4) for i in lanes])
                for lanes in orders
            )
        )

    a, b, c, d = values
    other = LANES  # the first lane of the second vector
    x, y = (add(*v, (0, other, 1, other + 1), (2, other + 2, 3, other + 3)) for v in ((a, b), (c, d)))
    return add(x, y, (0, 1, other, other + 1), (2, 3, other + 2, other + 3))


def constant(value: float) -> Any:
    """A vector of one value."""
    return ir.Constant(VECTOR, [float(value)] * LANES)


def larger(builder: Any, x: Any, y: Any) -> Any:
    """The larger of each pair of lanes; y where x or y is NaN.

    Args:
        builder: of the function.
        x: vector.
        y: vector.
    """
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def largest_lane(builder: Any, value: Any) -> Any:
    """The largest lane of a vector without NaN."""
    for step in (8, 4, 2, 1):
        value = larger(builder, value, permute(builder, [value], [i ^ step for i in range(LANES)]))
    return builder.extract_element(value, NARROW(0))


def any_lane(builder: Any, condition: Any) -> Any:
    """Whether a condition holds in any lane."""
    bits = ir.IntType(LANES)
    return builder.icmp_unsigned("!=", builder.bitcast(condition, bits), bits(0))


def lanes_between(builder: Any, offset: Any, begin: Any, end: Any) -> Any:
    """Which elements of a vector, the first of which has the number `offset`, are between two numbers.

    Args:
        builder: of the function.
        offset: integer.
        begin: the first number that counts.
        end: behind the last number that counts.
    """

    def spread(value):
        return splat(builder, builder.trunc(builder.sub(value, offset), NARROW))

    after_begin = builder.icmp_signed(">=", LANE_NUMBERS, spread(begin))
    return builder.and_(after_begin, builder.icmp_signed("<", LANE_NUMBERS, spread(end)))


def exponential(builder: Any, x: Any) -> Any:
    """The exponential of a vector of numbers up to 80, at least 2^`LOWEST_EXPONENT`; NaN of NaN."""
    x = larger(builder, constant(LOWEST_EXPONENT * np.log(2)), x)
    # eˣ = 2ⁿ · 2ᶠ. Adding 1.5 · 2²³ + 127 rounds to an integer, whose low bits are the exponent of 2ⁿ.
    bias = constant(1.5 * 2**23 + 127)
    biased = multiply_add(builder, x, constant(np.log2(np.e)), bias)
    negative_n = builder.fsub(bias, biased)
    fraction = multiply_add(builder, x, constant(np.log2(np.e)), negative_n)
    value = constant(POWER_OF_TWO[-1])
    for coefficient in POWER_OF_TWO[-2::-1]:
        value = multiply_add(builder, value, fraction, constant(coefficient))
    bits = builder.shl(builder.bitcast(biased, INTEGERS), integers(23))
    return builder.fmul(value, builder.bitcast(bits, VECTOR))


def integers(value: int) -> Any:
    """A vector of one integer of 32 bits."""
    return ir.Constant(INTEGERS, [value] * LANES)


def splat(builder: Any, value: Any) -> Any:
    """A vector with an integer of 32 bits in every lane."""
    first_lane = builder.insert_element(ir.Constant(INTEGERS, ir.Undefined), value, NARROW(0))
    return permute(builder, [first_lane], [0] * LANES)


def rotate_left(builder: Any, value: Any, bits: int) -> Any:
    """A vector of integers of 32 bits, rotated to the left.

    Args:
        builder: of the function.
        value: the vector.
        bits: by how many.
    """
    rotate = _declared(builder, f"llvm.fshl.v{LANES}i32", ir.FunctionType(INTEGERS, [INTEGERS] * 3))
    return builder.call(rotate, [value, value, integers(bits)])


def logarithm(builder: Any, x: Any) -> Any:
    """The natural logarithm of a vector of positive normal numbers."""
    # x = 2ⁿ (1 + f) with √½ ≤ 1 + f < √2.
    bits = builder.bitcast(x, INTEGERS)
    least = int(np.float32(np.sqrt(0.5)).view(np.int32))
    n = builder.ashr(builder.sub(bits, integers(least)), integers(23))
    mantissa = builder.bitcast(builder.sub(bits, builder.shl(n, integers(23))), VECTOR)
    f = builder.fsub(mantissa, constant(1.0))
    value = constant(LOGARITHM[-1])
    for coefficient in LOGARITHM[-2::-1]:
        value = multiply_add(builder, value, f, constant(coefficient))
    square = builder.fmul(f, f)
    value = builder.fmul(builder.fmul(value, f), square)
    value = multiply_add(builder, square, constant(-0.5), value)
    exponent = builder.sitofp(n, VECTOR)
    # ln 2 in two parts, the first of which is exact times any exponent.
    value = multiply_add(builder, exponent, constant(np.log(2) - 0.693359375), value)
    return multiply_add(builder, exponent, constant(0.693359375), builder.fadd(f, value))
