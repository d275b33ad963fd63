"""Paged attention on a CPU: the attention of queries to one page, on matrix units (AMX).

Tiles hold 16 query heads, whatever queries they belong to. Where queries see different positions of a page,
as in a prompt, weights of 0 stand for those that one does not see. 0 times NaN or infinity is NaN, so such a
page is attended to by one query at a time if it holds either. The heads of a single query, if they are few,
have a softmax each: 16 lanes would be empty for the most part.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from .cpu_page import LOW, PageAttention, Shape


class Places(NamedTuple):
    """Where the parts of the scratch memory lie: offsets of what all tiles share, and bytes for each tile."""

    values: int  # of a page, in pairs; behind the configuration of tiles before, and ours
    pairs: int  # of weights, before they are transposed
    scores: int  # float32 [positions, 16 heads]
    weights: int  # bfloat16 tiles, or scores and weights of few heads, float32 [16 heads, positions]
    tiles: int  # the first tile; behind the last one are the rounded queries
    queries: int  # bytes of a tile of query heads, and of its weighted sums; there is a copy of these
    out: int
    state: int  # bytes of the subtrahends and masses of a tile, and of the bounds of its heads
    bounds: int


def places_of(shape: Shape) -> Places:
    """The layout of scratch memory."""
    from ...cpu_runtime import matrix_tiles as tiles

    line = 4 * tiles.TILE  # bytes of a number for each head of a tile
    values = 2 * tiles.CONFIGURATION
    pairs = values + 2 * shape.page_size * shape.head_dim
    scores = pairs + tiles.TILE_BYTES
    weights = scores + shape.page_size * line
    return Places(
        values,
        pairs,
        scores,
        weights,
        tiles=weights + shape.page_size * line,
        queries=shape.head_dim // tiles.STEP * tiles.TILE_BYTES,
        out=line * shape.head_dim,
        state=(1 + tiles.TILE) * line,
        bounds=2 * line,
    )


def page_attention_tiles(shape: Shape) -> PageAttention:
    """Compile the attention of all queries of a (row, KV head) to one page after the other, in tiles."""
    from ...cpu_runtime import attention_layouts
    from ...cpu_runtime.kernel import EXACT, floats, njit

    group, head_dim, page_size = shape.group, shape.head_dim, shape.page_size
    scratch_bytes, parts = _scratch(shape)
    attend_tiles, attend_heads = _attention_of_tiles(shape), _attention_by_head(shape)
    are_apart = group <= attention_layouts.HEADS_APART

    @njit(**EXACT)
    def attend(query, n, scratch, sums, page, scales, bounds):
        low, high = bounds
        begin, end, alike = page_size, 0, True
        for i in range(n):
            alike = alike and low[i] == low[0] and high[i] == high[0]
            if high[i] > low[i]:
                begin, end = min(begin, low[i]), max(end, high[i])
        if end == 0:
            return
        if are_apart and n == 1:
            attend_heads(scratch, parts(n, scratch), page, begin, end)
            return
        if alike or not attention_layouts.has_nan_or_infinity(page[1], begin, end, head_dim):
            attend_tiles(0, n, n, scratch, parts(n, scratch), page, bounds)
            return
        _, out_at, copy_at, _, _ = parts(n, scratch)
        size = n * group * head_dim
        out, copy = floats(out_at, (size,)), floats(copy_at, (size,))
        for i in range(n):
            for k in range(size):
                copy[k] = out[k]
            attend_tiles(i, i + 1, n, scratch, parts(n, scratch), page, bounds)
            # What the weights of 0 of the other queries have made of their sums is dropped.
            first, last = i * group * head_dim, (i + 1) * group * head_dim
            for k in range(size):
                if k < first or k >= last:
                    out[k] = copy[k]

    return PageAttention(scratch_bytes, _beginning(shape, parts), attend, _ending(shape, parts))


def _tile_bytes(shape: Shape) -> int:
    """Bytes of scratch memory for each tile."""
    at = places_of(shape)
    return at.queries + 2 * at.out + at.state + at.bounds


def _scratch(shape: Shape) -> tuple[Any, Any]:
    """`PageAttention.scratch_bytes`, and `parts(n, scratch)`, the addresses of parts of all tiles.

    These are query heads, weighted sums, their copy, states and bounds.
    """
    from ...cpu_runtime import matrix_tiles as tiles
    from ...cpu_runtime.kernel import EXACT, njit

    group, head_dim, edge, at, tile_bytes = (
        shape.group,
        shape.head_dim,
        tiles.TILE,
        places_of(shape),
        _tile_bytes(shape),
    )
    first_tile, queries_bytes, out_bytes, state_bytes = at.tiles, at.queries, at.out, at.state

    @njit(**EXACT)
    def scratch_bytes(n):
        count = (n * group + edge - 1) // edge
        return first_tile + count * tile_bytes + 2 * n * group * head_dim

    @njit(**EXACT)
    def parts(n, scratch):
        count, queries = (n * group + edge - 1) // edge, scratch + first_tile
        out = queries + count * queries_bytes
        copy = out + count * out_bytes
        state = copy + count * out_bytes
        return queries, out, copy, state, state + count * state_bytes

    return scratch_bytes, parts


def _beginning(shape: Shape, parts: Any) -> Any:
    """`PageAttention.begin`; `parts` is that of `_scratch`."""
    from ...cpu_runtime import attention_layouts, pairs
    from ...cpu_runtime import matrix_tiles as tiles
    from ...cpu_runtime.kernel import EXACT, floats, njit

    group, head_dim, edge, tile_bytes = shape.group, shape.head_dim, tiles.TILE, _tile_bytes(shape)
    round_query, configure, first_tile = pairs.store_rows(), tiles.configure(), places_of(shape).tiles

    @njit(**EXACT)
    def begin(query, n, scratch, sums):
        tiles.store_configuration(scratch)
        configure(scratch + tiles.CONFIGURATION, edge)
        heads = n * group
        count = (heads + edge - 1) // edge
        queries, out, _, state, _ = parts(n, scratch)
        rounded = scratch + first_tile + count * tile_bytes
        round_query(query, 0, heads, head_dim, rounded)
        attention_layouts.lay_out_queries(rounded, heads, head_dim, queries)
        floats(out, (count * edge * head_dim,))[:] = np.float32(0)
        states = floats(state, (count, 1 + edge, edge))
        for tile in range(count):
            for lane in range(edge):
                states[tile, 0, lane] = LOW
                for number in range(edge):
                    states[tile, 1 + number, lane] = np.float32(0)

    return begin


def _ending(shape: Shape, parts: Any) -> Any:
    """`PageAttention.end`; `parts` is that of `_scratch`."""
    from ...cpu_runtime import attention_layouts
    from ...cpu_runtime import matrix_tiles as tiles
    from ...cpu_runtime.kernel import EXACT, floats, njit

    group, head_dim, edge = shape.group, shape.head_dim, tiles.TILE
    columns = np.array(attention_layouts.column_places(head_dim))
    are_apart = group <= attention_layouts.HEADS_APART

    @njit(**EXACT)
    def end(n, scratch, sums):
        heads = n * group
        _, out_at, _, state, _ = parts(n, scratch)
        states = floats(state, ((heads + edge - 1) // edge, 1 + edge, edge))
        result, out = floats(sums[0], (heads, head_dim)), floats(out_at, (heads, head_dim))
        top, masses = floats(sums[1], (heads,)), floats(sums[2], (heads,))
        by_head = are_apart and n == 1  # sums of weights, whose lanes are positions then, not heads
        for h in range(heads):
            for d in range(head_dim):
                result[h, d] = out[h, columns[d]]
            tile, lane = h // edge, h % edge
            mass = np.float32(0)
            for number in range(edge):
                mass += states[tile, 1 + lane, number] if by_head else states[tile, 1 + number, lane]
            top[h], masses[h] = states[tile, 0, lane], mass
        tiles.load_configuration(scratch)

    return end


def _attention_of_tiles(shape: Shape) -> Any:
    """`attend(first, last, n, scratch, parts, page, bounds)`: the queries from first to before last.

    `parts` are those of `page_attention_tiles`, `bounds` the positions that each of the n queries sees.
    """
    from ...cpu_runtime import attention_layouts, attention_tiles
    from ...cpu_runtime import matrix_tiles as tiles
    from ...cpu_runtime.kernel import EXACT, integers, njit

    group, head_dim, page_size = shape.group, shape.head_dim, shape.page_size
    edge, step, at = tiles.TILE, tiles.STEP, places_of(shape)
    scores, add_weighted = attention_tiles.scores(head_dim), attention_tiles.add_weighted(head_dim)
    softmax_ahead, softmax = (attention_tiles.softmax(head_dim, ahead) for ahead in (True, False))
    pair_rows = attention_layouts.pair_rows(head_dim)
    values_at, pairs_at, scores_at, weights_at = at.values, at.pairs, at.scores, at.weights
    query_bytes, out_bytes, state_bytes, bound_bytes = at.queries, at.out, at.state, at.bounds

    @njit(**EXACT)
    def attend_tile(tile, heads, scratch, parts, page):
        queries, out, _, state, bounds = parts
        key, _, next_key, next_value = page
        bound_at = bounds + tile * bound_bytes
        bound = integers(bound_at, (2, edge))
        begin, end, masked = page_size, 0, 0
        for lane in range(min(edge, heads - tile * edge)):
            if bound[1, lane] > bound[0, lane]:
                begin, end = min(begin, bound[0, lane]), max(end, bound[1, lane])
            masked |= bound[0, lane] > 0 or bound[1, lane] < page_size
        if end == 0:
            return
        first, last = begin & -step, (end + step - 1) & -step
        score, pairs, weights = scratch + scores_at, scratch + pairs_at, scratch + weights_at
        sums, state_at = out + tile * out_bytes, state + tile * state_bytes
        scores(key, queries + tile * query_bytes, first, last, score, next_key)
        if tile == 0:
            softmax_ahead(
                score, state_at, sums, bound_at, first, last, masked, pairs, weights, next_key, next_value
            )
        else:
            softmax(
                score, state_at, sums, bound_at, first, last, masked, pairs, weights, next_key, next_value
            )
        add_weighted(weights, scratch + values_at, first, last, sums)

    @njit(**EXACT)
    def attend(first, last, n, scratch, parts, page, bounds):
        low, high = bounds
        count = (n * group + edge - 1) // edge
        bound = integers(parts[4], (count, 2, edge))
        begin, end = page_size, 0
        for h in range(count * edge):
            i = h // group
            is_there = first <= i and i < last and high[i] > low[i]
            bound[h // edge, 0, h % edge] = low[i] if is_there else 0
            bound[h // edge, 1, h % edge] = high[i] if is_there else 0
            if is_there:
                begin, end = min(begin, low[i]), max(end, high[i])
        if end == 0:
            return
        begin_row, end_row = begin & -step, (end + step - 1) & -step
        pair_rows(page[1], begin_row, end_row, begin, end, scratch + values_at, page[3])
        for tile in range(count):
            attend_tile(tile, n * group, scratch, parts, page)

    return attend


@cache
def _attention_by_head(shape: Shape) -> Any:
    """`attend(scratch, parts, page, begin, end)`: a single query whose heads are few, and a part of a page.

    Weights of `attention.softmax` lie by head, which is how matrix units read them.
    """
    from ...cpu_runtime import attention, attention_layouts, attention_tiles
    from ...cpu_runtime import matrix_tiles as tiles
    from ...cpu_runtime.instructions import LANES
    from ...cpu_runtime.kernel import EXACT, array, njit

    group, head_dim, page_size = (
        min(shape.group, attention_layouts.HEADS_APART),
        shape.head_dim,
        shape.page_size,
    )
    edge, step, at = tiles.TILE, tiles.STEP, places_of(shape)
    scores, row_bytes = attention_tiles.scores(head_dim, True), 4 * page_size
    scores_by_head = attention_layouts.scores_by_head(group, head_dim, page_size)
    softmax = attention.softmax(page_size, head_dim, False, True, True)
    pair_rows = attention_layouts.pair_rows(head_dim, True)
    add_weighted = attention_tiles.add_weighted(head_dim, row_bytes)
    values_at, scores_at, weights_at = at.values, at.scores, at.weights

    @njit(**EXACT)
    def clear(weights, position):
        """Weights of 0 for 16 positions."""
        words = array(weights + 2 * position, (LANES // 4,), np.uint64)
        for k in range(LANES // 4):
            words[k] = np.uint64(0)

    @njit(**EXACT)
    def attend(scratch, parts, page, begin, end):
        queries, out, _, state, _ = parts
        key, value, next_key, next_value = page
        first, last = begin & -step, (end + step - 1) & -step
        score, weights = scratch + scores_at, scratch + weights_at
        scores(key, queries, first, last, score, next_key)
        scores_by_head(score, first, last, weights, next_key)
        for h in range(group):
            row = weights + h * row_bytes
            mass, sums = state + 4 * edge * (1 + h), out + 4 * h * head_dim
            softmax(row, state + 4 * h, mass, sums, begin, end, 0, 0)
            if begin - first >= LANES:
                clear(row, first)
            if last - end >= LANES:
                clear(row, last - LANES)
        pair_rows(value, first, last, begin, end, scratch + values_at, next_value)
        add_weighted(weights, scratch + values_at, first, last, out)

    return attend
