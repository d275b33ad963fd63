"""Paged attention on a CPU (split-KV): each page is read in place, once for up to `MAX_QUERIES` queries.

The page list of a (row, KV head) is split into pieces of `PIECE` positions. Whichever thread is free takes
the next piece and keeps an online softmax over it for each query; the partial results are merged at the end,
in the order of the pieces. Decoding, verification and prefill are one kernel. What it computes for a query,
and in which order, depends on that query and on its row's pages alone: neither the other queries of the row,
nor its neighbours, nor the number of threads changes a bit of the result.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...cpu_runtime import check_supported
from ...cpu_runtime.custom_call import register
from ...cpu_runtime.run_once import run_once
from .cpu_page import LOW, PageAttention, Shape, operands_of, page_attention
from .quantised import Quantised
from .reference import PartialAttention

MAX_QUERIES = 32  # of a row in `verify`


def pool_dtype(keys: Any, values: Any) -> str:
    """The name of the dtype of two page pools. Raises NotImplementedError if it is not supported."""
    dtypes = {jnp.dtype(pool.dtype).name for pool in (keys, values)}
    if len(dtypes) > 1 or not dtypes <= {"float32", "bfloat16", "int8"}:
        supported = "only float32, bfloat16 and int8 are supported"
        raise NotImplementedError(f"pages of {' and '.join(sorted(dtypes))}: {supported}")
    return dtypes.pop()


def decode(
    q: jax.Array,
    keys: Any,
    values: Any,
    page_table: jax.Array,
    page_list: jax.Array | None,
    num_pages: jax.Array | None,
    window_start: jax.Array,
    context_length: jax.Array,
    *,
    soft_cap: float | None = None,
) -> PartialAttention:
    """Float32 queries, head_dim a multiple of 16, pages of float32, bfloat16 or int8; see the package."""
    require_no_soft_cap(soft_cap)
    ends = (window_start[:, None], context_length[:, None])
    part = _attend(q[:, :, None], keys, values, page_table, page_list, num_pages, *ends)
    return PartialAttention(part.out[:, :, 0], part.log_sum_exp[:, :, 0])


def verify(
    q: jax.Array,
    keys: Any,
    values: Any,
    page_table: jax.Array,
    page_list: jax.Array | None,
    num_pages: jax.Array | None,
    window_start: jax.Array,
    query_start: jax.Array,
    context_length: jax.Array,
    *,
    soft_cap: float | None = None,
) -> jax.Array:
    """Attention of several queries a row; see the package for the contract."""
    require_no_soft_cap(soft_cap)
    n = q.shape[3]
    if n > MAX_QUERIES:
        raise NotImplementedError(f"{n} queries per row: at most {MAX_QUERIES} are supported")
    end = query_start[:, None] + jnp.arange(1, n + 1, dtype=jnp.int32)
    end = jnp.where(end <= context_length[:, None], end, 0)
    part = _attend(q.swapaxes(2, 3), keys, values, page_table, page_list, num_pages, window_start, end)
    return part.out.swapaxes(2, 3)


def require_no_soft_cap(soft_cap: float | None) -> None:
    """Raises NotImplementedError if scores are capped."""
    if soft_cap is not None:
        raise NotImplementedError(f"scores with a soft cap of {soft_cap} are not supported")


def _attend(q, keys, values, page_table, page_list, num_pages, first, end) -> PartialAttention:
    """Attention of queries to the positions from `first` to before `end`, as far as their page is listed.

    Args:
        q: `[rows, kv_heads, n, group, head_dim]`.
        keys, values, page_table, page_list, num_pages: as for `decode`.
        first, end: int32 `[rows, n]`.
    """
    check_supported(q.dtype)
    dtype = pool_dtype(keys, values)
    _, kv_heads, _, group, head_dim = q.shape
    if head_dim % 16:
        raise NotImplementedError(f"head_dim {head_dim}: only multiples of 16 are supported")
    operands = operands_of(dtype, head_dim, keys.shape[2])
    name = _register(Shape(kv_heads, group, head_dim, keys.shape[2], page_list is None, dtype, operands))
    scales = ()
    if isinstance(keys, Quantised):
        keys, values, scales = keys.tiles, values.tiles, (keys.scale, values.scale)
    lists = () if page_list is None else (page_list, num_pages)
    shapes = (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:4], q.dtype))
    call = jax.ffi.ffi_call(name, shapes, vmap_method="sequential")
    return PartialAttention(*call(q, keys, values, page_table, first, end, *lists, *scales))


@run_once
def _register(shape: Shape) -> str:
    """Register the kernel for one shape with XLA; returns its name there."""
    name = f"entropic_paged_attention_{shape.kv_heads}_{shape.group}_{shape.head_dim}_{shape.page_size}"
    name += f"_{shape.dtype}_{'dense' if shape.dense else 'listed'}"
    name += f"_{shape.operands}" if shape.rounded else ""
    register(name, lambda: _compile(name, shape))
    return name


def _compile(name: str, shape: Shape) -> Iterator[tuple[str, Any]]:
    from ...cpu_runtime import kernel

    page_range, page_of_entry = _page_readers(shape)
    yield f"{name}_piece", kernel.thread_task(_piece_attention(shape, page_range, page_of_entry))
    piece_address = kernel.symbol_address(f"{name}_piece")
    yield name, kernel.xla_handler(_attention_by_pieces(shape, page_range, piece_address))


def _page_readers(shape: Shape) -> tuple[Any, Any]:
    """Compile the functions that read which pages of a (row, KV head) are attended to."""
    from ...cpu_runtime.kernel import compiled, integers, operand

    kv_heads, page_size, dense = shape.kv_heads, shape.page_size, shape.dense

    @compiled
    def page_range(frame, row, head):
        """The first entry of the page list that a query of the row sees, and the one past the last."""
        first_data, grid = operand(frame, 4)
        rows, n = grid[0], grid[1]
        first = integers(first_data, (rows, n))[row]
        end = integers(operand(frame, 5)[0], (rows, n))[row]
        low, high = np.int64(1) << 31, np.int64(0)
        for i in range(n):
            if end[i] > first[i]:
                low, high = min(low, np.int64(first[i])), max(high, np.int64(end[i]))
        if high == 0:
            return 0, 0
        if dense:
            return low // page_size, (high + page_size - 1) // page_size
        return 0, np.int64(integers(operand(frame, 7)[0], (rows, kv_heads))[row, head])

    @compiled
    def page_of_entry(frame, row, head, entry):
        """The page of the row that an entry of its list stands for."""
        if dense:
            return entry
        data, grid = operand(frame, 6)
        return np.int64(integers(data, (grid[0], kv_heads, grid[2]))[row, head, entry])

    return page_range, page_of_entry


def _piece_readers(shape: Shape, page_range: Any, page_of_entry: Any) -> tuple[Any, Any]:
    """Compile the functions that read where a piece of the work lies."""
    from ...cpu_runtime.kernel import compiled, integers, operand, words

    kv_heads, pages_per_piece = shape.kv_heads, shape.pages_per_piece

    @compiled
    def place_of_piece(job, piece_number):
        """The row and the KV head of a piece, its first entry of the page list and the one past its last."""
        frame, list_data, first_piece_data = job[0], job[4], job[5]
        list_number = words(list_data + 8 * piece_number, 1)[0]
        row, head = list_number // kv_heads, list_number % kv_heads
        first_entry, end_entry = page_range(frame, row, head)
        # Pieces are counted from the start of the list, so that they are the same for every window.
        first_piece = words(first_piece_data + 8 * list_number, 1)[0]
        piece = piece_number - first_piece + first_entry // pages_per_piece
        begin, end = piece * pages_per_piece, (piece + 1) * pages_per_piece
        return row, head, max(first_entry, begin), min(end_entry, end)

    @compiled
    def tile_of_entry(frame, row, head, entry):
        """The number of the tile in the pool that an entry of a page list stands for."""
        table_data, grid = operand(frame, 3)
        page = integers(table_data, (grid[0], grid[1]))[row, page_of_entry(frame, row, head, entry)]
        return np.int64(page) * kv_heads + head

    return place_of_piece, tile_of_entry


def _piece_attention(shape: Shape, page_range: Any, page_of_entry: Any) -> Any:
    """Compile the task of a thread: the partial attention to one piece of the list of one (row, KV head)."""
    from ...cpu_runtime.instructions import CACHE_LINE, ITEMSIZE
    from ...cpu_runtime.kernel import allocate, compiled, free, integers, next_chunk, operand, words

    kv_heads, group, head_dim, page_size, dense, dtype, _ = shape
    scratch_bytes, begin_piece, attend, end_piece = _page_attention(shape)
    scaled = dtype == "int8"
    place_of_piece, tile_of_entry = _piece_readers(shape, page_range, page_of_entry)
    tile = page_size * head_dim * ITEMSIZE[dtype]  # bytes
    scale_operand = 6 if dense else 8  # the number of the operand that holds the scales of keys

    @compiled
    def attend_piece(job_address, piece_number):
        job = words(job_address, 7)
        frame, out_data, top_data, total_data = job[0], job[1], job[2], job[3]
        row, head, begin, end = place_of_piece(job, piece_number)
        rows, n = operand(frame, 4)[1][0], operand(frame, 4)[1][1]
        heads = n * group
        first = integers(operand(frame, 4)[0], (rows, n))[row]
        last = integers(operand(frame, 5)[0], (rows, n))[row]
        keys, values = operand(frame, 1)[0], operand(frame, 2)[0]
        query = operand(frame, 0)[0] + 4 * (row * kv_heads + head) * heads * head_dim
        before = 4 * piece_number * heads
        sums = out_data + before * head_dim, top_data + before, total_data + before
        key_scales, value_scales = np.int64(0), np.int64(0)
        if scaled:
            key_scales, value_scales = operand(frame, scale_operand)[0], operand(frame, scale_operand + 1)[0]
        size = (scratch_bytes(n) + 7) & -8
        memory = allocate(CACHE_LINE + size + 16 * n)
        scratch = (memory + CACHE_LINE - 1) & -CACHE_LINE
        low, high = words(scratch + size, n), words(scratch + size + 8 * n, n)
        begin_piece(query, n, scratch, sums)
        next_tile = tile_of_entry(frame, row, head, begin)
        for entry in range(begin, end):
            start, tile_number = page_of_entry(frame, row, head, entry) * page_size, next_tile
            if entry + 1 < end:
                next_tile = tile_of_entry(frame, row, head, entry + 1)
            else:
                next_piece = next_chunk(piece_number, job[6])
                if next_piece >= 0:
                    next_row, next_head, next_entry, _ = place_of_piece(job, next_piece)
                    next_tile = tile_of_entry(frame, next_row, next_head, next_entry)
            for i in range(n):
                low[i], high[i] = max(first[i] - start, 0), min(last[i] - start, page_size)
            at, next_at = tile_number * tile, next_tile * tile
            scale_at = 4 * tile_number * page_size
            attend(
                query,
                n,
                scratch,
                sums,
                (keys + at, values + at, keys + next_at, values + next_at),
                (key_scales + scale_at, value_scales + scale_at),
                (low, high),
            )
        end_piece(n, scratch, sums)
        free(memory)

    return attend_piece


def _page_attention(shape: Shape) -> PageAttention:
    """The functions that attend to the pages of a piece."""
    if shape.operands != "tiles":
        return page_attention(shape)
    from .cpu_page_tiles import page_attention_tiles

    return page_attention_tiles(shape)


def _attention_by_pieces(shape: Shape, page_range: Any, piece_address: Any) -> Any:
    """Compile the body of the kernel: it numbers the pieces, runs their tasks, and merges the results."""
    from ...cpu_runtime.instructions import CACHE_LINE
    from ...cpu_runtime.kernel import allocate, compiled, floats, free, operand, parallel_for, result, words

    kv_heads, group, head_dim = shape.kv_heads, shape.group, shape.head_dim
    pages_per_piece = shape.pages_per_piece

    @compiled
    def body(frame):
        _, grid = operand(frame, 4)
        rows, heads = grid[0], grid[1] * group
        count_data = allocate(8 * (rows * kv_heads + 1))
        first_piece = words(count_data, rows * kv_heads + 1)
        first_piece[0] = 0
        for list_number in range(rows * kv_heads):
            first, end = page_range(frame, list_number // kv_heads, list_number % kv_heads)
            number = (end + pages_per_piece - 1) // pages_per_piece - first // pages_per_piece
            first_piece[list_number + 1] = first_piece[list_number] + max(number, 0)
        pieces = first_piece[rows * kv_heads]
        # Scratch buffers: for each piece its outputs, maxima and totals of the softmax, and its list; then
        # the job that the pieces share.
        memory = allocate(CACHE_LINE + pieces * (8 + 4 * heads * (head_dim + 2)) + 7 * 8)
        sums_data = (memory + CACHE_LINE - 1) & -CACHE_LINE
        list_data = sums_data + 4 * pieces * heads * head_dim
        top_data = list_data + 8 * pieces
        total_data = top_data + 4 * pieces * heads
        job_data = total_data + 4 * pieces * heads
        out = floats(sums_data, (pieces, heads, head_dim))
        top, total = floats(top_data, (pieces, heads)), floats(total_data, (pieces, heads))
        list_numbers = words(list_data, pieces)
        for list_number in range(rows * kv_heads):
            for piece_number in range(first_piece[list_number], first_piece[list_number + 1]):
                list_numbers[piece_number] = list_number
        job = words(job_data, 7)
        job[0], job[1], job[2] = frame, sums_data, top_data
        job[3], job[4], job[5] = total_data, list_data, count_data
        job[6] = pieces
        parallel_for(piece_address(), job_data, pieces)
        final = floats(result(frame, 0)[0], (rows * kv_heads, heads, head_dim))
        log_sum_exp = floats(result(frame, 1)[0], (rows * kv_heads, heads))
        for list_number in range(rows * kv_heads):
            for h in range(heads):
                peak = LOW
                for p in range(first_piece[list_number], first_piece[list_number + 1]):
                    peak = max(peak, top[p, h])
                mass = np.float32(0)
                for p in range(first_piece[list_number], first_piece[list_number + 1]):
                    top[p, h] = np.exp(top[p, h] - peak)
                    mass += total[p, h] * top[p, h]
                for d in range(head_dim):
                    final[list_number, h, d] = np.float32(0)
                log_sum_exp[list_number, h] = -np.inf
                if mass != 0:  # true for NaN, which must reach the result
                    log_sum_exp[list_number, h] = peak + np.log(mass)
                    for p in range(first_piece[list_number], first_piece[list_number + 1]):
                        scale = top[p, h] / mass
                        for d in range(head_dim):
                            final[list_number, h, d] += out[p, h, d] * scale
        free(memory)
        free(count_data)

    return body
