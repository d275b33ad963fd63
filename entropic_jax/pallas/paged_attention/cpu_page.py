"""Paged attention on a CPU: the attention of queries to one page, and the precision of its operands."""

from typing import Any, NamedTuple

from ...cpu_runtime.matrix_units import pairs_missing

PIECE = 1024  # positions of one chunk of work


class Shape(NamedTuple):
    """The static parameters of the kernel."""

    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    dense: bool  # whether all pages are read, not those of a list
    dtype: str  # of the pages
    rounded: bool  # whether queries and weights are rounded to bfloat16; see `rounds_operands`

    @property
    def pages_per_piece(self) -> int:
        return max(1, PIECE // self.page_size)


def rounds_operands(dtype: str, head_dim: int, page_size: int) -> bool:
    """Whether queries, and weights of values, are rounded to bfloat16 before they are multiplied.

    It is so with pages of bfloat16 where the processor multiplies pairs of its numbers, which takes half of
    the time. Sums, and the softmax, are float32.

    Args:
        dtype: of the pages.
        head_dim: a multiple of 16.
        page_size: positions of a page.
    """
    return dtype == "bfloat16" and head_dim % 32 == 0 and page_size % 2 == 0 and pairs_missing() is None


def page_attention(shape: Shape) -> Any:
    """Compile the attention of all queries of a (row, KV head) to one page."""
    from ...cpu_runtime import attention, attention_scores, matmul
    from ...cpu_runtime.instructions import LANES
    from ...cpu_runtime.kernel import compiled, floats

    group, head_dim, page_size, dtype = shape.group, shape.head_dim, shape.page_size, shape.dtype
    scaled, stride, block_bytes = dtype == "int8", attention_scores.padded(page_size), 4 * LANES * head_dim
    sizes = group, head_dim, page_size, dtype, matmul.has_wide_registers(), shape.rounded
    query_size = 2 if shape.rounded else 4  # bytes of an element
    scores, accumulate = attention_scores.scores(*sizes), attention.accumulate(*sizes)
    softmax = attention.softmax(page_size, head_dim, scaled, *sizes[4:])

    @compiled
    def attend_page(query, key, value, next_key, next_value, key_scale, value_scale, state, bounds, scratch):
        """Positions low[i] … high[i] of the page, where query i sees any."""
        out, top, total = state
        low, high = bounds
        n = low.shape[0]
        first, last, begin, end = n, 0, page_size, 0
        for i in range(n):
            if high[i] > low[i]:
                first, last = min(first, i), i + 1
                begin, end = min(begin, low[i]), max(end, high[i])
        if end == 0:
            return
        if scaled and stride > page_size:  # vectors of scales must not reach behind the pool
            scale = floats(scratch, (2, stride))
            of_keys, of_values = floats(key_scale, (page_size,)), floats(value_scale, (page_size,))
            for t in range(page_size):
                scale[0, t], scale[1, t] = of_keys[t], of_values[t]
            key_scale, value_scale = scratch, scratch + 4 * stride
        block, weights = scratch + 8 * stride, scratch + 8 * stride + block_bytes
        heads = query_size * first * group * head_dim
        scores(key, query + heads, weights, block, (last - first) * group, begin, end, next_key)
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
                    sums = out + 4 * h * head_dim
                    weight = start + 4 * g * stride
                    softmax(
                        weight, top + 4 * h, total + 64 * h, sums, low[i], high[i], key_scale, value_scale
                    )
                sums = out + 4 * i * group * head_dim
                accumulate(start, value, sums, number * group, low[i], high[i], next_value)
            i += number

    return attend_page
