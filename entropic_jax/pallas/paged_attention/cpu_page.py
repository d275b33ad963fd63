"""Paged attention on a CPU: the attention of queries to one page, and the precision of its operands."""

from typing import Any, Literal, NamedTuple

import numpy as np

from ...cpu_runtime.matrix_units import matrix_units_missing, pairs_missing

PIECE = 1024  # positions of one chunk of work
LOW = np.float32(-1e30)  # the subtrahend of a softmax before the first page
Operands = Literal["float32", "pairs", "tiles"]


class Shape(NamedTuple):
    """The static parameters of the kernel."""

    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    dense: bool  # whether all pages are read, not those of a list
    dtype: str  # of the pages
    operands: Operands  # see `operands_of`

    @property
    def pages_per_piece(self) -> int:
        return max(1, PIECE // self.page_size)

    @property
    def rounded(self) -> bool:
        return self.operands != "float32"


class PageAttention(NamedTuple):
    """Functions compiled by Numba: the attention of n queries of a (row, KV head) to the pages of a piece.

    A query has a vector for each head of its group: there are n · group query heads. `scratch` is memory of
    `scratch_bytes(n)` that begins on a cache line, and `sums` the addresses of what a piece results in:
    weighted sums `[query heads, head_dim]`, and subtrahends and masses of the softmax `[query heads]`.
    """

    scratch_bytes: Any  # `scratch_bytes(n)`
    begin: Any  # `begin(query, n, scratch, sums)`, before the first page; query is float32
    # `attend(query, n, scratch, sums, page, scales, bounds)`: to the positions low[i] … high[i] of a page,
    # where query i sees any. `page` has the addresses of its keys and values, and those of the next page,
    # `scales` those of its keys and values, 0 without any, and `bounds` low and high, int64 `[n]`
    attend: Any
    end: Any  # `end(n, scratch, sums)`, after the last page


def operands_of(dtype: str, head_dim: int, page_size: int) -> Operands:
    """The operands of the kernel: "float32", or "pairs" or "tiles" of numbers rounded to bfloat16.

    Queries, and weights of values, are rounded with pages of bfloat16 where the processor multiplies pairs of
    its numbers (AVX512-BF16), which takes half of the time, or tiles of them (AMX), which takes less. Sums,
    and the softmax, are float32.

    Args:
        dtype: of the pages.
        head_dim: a multiple of 16.
        page_size: positions of a page.
    """
    if dtype != "bfloat16" or head_dim % 32:
        return "float32"
    if page_size % 32 == 0 and matrix_units_missing() is None:
        return "tiles"
    return "pairs" if page_size % 2 == 0 and pairs_missing() is None else "float32"


def page_attention(shape: Shape) -> PageAttention:
    """Compile the attention of all queries of a (row, KV head) to one page after the other, in vectors."""
    from ...cpu_runtime import attention, attention_scores, matmul
    from ...cpu_runtime.instructions import LANES
    from ...cpu_runtime.kernel import compiled, floats

    group, head_dim, page_size, dtype = shape.group, shape.head_dim, shape.page_size, shape.dtype
    scaled, stride, block_bytes = dtype == "int8", attention_scores.padded(page_size), 4 * LANES * head_dim
    rounded = shape.rounded
    sizes = group, head_dim, page_size, dtype, matmul.has_wide_registers(), rounded
    query_size = 2 if rounded else 4  # bytes of an element
    query_bytes = 2 * head_dim if rounded else 0  # of a rounded query head
    scores, accumulate = attention_scores.scores(*sizes), attention.accumulate(*sizes)
    softmax = attention.softmax(page_size, head_dim, scaled, *sizes[4:])
    lane_bytes = 4 * LANES  # of the sums of weights of a query head, by lane
    scratch_bytes, begin_piece, end_piece = _ends(shape)

    @compiled
    def attend(query, n, scratch, sums, page, scales, bounds):
        out, top, _ = sums
        low, high = bounds
        key, value, next_key, next_value = page
        key_scale, value_scale = scales
        first, last, begin, end = n, 0, page_size, 0
        for i in range(n):
            if high[i] > low[i]:
                first, last = min(first, i), i + 1
                begin, end = min(begin, low[i]), max(end, high[i])
        if end == 0:
            return
        heads = n * group
        total, free = scratch, scratch + heads * (lane_bytes + query_bytes)
        if rounded:
            query = scratch + heads * lane_bytes
        if scaled and stride > page_size:  # vectors of scales must not reach behind the pool
            scale = floats(free, (2, stride))
            of_keys, of_values = floats(key_scale, (page_size,)), floats(value_scale, (page_size,))
            for t in range(page_size):
                scale[0, t], scale[1, t] = of_keys[t], of_values[t]
            key_scale, value_scale = free, free + 4 * stride
        block, weights = free + 8 * stride, free + 8 * stride + block_bytes
        before = query_size * first * group * head_dim
        scores(key, query + before, weights, block, (last - first) * group, begin, end, next_key)
        i = first
        while i < last:
            # Queries that see the same positions go together; none may touch a value that it does not see.
            number = 1
            while i + number < last and low[i + number] == low[i] and high[i + number] == high[i]:
                number += 1
            if high[i] > low[i]:
                start = weights + 4 * (i - first) * group * stride
                for g in range(number * group):
                    h = i * group + g
                    sum_of_head = out + 4 * h * head_dim
                    weight = start + 4 * g * stride
                    softmax(
                        weight,
                        top + 4 * h,
                        total + lane_bytes * h,
                        sum_of_head,
                        low[i],
                        high[i],
                        key_scale,
                        value_scale,
                    )
                sums_of_heads = out + 4 * i * group * head_dim
                accumulate(start, value, sums_of_heads, number * group, low[i], high[i], next_value)
            i += number

    return PageAttention(scratch_bytes, begin_piece, attend, end_piece)


def _ends(shape: Shape) -> tuple[Any, Any, Any]:
    """`PageAttention.scratch_bytes`, `begin` and `end` of attention in vectors.

    The scratch memory has sums by lane and rounded queries; scales, a block of keys and weights of a page.
    """
    from ...cpu_runtime import pairs
    from ...cpu_runtime.attention_scores import padded
    from ...cpu_runtime.instructions import LANES
    from ...cpu_runtime.kernel import compiled, floats

    group, head_dim, stride, rounded = shape.group, shape.head_dim, padded(shape.page_size), shape.rounded
    query_bytes, lane_bytes, block_bytes = 2 * head_dim if rounded else 0, 4 * LANES, 4 * LANES * head_dim
    round_query = pairs.store_rows()

    @compiled
    def scratch_bytes(n):
        heads = n * group
        return heads * (lane_bytes + query_bytes + 4 * stride) + 8 * stride + block_bytes

    @compiled
    def begin(query, n, scratch, sums):
        heads = n * group
        floats(sums[0], (heads * head_dim,))[:] = np.float32(0)
        floats(sums[1], (heads,))[:] = LOW
        floats(scratch, (heads, LANES))[:] = np.float32(0)
        if rounded:
            round_query(query, 0, heads, head_dim, scratch + heads * lane_bytes)

    @compiled
    def end(n, scratch, sums):
        heads = n * group
        total, masses = floats(scratch, (heads, LANES)), floats(sums[2], (heads,))
        for h in range(heads):
            mass = np.float32(0)
            for lane in range(LANES):
                mass += total[h, lane]
            masses[h] = mass

    return scratch_bytes, begin, end
