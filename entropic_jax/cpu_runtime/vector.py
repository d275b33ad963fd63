"""Inner loops as LLVM vector code: what a compiler does not find by itself.

Vectors have 16 float32 lanes; LLVM splits them where registers are narrower. Addresses are integers, data is
contiguous, and float32 where no *kind* says otherwise: bfloat16 and int8 are widened as they are read. Every
maker returns a function for Numba code, specialised for the sizes it is given.
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
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}  # of a number, by kind
LINE = 64  # bytes of the cache
TOGETHER = 4  # keys whose scores are summed up at once
ANY_ORDER = ("reassoc", "contract", "nsz")


def intrinsic_of(arguments: int, emit: Callable[[Any, list[Any]], None]) -> Any:
    """A function of `arguments` integers without a result: its code is what `emit(builder, values)` says."""
    names = "".join(f", a{i}" for i in range(arguments))

    def typed(context, *values):
        def generate(context, builder, signature, given):
            emit(builder, list(given))
            return context.get_dummy_value()

        return types.void(*(types.intp,) * arguments), generate

    # An intrinsic must name its arguments one by one.
    space = {"typed": typed}
    exec(f"def operation(context{names}): return typed(context{names})", space)
    return intrinsic(space["operation"])


def at(builder: Any, place: Any, offset: Any, kind: Any = VECTOR) -> Any:
    """A pointer to `kind`, `offset` floats after the address `place`."""
    if isinstance(offset, int):
        offset = WORD(offset)
    return builder.inttoptr(builder.add(place, builder.shl(offset, WORD(2))), kind.as_pointer())


def load(builder: Any, place: Any, offset: Any, kind: Any = VECTOR) -> Any:
    return builder.load(at(builder, place, offset, kind), align=4)


def numbers_at(builder: Any, place: Any, offset: Any, kind: str) -> Any:
    """The address `offset` numbers of a kind after the address `place`."""
    return builder.add(place, builder.mul(offset, WORD(BYTES[kind])))


def widened(builder: Any, place: Any, offset: Any, kind: str) -> Any:
    """A vector of numbers of a kind as float32."""
    address = numbers_at(builder, place, offset, kind)
    if kind == "float32":
        return builder.load(builder.inttoptr(address, VECTOR.as_pointer()), align=4)
    words = ir.VectorType(NARROW, LANES)
    narrow = ir.VectorType(ir.IntType(8 * BYTES[kind]), LANES)
    bits = builder.load(builder.inttoptr(address, narrow.as_pointer()), align=BYTES[kind])
    if kind == "int8":
        return builder.sitofp(builder.sext(bits, words), VECTOR)
    return builder.bitcast(builder.shl(builder.zext(bits, words), ir.Constant(words, [16] * LANES)), VECTOR)


def store(builder: Any, value: Any, place: Any, offset: Any) -> None:
    builder.store(value, at(builder, place, offset, value.type), align=4)


def spread(builder: Any, value: Any) -> Any:
    """A scalar in every lane."""
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, NARROW(0))
    mask = ir.Constant(ir.VectorType(NARROW, LANES), None)
    return builder.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), mask)


def multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return builder.call(_declared(builder, f"llvm.fma.v{LANES}f32", kind), [x, y, z])


def _declared(builder: Any, name: str, kind: Any) -> Any:
    return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)


def prefetch(builder: Any, place: Any) -> None:
    """Ask for the cache line at an address that is read soon, in the second-level cache.

    Asked for in the first, it would hold one of that cache's few line buffers until memory has answered.
    """
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, NARROW, NARROW, NARROW])
    function = _declared(builder, "llvm.prefetch.p0", kind)
    builder.call(function, [builder.inttoptr(place, byte), NARROW(0), NARROW(1), NARROW(1)])


def prefetch_numbers(builder: Any, place: Any, offset: Any, number: int, kind: str) -> None:
    """Ask for `number` numbers of a kind, `offset` numbers after an address."""
    begin = numbers_at(builder, place, offset, kind)
    for line in range(0, number * BYTES[kind], LINE):
        prefetch(builder, builder.add(begin, WORD(line)))


def total(builder: Any, value: Any) -> Any:
    """The sum of the lanes."""
    kind = ir.FunctionType(FLOAT, [FLOAT, VECTOR])
    function = _declared(builder, f"llvm.vector.reduce.fadd.v{LANES}f32", kind)
    return builder.call(function, [FLOAT(0), value], fastmath=ANY_ORDER)


def totals(builder: Any, values: Sequence[Any]) -> Any:
    """The sums of the lanes of four vectors, as a vector of four; each added up in the order of `total`."""
    lanes = lambda *first: ir.Constant(
        ir.VectorType(NARROW, LANES), [f + i for f in first for i in range(LANES // len(first))]
    )
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
    each = ir.Constant(ir.VectorType(NARROW, TOGETHER), [0, 4, 8, 12])
    return builder.shuffle_vector(four, four, each)


def loop(builder: Any, begin: Any, end: Any, step: int, carried: list[Any], body: Callable) -> list[Any]:
    """`for i in range(begin, end, step)`, where `body(i, values)` returns the carried values."""
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
def scores(group: int, head_dim: int, kind: str) -> Any:
    """`scores(keys, query, out, stride, begin, end, later)`: out[g, t] = query[g] · keys[t], begin ≤ t < end.

    Keys are of the kind. Rows at the address `later` are fetched into the cache on the way.
    """
    parts = head_dim // LANES
    at_once = max(1, min(group, 16 // parts))

    def emit(builder, values):
        keys, query, out, stride, begin, end, later = values
        for first in range(0, group, at_once):
            heads = range(first, min(group, first + at_once))
            held = {
                (g, j): load(builder, query, g * head_dim + j * LANES) for g in heads for j in range(parts)
            }

            def products(t):
                """Of a row with each head: the vectors whose lanes add up to a score."""
                place = builder.mul(t, WORD(head_dim))
                at_part = lambda j: builder.add(place, WORD(j * LANES))
                key = [widened(builder, keys, at_part(j), kind) for j in range(parts)]
                if first == 0:
                    prefetch_numbers(builder, later, place, head_dim, kind)
                values = [builder.fmul(key[0], held[g, 0]) for g in heads]
                for j in range(1, parts):
                    values = [
                        multiply_add(builder, key[j], held[g, j], x)
                        for g, x in zip(heads, values, strict=True)
                    ]
                return values

            def several(t, _):
                made = zip(*(products(builder.add(t, WORD(i))) for i in range(TOGETHER)), strict=True)
                for g, values in zip(heads, made, strict=True):
                    where = builder.add(builder.mul(stride, WORD(g)), t)
                    store(builder, totals(builder, values), out, where)
                return []

            def one(t, _):
                for g, value in zip(heads, products(t), strict=True):
                    where = builder.add(builder.mul(stride, WORD(g)), t)
                    store(builder, total(builder, value), out, where)
                return []

            span = builder.and_(builder.sub(end, begin), WORD(-TOGETHER))
            middle = builder.add(begin, span)
            loop(builder, begin, middle, TOGETHER, [], several)
            loop(builder, middle, end, 1, [], one)

    return intrinsic_of(7, emit)


@cache
def accumulate(group: int, head_dim: int, kind: str) -> Any:
    """`accumulate(weights, values, out, stride, begin, end, later)`: out[g] += Σ weights[g, t] values[t].

    Values are of the kind.
    """
    parts = head_dim // LANES
    at_once = max(1, min(group, 16 // parts))

    def emit(builder, values):
        weights, data, out, stride, begin, end, later = values
        for first in range(0, group, at_once):
            cells = [(g, j) for g in range(first, min(group, first + at_once)) for j in range(parts)]
            start = [load(builder, out, g * head_dim + j * LANES) for g, j in cells]

            def row(t, sums):
                place = builder.mul(t, WORD(head_dim))
                at_part = lambda j: builder.add(place, WORD(j * LANES))
                value = [widened(builder, data, at_part(j), kind) for j in range(parts)]
                if first == 0:
                    prefetch_numbers(builder, later, place, head_dim, kind)
                weight = {
                    g: spread(
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
    """`page_scores(low, high, sums, table, query, means, bounds, pages)`: what summaries say of each page.

        means[g, b] = q_g · sums[p],   bounds[g, b] = q_g⁺ · high[p] + q_g⁻ · low[p],   p = table[b]

    Summaries of page p begin `stride · p` floats after their address; query holds q, q⁺ and q⁻, each
    `[group, head_dim]`, its parts above and below 0; table is int32.
    """
    parts = head_dim // LANES
    at_once = max(1, min(group, 8 // parts))
    ahead = WORD(4)  # pages

    def emit(builder, values):
        low, high, sums, table, query, means, bounds, pages = values
        last = builder.sub(pages, WORD(1))

        def start_of(b):
            address = builder.inttoptr(builder.add(table, builder.shl(b, WORD(2))), NARROW.as_pointer())
            return builder.mul(builder.sext(builder.load(address, align=4), WORD), WORD(stride))

        for first in range(0, group, at_once):
            heads = range(first, min(group, first + at_once))
            held = {
                (kind, g, j): load(builder, query, (kind * group + g) * head_dim + j * LANES)
                for kind in range(3)
                for g in heads
                for j in range(parts)
            }

            def row(b, _):
                place = start_of(b)
                later = builder.add(b, ahead)
                later = start_of(builder.select(builder.icmp_signed("<", later, last), later, last))
                value = {}
                for kind, data in enumerate((sums, high, low)):
                    for j in range(parts):
                        value[kind, j] = load(builder, data, builder.add(place, WORD(j * LANES)))
                    if first == 0:
                        prefetch_numbers(builder, data, later, head_dim, "float32")
                for g in heads:
                    mean = builder.fmul(value[0, 0], held[0, g, 0])
                    bound = builder.fmul(value[1, 0], held[1, g, 0])
                    for j in range(1, parts):
                        mean = multiply_add(builder, value[0, j], held[0, g, j], mean)
                        bound = multiply_add(builder, value[1, j], held[1, g, j], bound)
                    for j in range(parts):
                        bound = multiply_add(builder, value[2, j], held[2, g, j], bound)
                    where = builder.add(builder.mul(pages, WORD(g)), b)
                    store(builder, total(builder, mean), means, where)
                    store(builder, total(builder, bound), bounds, where)
                return []

            loop(builder, WORD(0), pages, 1, [], row)

    return intrinsic_of(8, emit)


@cache
def peaks() -> Any:
    """`peaks(x, out, vectors)`: out[lane] = the largest x[lane + LANES i], i < vectors, NaN apart."""
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
def tile(rows: int, vectors: int, kind: str) -> Any:
    """`tile(x, weight, out, inputs, columns)`: out[r, c] = Σ x[r, i] weight[i, c], i ascending, 0 ≤ r < rows.

    c goes over `vectors` vectors; a row of x has `inputs` numbers, one of weight and out has `columns`. The
    weight is of the kind.
    """
    ahead = WORD(16)  # rows of the weight
    width = vectors * LANES

    def emit(builder, values):
        x, weight, out, inputs, columns = values

        def row(i, sums):
            place = builder.mul(i, columns)
            prefetch_numbers(builder, weight, builder.mul(builder.add(i, ahead), columns), width, kind)
            value = [
                widened(builder, weight, builder.add(place, WORD(j * LANES)), kind) for j in range(vectors)
            ]
            after = []
            for r in range(rows):
                where = builder.add(builder.mul(inputs, WORD(r)), i)
                factor = spread(builder, load(builder, x, where, FLOAT))
                mine = sums[r * vectors : (r + 1) * vectors]
                after += [multiply_add(builder, v, factor, s) for v, s in zip(value, mine, strict=True)]
            return after

        zero = ir.Constant(VECTOR, [0.0] * LANES)
        sums = loop(builder, WORD(0), inputs, 1, [zero] * (rows * vectors), row)
        for number, value in enumerate(sums):
            r, j = divmod(number, vectors)
            store(builder, value, out, builder.add(builder.mul(columns, WORD(r)), WORD(j * LANES)))

    return intrinsic_of(5, emit)


@cache
def exponentials() -> Any:
    """`exponentials(x, peak, power)`: x[t] ← exp(x[t] − peak) in place; the sum. `power`: int32 scratch."""
    from numba import njit

    lowest, log2_e, one = (np.float32(x) for x in (-126, 1.4426950408889634, 1))
    # Minimax coefficients of 2ᶠ on [0, 1): relative error 8e-8.
    c1, c2, c3, c4, c5 = (np.float32(x) for x in (0.69315131, 0.24016445, 0.05579991, 0.00901703, 0.00186713))

    @njit(fastmath={"reassoc", "contract", "nsz", "arcp"}, nogil=True, error_model="numpy")
    def exponentials(x, peak, power):
        # eˣ = 2ⁿ · 2ᶠ with a polynomial for 2ᶠ, as a call of exp would not vectorise; `power`: bits of 2ⁿ.
        scale = power.view(np.float32)
        for t in range(x.shape[0]):
            y = max((x[t] - peak) * log2_e, lowest)
            n = np.floor(y)
            f = y - n
            power[t] = (np.int32(n) + np.int32(127)) << np.int32(23)
            x[t] = ((((c5 * f + c4) * f + c3) * f + c2) * f + c1) * f + one
        mass = np.float32(0)
        for t in range(x.shape[0]):
            x[t] *= scale[t]
            mass += x[t]
        return mass

    return exponentials
