"""Vector kernels: inner loops of page selection and of gated products as hand-written LLVM vector code.

Data is float32 unless a `dtype` says otherwise: bfloat16 and int8 are widened as they are read. The public
functions return functions for Numba code, specialised for the given sizes.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from .control_flow import loop
from .instructions import (
    LANES,
    NARROW,
    VECTOR,
    WORD,
    constant,
    exponential,
    intrinsic_of,
    load,
    multiply_add,
    prefetch_elements,
    store,
    sum_lanes,
)


@cache
def page_scores(group: int, head_dim: int, stride: int) -> Any:
    """`page_scores(low, high, sums, table, query, means, bounds, pages)`: scores from page summaries.

        means[g, b] = q_g · sums[p],   bounds[g, b] = q_g⁺ · high[p] + q_g⁻ · low[p],   p = table[b]

    Summaries of page p begin `stride · p` floats after their address; query holds q, q⁺ and q⁻, each
    `[group, head_dim]`, where q⁺ and q⁻ are its positive and negative parts; table is int32.

    Args:
        group: query heads of a KV head.
        head_dim: a multiple of the vector's width.
        stride: floats from the summary of a page to that of the next.
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
def gated_products(largest: float) -> Any:
    """`gated_products(gate, up, out, number)`: out = gate / (1 + exp(−gate)) · up.

    Args:
        largest: −gate counts as no more in the exponential, so that it is finite.
    """
    most = constant(largest)

    def emit(builder, values):
        gate, up, out, number = values

        def vector(i, _):
            value = load(builder, gate, i)
            negative = builder.fsub(constant(-0.0), value)
            negative = builder.select(builder.fcmp_ordered(">", negative, most), most, negative)
            sigmoid = builder.fdiv(value, builder.fadd(constant(1.0), exponential(builder, negative)))
            store(builder, builder.fmul(sigmoid, load(builder, up, i)), out, i)
            return []

        loop(builder, WORD(0), number, LANES, [], vector)

    return intrinsic_of(4, emit)


@cache
def exponentials() -> Any:
    """`exponentials(x, peak, power)`: x[t] ← exp(x[t] − peak) in place, with int32 scratch; the sum."""
    from .numba_compiler import njit

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
