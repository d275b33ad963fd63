"""Vector instructions: emit LLVM code for float32 vectors, as the kernels of `vector` use it.

Vectors have 16 float32 lanes; LLVM splits them where registers are narrower. Addresses are integers and data
is contiguous. Values are those of llvmlite; a `builder` emits code at its place in the function.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 16
FLOAT, WORD, NARROW = ir.FloatType(), ir.IntType(64), ir.IntType(32)
VECTOR = ir.VectorType(FLOAT, LANES)
ITEMSIZE = {"float32": 4, "bfloat16": 2, "int8": 1}  # bytes of an element, by dtype
CACHE_LINE = 64  # bytes
KEYS_AT_ONCE = 4  # keys whose scores are summed over the lanes together


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
    """The address of the element `offset` of an array of `dtype`."""
    return builder.add(address, builder.mul(offset, WORD(ITEMSIZE[dtype])))


def load_widened(builder: Any, address: Any, offset: Any, dtype: str) -> Any:
    """A vector of elements of `dtype`, widened to float32.

    Args:
        builder: of the function.
        address: integer, of an array.
        offset: of the first element, in elements.
        dtype: of the array: "float32", "bfloat16" or "int8".
    """
    address = _element_address(builder, address, offset, dtype)
    if dtype == "float32":
        return builder.load(builder.inttoptr(address, VECTOR.as_pointer()), align=4)
    words = ir.VectorType(NARROW, LANES)
    narrow = ir.VectorType(ir.IntType(8 * ITEMSIZE[dtype]), LANES)
    bits = builder.load(builder.inttoptr(address, narrow.as_pointer()), align=ITEMSIZE[dtype])
    if dtype == "int8":
        return builder.sitofp(builder.sext(bits, words), VECTOR)
    return builder.bitcast(builder.shl(builder.zext(bits, words), ir.Constant(words, [16] * LANES)), VECTOR)


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


def sum_lanes_of_four(builder: Any, values: Sequence[Any]) -> Any:
    """The lane sums of four vectors, as a vector of four; each is added in the order of `sum_lanes`."""

    def lanes(*first):
        numbers = [f + i for f in first for i in range(LANES // len(first))]
        return ir.Constant(ir.VectorType(NARROW, LANES), numbers)

    a, b, c, d = values

    def halves(x, y):
        low, high = (builder.shuffle_vector(x, y, lanes(i, LANES + i)) for i in (0, 8))
        return builder.fadd(low, high)

    x, y = halves(a, b), halves(c, d)
    parts = [builder.shuffle_vector(x, y, lanes(i, 8 + i, 16 + i, 24 + i)) for i in (0, 4)]
    four = builder.fadd(*parts)  # lanes 4 k … 4 k + 3 are of vector k
    for step in (2, 1):
        swapped = ir.Constant(ir.VectorType(NARROW, LANES), [i ^ step for i in range(LANES)])
        four = builder.fadd(four, builder.shuffle_vector(four, four, swapped))
    first_lanes = ir.Constant(ir.VectorType(NARROW, KEYS_AT_ONCE), [0, 4, 8, 12])
    return builder.shuffle_vector(four, four, first_lanes)


def loop(builder: Any, begin: Any, end: Any, step: int, carried: list[Any], body: Callable) -> list[Any]:
    """Emits `for index in range(begin, end, step)`; returns the carried values after the last turn.

    Args:
        builder: of the function; afterwards it is behind the loop.
        begin: integer, the first index.
        end: integer, behind the last index.
        step: of the index, above 0.
        carried: values before the first turn.
        body: `body(index, values)` emits a turn and returns the values after it.
    """
    before = builder.block
    head = builder.append_basic_block("head")
    inside = builder.append_basic_block("inside")
    after = builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(WORD)
    values = [builder.phi(v.type) for v in carried]
    index.add_incoming(begin, before)
    for phi, value in zip(values, carried, strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", index, end), inside, after)
    builder.position_at_end(inside)
    changed = body(index, values)
    index.add_incoming(builder.add(index, WORD(step)), builder.block)
    for phi, value in zip(values, changed, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values
