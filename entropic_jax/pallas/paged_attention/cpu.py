"""Paged attention for decoding on a CPU (split-KV): every listed page is read once, in place.

The page list of a (row, KV head) is split into pieces of `PIECE` positions. Whichever thread is free takes
the next piece and keeps an online softmax over it; the partial results are merged at the end, in the order of
the pieces. The pieces depend on the row alone, so neither its neighbours nor the number of threads changes a
bit of its result.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...cpu_runtime import check_supported
from ...cpu_runtime.custom_call import register
from ...cpu_runtime.run_once import run_once
from .quantised import Quantised
from .reference import PartialAttention

PIECE = 1024  # positions of one chunk of work
LOW = np.float32(-1e30)


class Shape(NamedTuple):
    """The static parameters of the kernel."""

    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    dense: bool  # whether all pages are read, not those of a list
    dtype: str  # of the pages

    @property
    def pages_per_piece(self) -> int:
        return max(1, PIECE // self.page_size)


def pool_dtype(keys, values) -> str:
    """The name of the dtype of two page pools. Raises NotImplementedError if it is not supported."""
    dtypes = {jnp.dtype(pool.dtype).name for pool in (keys, values)}
    if len(dtypes) > 1 or not dtypes <= {"float32", "bfloat16", "int8"}:
        supported = "only float32, bfloat16 and int8 are supported"
        raise NotImplementedError(f"pages of {' and '.join(sorted(dtypes))}: {supported}")
    return dtypes.pop()


def decode(
    q, keys, values, page_table, page_list, num_pages, window_start, context_length
) -> PartialAttention:
    """Float32 queries, head_dim a multiple of 16, pages of float32, bfloat16 or int8.

    The contract is in the package's docstring.
    """
    check_supported(q.dtype)
    dtype = pool_dtype(keys, values)
    rows, kv_heads, group, head_dim = q.shape
    if head_dim % 16:
        raise NotImplementedError(f"head_dim {head_dim}: only multiples of 16 are supported")
    name = _register_decode(Shape(kv_heads, group, head_dim, keys.shape[2], page_list is None, dtype))
    scales = ()
    if isinstance(keys, Quantised):
        keys, values, scales = keys.tiles, values.tiles, (keys.scale, values.scale)
    lists = () if page_list is None else (page_list, num_pages)
    shapes = (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], q.dtype))
    call = jax.ffi.ffi_call(name, shapes, vmap_method="sequential")
    operands = (q, keys, values, page_table, window_start, context_length, *lists, *scales)
    return PartialAttention(*call(*operands))


@run_once
def _register_decode(shape: Shape) -> str:
    """Register `decode` for one shape with XLA; returns its name there."""
    name = f"entropic_paged_decode_{shape.kv_heads}_{shape.group}_{shape.head_dim}_{shape.page_size}"
    name += f"_{shape.dtype}_{'dense' if shape.dense else 'listed'}"
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
        """The first entry of the page list to read, how many there are, and the window."""
        first_data, grid = operand(frame, 4)
        last_data, _ = operand(frame, 5)
        rows = grid[0]
        window_start = integers(first_data, (rows,))[row]
        context_length = integers(last_data, (rows,))[row]
        if context_length <= window_start:
            return 0, 0, window_start, context_length
        first_entry = window_start // page_size
        if dense:
            num_pages = (context_length + page_size - 1) // page_size - first_entry
            return first_entry, num_pages, window_start, context_length
        count_data, _ = operand(frame, 7)
        return 0, integers(count_data, (rows, kv_heads))[row, head], window_start, context_length

    @compiled
    def page_of_entry(frame, row, head, first_entry, entry):
        """The page of the row that an entry of its list stands for."""
        if dense:
            return first_entry + entry
        data, grid = operand(frame, 6)
        return np.int64(integers(data, (grid[0], kv_heads, grid[2]))[row, head, entry])

    return page_range, page_of_entry


def _piece_attention(shape: Shape, page_range: Any, page_of_entry: Any) -> Any:
    """Compile the task of a thread: the partial attention to one piece of the list of one (row, KV head)."""
    from ...cpu_runtime import vector
    from ...cpu_runtime.kernel import allocate, compiled, floats, free, integers, operand, words

    kv_heads, group, head_dim, page_size, dense, dtype = shape
    scores, accumulate = vector.scores(group, head_dim, dtype), vector.accumulate(group, head_dim, dtype)
    exponentials, pages_per_piece, scaled = vector.exponentials(), shape.pages_per_piece, dtype == "int8"
    tile = page_size * head_dim * vector.ITEMSIZE[dtype]  # bytes
    scale_operand = 6 if dense else 8  # the number of the operand that holds the scales of keys

    @compiled
    def attend_piece(job_address, piece_number):
        job = words(job_address, 6)
        frame, out_data, top_data = job[0], job[1], job[2]
        total_data, list_data, first_piece_data = job[3], job[4], job[5]
        list_number = words(list_data + 8 * piece_number, 1)[0]
        row, head = list_number // kv_heads, list_number % kv_heads
        piece_of_list = piece_number - words(first_piece_data + 8 * list_number, 1)[0]
        first_entry, num_pages, window_start, context_length = page_range(frame, row, head)
        q_data, _ = operand(frame, 0)
        key_data, _ = operand(frame, 1)
        value_data, _ = operand(frame, 2)
        table_data, grid = operand(frame, 3)
        page_table = integers(table_data, (grid[0], grid[1]))[row]
        query = q_data + 4 * (row * kv_heads + head) * group * head_dim
        out = out_data + 4 * piece_number * group * head_dim
        sums = floats(out, (group, head_dim))
        sums[:] = np.float32(0)
        top = floats(top_data, (piece_number + 1, group))[piece_number]
        total = floats(total_data, (piece_number + 1, group))[piece_number]
        top[:], total[:] = LOW, np.float32(0)
        key_scale, value_scale = np.int64(0), np.int64(0)
        if scaled:
            key_scale, value_scale = operand(frame, scale_operand)[0], operand(frame, scale_operand + 1)[0]
        memory = allocate(4 * (group + 1) * page_size)
        score, power = (
            floats(memory, (group, page_size)),
            integers(memory + 4 * group * page_size, (page_size,)),
        )
        begin, end = piece_of_list * pages_per_piece, min(num_pages, (piece_of_list + 1) * pages_per_piece)
        next_page = np.int64(page_table[page_of_entry(frame, row, head, first_entry, begin)])
        for entry in range(begin, end):
            page_of_row, page = page_of_entry(frame, row, head, first_entry, entry), next_page
            if entry + 1 < end:
                next_page = np.int64(page_table[page_of_entry(frame, row, head, first_entry, entry + 1)])
            low = max(window_start - page_of_row * page_size, 0)
            high = min(context_length - page_of_row * page_size, page_size)
            if high <= low:
                continue
            offset, next_offset = (page * kv_heads + head) * tile, (next_page * kv_heads + head) * tile
            scores(key_data + offset, query, memory, page_size, low, high, key_data + next_offset)
            scale = 4 * (page * kv_heads + head) * page_size
            for g in range(group):
                weight = score[g, low:high]
                if scaled:
                    weight *= floats(key_scale + scale, (page_size,))[low:high]
                peak = top[g]
                for t in range(high - low):
                    peak = max(peak, weight[t])
                shrink = np.exp(top[g] - peak)
                total[g] = total[g] * shrink + exponentials(weight, peak, power)
                top[g] = peak
                if shrink != np.float32(1):
                    for d in range(head_dim):
                        sums[g, d] *= shrink
                if scaled:
                    weight *= floats(value_scale + scale, (page_size,))[low:high]
            accumulate(memory, value_data + offset, out, page_size, low, high, value_data + next_offset)
        free(memory)

    return attend_piece


def _attention_by_pieces(shape: Shape, page_range: Any, piece_address: Any) -> Any:
    """Compile the body of the kernel: it numbers the pieces, runs their tasks, and merges the results."""
    from ...cpu_runtime.kernel import allocate, compiled, floats, free, operand, parallel_for, result, words

    kv_heads, group, head_dim = shape.kv_heads, shape.group, shape.head_dim
    pages_per_piece = shape.pages_per_piece

    @compiled
    def body(frame):
        _, grid = operand(frame, 0)
        rows = grid[0]
        count_data = allocate(8 * (rows * kv_heads + 1))
        first_piece = words(count_data, rows * kv_heads + 1)
        first_piece[0] = 0
        for list_number in range(rows * kv_heads):
            _, num_pages, _, _ = page_range(frame, list_number // kv_heads, list_number % kv_heads)
            number = (num_pages + pages_per_piece - 1) // pages_per_piece
            first_piece[list_number + 1] = first_piece[list_number] + number
        pieces = first_piece[rows * kv_heads]
        # Scratch buffers: for each piece its output, maximum and total of the softmax, and its list; then
        # the job that the pieces share.
        sums_data = allocate(pieces * (8 + 4 * group * (head_dim + 2)) + 6 * 8)
        top_data = sums_data + 4 * pieces * group * head_dim
        total_data = top_data + 4 * pieces * group
        list_data = total_data + 4 * pieces * group
        job_data = list_data + 8 * pieces
        out = floats(sums_data, (pieces, group, head_dim))
        top, total = floats(top_data, (pieces, group)), floats(total_data, (pieces, group))
        list_numbers = words(list_data, pieces)
        for list_number in range(rows * kv_heads):
            for piece_number in range(first_piece[list_number], first_piece[list_number + 1]):
                list_numbers[piece_number] = list_number
        job = words(job_data, 6)
        job[0], job[1], job[2] = frame, sums_data, top_data
        job[3], job[4], job[5] = total_data, list_data, count_data
        parallel_for(piece_address(), job_data, pieces)
        final_data, _ = result(frame, 0)
        log_data, _ = result(frame, 1)
        final = floats(final_data, (rows * kv_heads, group, head_dim))
        log_sum_exp = floats(log_data, (rows * kv_heads, group))
        for list_number in range(rows * kv_heads):
            for g in range(group):
                peak = LOW
                for p in range(first_piece[list_number], first_piece[list_number + 1]):
                    peak = max(peak, top[p, g])
                mass = np.float32(0)
                for p in range(first_piece[list_number], first_piece[list_number + 1]):
                    mass += total[p, g] * np.exp(top[p, g] - peak)
                for d in range(head_dim):
                    final[list_number, g, d] = np.float32(0)
                log_sum_exp[list_number, g] = -np.inf
                if mass != 0:  # true for NaN, which must reach the result
                    log_sum_exp[list_number, g] = peak + np.log(mass)
                    for p in range(first_piece[list_number], first_piece[list_number + 1]):
                        scale = np.exp(top[p, g] - peak) / mass
                        for d in range(head_dim):
                            final[list_number, g, d] += out[p, g, d] * scale
        free(sums_data)
        free(count_data)

    return body
