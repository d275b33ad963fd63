"""Vector kernels: the inner loops of attention and matrix products as hand-written LLVM vector code.

Vectors have 16 float32 lanes; LLVM splits them where registers are narrower. Addresses are integers and data
is contiguous. Data is float32 unless a `dtype` says otherwise: bfloat16 and int8 are widened as they are
read. The public functions return functions for Numba code, specialised for the given sizes.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
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


def float_pointer(builder: Any, address: Any, offset: Any, llvm_type: Any = VECTOR) -> Any:
    """A pointer to `llvm_type`, `offset` floats after an address."""
    if isinstance(offset, int):
        offset = WORD(offset)
    return builder.inttoptr(builder.add(address, builder.shl(offset, WORD(2))), llvm_type.as_pointer())


def load(builder: Any, address: Any, offset: Any, llvm_type: Any = VECTOR) -> Any:
    return builder.load(float_pointer(builder, address, offset, llvm_type), align=4)


def element_address(builder: Any, address: Any, offset: Any, dtype: str) -> Any:
    """The address of the element `offset` of an array of `dtype`."""
    return builder.add(address, builder.mul(offset, WORD(ITEMSIZE[dtype])))


def load_widened(builder: Any, address: Any, offset: Any, dtype: str) -> Any:
    """A vector of elements of `dtype`, widened to float32."""
    address = element_address(builder, address, offset, dtype)
    if dtype == "float32":
        return builder.load(builder.inttoptr(address, VECTOR.as_pointer()), align=4)
    words = ir.VectorType(NARROW, LANES)
    narrow = ir.VectorType(ir.IntType(8 * ITEMSIZE[dtype]), LANES)
    bits = builder.load(builder.inttoptr(address, narrow.as_pointer()), align=ITEMSIZE[dtype])
    if dtype == "int8":
        return builder.sitofp(builder.sext(bits, words), VECTOR)
    return builder.bitcast(builder.shl(builder.zext(bits, words), ir.Constant(words, [16] * LANES)), VECTOR)


def store(builder: Any, value: Any, address: Any, offset: Any) -> None:
    builder.store(value, float_pointer(builder, address, offset, value.type), align=4)


def broadcast(builder: Any, value: Any) -> Any:
    """A vector with a scalar in every lane."""
    first_lane = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, NARROW(0))
    mask = ir.Constant(ir.VectorType(NARROW, LANES), None)
    return builder.shuffle_vector(first_lane, ir.Constant(VECTOR, ir.Undefined), mask)


def multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
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
    """Prefetch `number` elements of an array of `dtype` from the element `offset` on."""
    begin = element_address(builder, address, offset, dtype)
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
    """Emit `for i in range(begin, end, step)`; `body(i, values)` returns the new carried values."""
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


@cache
def scores(group: int, head_dim: int, dtype: str) -> Any:
    """`scores(keys, query, out, stride, begin, end, next_tile)`: dot products of queries and keys.

        out[g, t] = query[g] · keys[t],   begin ≤ t < end

    Args:
        group, head_dim: query heads that share the KV head; a multiple of `LANES`.
        dtype: of the keys. The tile at the address `next_tile` is prefetched on the way.
    """
    parts = head_dim // LANES
    heads_at_once = max(1, min(group, 16 // parts))

    def emit(builder, values):
        keys, query, out, stride, begin, end, next_tile = values
        for first in range(0, group, heads_at_once):
            heads = range(first, min(group, first + heads_at_once))
            queries = {
                (g, j): load(builder, query, g * head_dim + j * LANES) for g in heads for j in range(parts)
            }

            def products(t):
                """The products of a key with each query head, as vectors whose lanes add up to the score."""
                offset = builder.mul(t, WORD(head_dim))
                part_offset = lambda j: builder.add(offset, WORD(j * LANES))
                key = [load_widened(builder, keys, part_offset(j), dtype) for j in range(parts)]
                if first == 0:
                    prefetch_elements(builder, next_tile, offset, head_dim, dtype)
                values = [builder.fmul(key[0], queries[g, 0]) for g in heads]
                for j in range(1, parts):
                    values = [
                        multiply_add(builder, key[j], queries[g, j], x)
                        for g, x in zip(heads, values, strict=True)
                    ]
                return values

            def four_keys(t, _):
                sums_of_keys = zip(
                    *(products(builder.add(t, WORD(i))) for i in range(KEYS_AT_ONCE)), strict=True
                )
                for g, values in zip(heads, sums_of_keys, strict=True):
                    target = builder.add(builder.mul(stride, WORD(g)), t)
                    store(builder, sum_lanes_of_four(builder, values), out, target)
                return []

            def single_key(t, _):
                for g, value in zip(heads, products(t), strict=True):
                    target = builder.add(builder.mul(stride, WORD(g)), t)
                    store(builder, sum_lanes(builder, value), out, target)
                return []

            span = builder.and_(builder.sub(end, begin), WORD(-KEYS_AT_ONCE))
            middle = builder.add(begin, span)
            loop(builder, begin, middle, KEYS_AT_ONCE, [], four_keys)
            loop(builder, middle, end, 1, [], single_key)

    return intrinsic_of(7, emit)


@cache
def accumulate(group: int, head_dim: int, dtype: str) -> Any:
    """`accumulate(weights, values, out, stride, begin, end, next_tile)`: out[g] += Σ weights[g, t] values[t].

    The arguments are those of `scores`; the values have the dtype.
    """
    parts = head_dim // LANES
    heads_at_once = max(1, min(group, 16 // parts))

    def emit(builder, values):
        weights, data, out, stride, begin, end, next_tile = values
        for first in range(0, group, heads_at_once):
            cells = [(g, j) for g in range(first, min(group, first + heads_at_once)) for j in range(parts)]
            start = [load(builder, out, g * head_dim + j * LANES) for g, j in cells]

            def row(t, sums):
                offset = builder.mul(t, WORD(head_dim))
                part_offset = lambda j: builder.add(offset, WORD(j * LANES))
                value = [load_widened(builder, data, part_offset(j), dtype) for j in range(parts)]
                if first == 0:
                    prefetch_elements(builder, next_tile, offset, head_dim, dtype)
                weight = {
                    g: broadcast(
                        builder, load(builder, weights, builder.add(builder.mul(stride, WORD(g)), t), FLOAT)
                    )
                    for g in {g for g, _ in cells}
                }
                return [
                    multiply_add(builder, value[j], weight[g], x)
                    for (g, j), x in zip(cells, sums, strict=True)
                ]

            for (g, j), x in zip(cells, loop(builder, begin, end, 1, start, row), strict=True):
                store(builder, x, out, g * head_dim + j * LANES)

    return intrinsic_of(7, emit)


@cache
def page_scores(group: int, head_dim: int, stride: int) -> Any:
    """`page_scores(low, high, sums, table, query, means, bounds, pages)`: scores from page summaries.

        means[g, b] = q_g · sums[p],   bounds[g, b] = q_g⁺ · high[p] + q_g⁻ · low[p],   p = table[b]

    Summaries of page p begin `stride · p` floats after their address; query holds q, q⁺ and q⁻, each
    `[group, head_dim]`, where q⁺ and q⁻ are its positive and negative parts; table is int32.
    """
    parts = head_dim // LANES
    heads_at_once = max(1, min(group, 8 // parts))
    ahead = WORD(4)  # pages

    def emit(builder, values):
        low, high, sums, table, query, means, bounds, pages = values
        last = builder.sub(pages, WORD(1))

        def start_of(b):
            address = builder.inttoptr(builder.add(table, builder.shl(b, WORD(2))), NARROW.as_pointer())
            return builder.mul(builder.sext(builder.load(address, align=4), WORD), WORD(stride))

        for first in range(0, group, heads_at_once):
            heads = range(first, min(group, first + heads_at_once))
            queries = {
                (part, g, j): load(builder, query, (part * group + g) * head_dim + j * LANES)
                for part in range(3)
                for g in heads
                for j in range(parts)
            }

            def row(b, _):
                offset = start_of(b)
                next_page = builder.add(b, ahead)
                next_page = builder.select(builder.icmp_signed("<", next_page, last), next_page, last)
                next_offset = start_of(next_page)
                value = {}
                for part, data in enumerate((sums, high, low)):
                    for j in range(parts):
                        value[part, j] = load(builder, data, builder.add(offset, WORD(j * LANES)))
                    if first == 0:
                        prefetch_elements(builder, data, next_offset, head_dim, "float32")
                for g in heads:
                    mean = builder.fmul(value[0, 0], queries[0, g, 0])
                    bound = builder.fmul(value[1, 0], queries[1, g, 0])
                    for j in range(1, parts):
                        mean = multiply_add(builder, value[0, j], queries[0, g, j], mean)
                        bound = multiply_add(builder, value[1, j], queries[1, g, j], bound)
                    for j in range(parts):
                        bound = multiply_add(builder, value[2, j], queries[2, g, j], bound)
                    target = builder.add(builder.mul(pages, WORD(g)), b)
                    store(builder, sum_lanes(builder, mean), means, target)
                    store(builder, sum_lanes(builder, bound), bounds, target)
                return []

            loop(builder, WORD(0), pages, 1, [], row)

    return intrinsic_of(8, emit)


@cache
def lane_maxima() -> Any:
    """`lane_maxima(x, out, vectors)`: out[lane] = max x[lane + LANES i] over i < vectors, ignoring NaN."""
    lowest = ir.Constant(VECTOR, [float(np.finfo(np.float32).min)] * LANES)

    def emit(builder, values):
        x, out, vectors = values

        def row(i, carried):
            value = load(builder, x, i)
            return [builder.select(builder.fcmp_ordered(">", value, carried[0]), value, carried[0])]

        count = builder.mul(vectors, WORD(LANES))
        store(builder, loop(builder, WORD(0), count, LANES, [lowest], row)[0], out, WORD(0))

    return intrinsic_of(3, emit)


@cache
def matmul_tile(rows: int, vectors: int, dtype: str) -> Any:
    """`matmul_tile(x, weight, out, inputs, columns)`: out[r, c] = Σ x[r, i] weight[i, c], i ascending.

    Args:
        rows: rows of x, each of `inputs` elements, and of out.
        vectors: columns of the tile, in vectors of `LANES`; a row of weight and of out has `columns`.
        dtype: of the weight.
    """
    ahead = WORD(16)  # rows of the weight
    width = vectors * LANES

    def emit(builder, values):
        x, weight, out, inputs, columns = values

        def row(i, sums):
            offset = builder.mul(i, columns)
            prefetch_elements(builder, weight, builder.mul(builder.add(i, ahead), columns), width, dtype)
            part_offset = lambda j: builder.add(offset, WORD(j * LANES))
            value = [load_widened(builder, weight, part_offset(j), dtype) for j in range(vectors)]
            after = []
            for r in range(rows):
                x_offset = builder.add(builder.mul(inputs, WORD(r)), i)
                factor = broadcast(builder, load(builder, x, x_offset, FLOAT))
                row_sums = sums[r * vectors : (r + 1) * vectors]
                after += [multiply_add(builder, v, factor, s) for v, s in zip(value, row_sums, strict=True)]
            return after

        zero = ir.Constant(VECTOR, [0.0] * LANES)
        sums = loop(builder, WORD(0), inputs, 1, [zero] * (rows * vectors), row)
        for number, value in enumerate(sums):
            r, j = divmod(number, vectors)
            store(builder, value, out, builder.add(builder.mul(columns, WORD(r)), WORD(j * LANES)))

    return intrinsic_of(5, emit)


@cache
def exponentials() -> Any:
    """`exponentials(x, peak, power)`: x[t] ← exp(x[t] − peak) in place, with int32 scratch; the sum."""
    from numba import njit

    lowest, log2_e, c0 = (np.float32(x) for x in (-126, 1.4426950408889634, 1))
    # Minimax coefficients of 2ᶠ on [0, 1): relative error 8e-8.
    c1, c2, c3, c4, c5 = (np.float32(x) for x in (0.69315131, 0.24016445, 0.05579991, 0.00901703, 0.00186713))

    @njit(fastmath={"reassoc", "contract", "nsz", "arcp"}, nogil=True, error_model="numpy")
    def exponentials(x, peak, power):
        # eˣ = 2ⁿ · 2ᶠ with a polynomial for 2ᶠ, since a call of exp would not vectorise. `power`: bits of 2ⁿ.
        scale = power.view(np.float32)
        for t in range(x.shape[0]):
            y = max((x[t] - peak) * log2_e, lowest)
            n = np.floor(y)
            f = y - n
            power[t] = (np.int32(n) + np.int32(127)) << np.int32(23)
            x[t] = ((((c5 * f + c4) * f + c3) * f + c2) * f + c1) * f + c0
        mass = np.float32(0)
        for t in range(x.shape[0]):
            x[t] *= scale[t]
            mass += x[t]
        return mass

    return exponentials
