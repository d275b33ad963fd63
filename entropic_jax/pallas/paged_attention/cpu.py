"""Paged attention for decoding on a CPU (split-KV): every listed page is read once, in place.

The page list of a (row, KV head) is split into pieces of `PIECE` positions. Whichever thread is free takes
the next piece and keeps an online softmax over it; the partial results are merged at the end, in the order of
the pieces. The pieces depend on the row alone, so neither its neighbours nor the number of threads changes a
bit of its result.
"""

from collections.abc import Iterator
from typing import Any

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
    name = _register_decode(kv_heads, group, head_dim, keys.shape[2], page_list is None, dtype)
    scales = ()
    if isinstance(keys, Quantised):
        keys, values, scales = keys.tiles, values.tiles, (keys.scale, values.scale)
    lists = () if page_list is None else (page_list, num_pages)
    shapes = (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], q.dtype))
    call = jax.ffi.ffi_call(name, shapes, vmap_method="sequential")
    operands = (q, keys, values, page_table, window_start, context_length, *lists, *scales)
    return PartialAttention(*call(*operands))


@run_once
def _register_decode(
    kv_heads: int, group: int, head_dim: int, page_size: int, dense: bool, dtype: str
) -> str:
    """Register `decode` for one shape with XLA; returns its name there."""
    name = f"entropic_paged_decode_{kv_heads}_{group}_{head_dim}_{page_size}_{dtype}"
    name += "_dense" if dense else "_listed"
    register(name, lambda: _compile(name, kv_heads, group, head_dim, page_size, dense, dtype))
    return name


def _compile(
    name: str, kv_heads: int, group: int, head_dim: int, page_size: int, dense: bool, dtype: str
) -> Iterator[tuple[str, Any]]:
    from numba import carray, njit

    from ...cpu_runtime import vector
    from ...cpu_runtime.call_frame import (
        allocate,
        as_pointer,
        floats,
        free,
        operand,
        result,
        symbol_address,
        thread_task,
        words,
        xla_handler,
    )
    from ...cpu_runtime.thread_pool import parallel_for

    scores, accumulate = vector.scores(group, head_dim, dtype), vector.accumulate(group, head_dim, dtype)
    exponentials = vector.exponentials()
    pages_per_piece = max(1, PIECE // page_size)
    tile = page_size * head_dim * vector.ITEMSIZE[dtype]  # bytes
    scaled = dtype == "int8"
    scale_operand = 6 if dense else 8  # the number of the operand that holds the scales of keys

    @njit(nogil=True)
    def pages(frame, row, head):
        """The first entry of the page list to read, how many there are, and the window."""
        first_data, shape = operand(frame, 4)
        last_data, _ = operand(frame, 5)
        rows = shape[0]
        window_start = carray(as_pointer(first_data), (rows,), np.int32)[row]
        context_length = carray(as_pointer(last_data), (rows,), np.int32)[row]
        if context_length <= window_start:
            return 0, 0, window_start, context_length
        first_entry = window_start // page_size
        if dense:
            return (
                first_entry,
                (context_length + page_size - 1) // page_size - first_entry,
                window_start,
                context_length,
            )
        count_data, _ = operand(frame, 7)
        return (
            0,
            carray(as_pointer(count_data), (rows, kv_heads), np.int32)[row, head],
            window_start,
            context_length,
        )

    @njit(nogil=True)
    def listed(frame, row, head, first_entry, entry):
        """The page of the row that an entry of its list stands for."""
        if dense:
            return first_entry + entry
        data, shape = operand(frame, 6)
        return np.int64(carray(as_pointer(data), (shape[0], kv_heads, shape[2]), np.int32)[row, head, entry])

    @njit(nogil=True)
    def piece(job_address, piece_number):
        """The partial attention to one piece of the list of one (row, KV head)."""
        job = words(job_address, 6)
        frame, out_data, top_data, total_data, list_data, first_piece_data = (
            job[0],
            job[1],
            job[2],
            job[3],
            job[4],
            job[5],
        )
        list_number = words(list_data + 8 * piece_number, 1)[0]
        row, head = list_number // kv_heads, list_number % kv_heads
        piece_of_list = piece_number - words(first_piece_data + 8 * list_number, 1)[0]
        first_entry, num_pages, window_start, context_length = pages(frame, row, head)
        q_data, _ = operand(frame, 0)
        key_data, _ = operand(frame, 1)
        value_data, _ = operand(frame, 2)
        table_data, grid = operand(frame, 3)
        page_table = carray(as_pointer(table_data), (grid[0], grid[1]), np.int32)[row]
        query = q_data + 4 * (row * kv_heads + head) * group * head_dim
        out = out_data + 4 * piece_number * group * head_dim
        sums = carray(as_pointer(out), (group, head_dim), np.float32)
        sums[:] = np.float32(0)
        top = carray(as_pointer(top_data), (piece_number + 1, group), np.float32)[piece_number]
        total = carray(as_pointer(total_data), (piece_number + 1, group), np.float32)[piece_number]
        top[:], total[:] = LOW, np.float32(0)
        key_scale, value_scale = np.int64(0), np.int64(0)
        if scaled:
            key_scale, value_scale = operand(frame, scale_operand)[0], operand(frame, scale_operand + 1)[0]
        memory = allocate(4 * (group + 1) * page_size)
        score = floats(memory, (group, page_size))
        power = carray(as_pointer(memory + 4 * group * page_size), (page_size,), np.int32)
        end_entry = min(num_pages, (piece_of_list + 1) * pages_per_piece)
        next_page = np.int64(
            page_table[listed(frame, row, head, first_entry, piece_of_list * pages_per_piece)]
        )
        for entry in range(piece_of_list * pages_per_piece, end_entry):
            page_of_row, page = listed(frame, row, head, first_entry, entry), next_page
            if entry + 1 < end_entry:
                next_page = np.int64(page_table[listed(frame, row, head, first_entry, entry + 1)])
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

    yield f"{name}_piece", thread_task(piece)
    piece_address = symbol_address(f"{name}_piece")

    @njit(nogil=True)
    def body(frame):
        _, shape = operand(frame, 0)
        rows = shape[0]
        count_data = allocate(8 * (rows * kv_heads + 1))
        first_piece = words(count_data, rows * kv_heads + 1)
        first_piece[0] = 0
        for list_number in range(rows * kv_heads):
            _, num_pages, _, _ = pages(frame, list_number // kv_heads, list_number % kv_heads)
            first_piece[list_number + 1] = (
                first_piece[list_number] + (num_pages + pages_per_piece - 1) // pages_per_piece
            )
        pieces = first_piece[rows * kv_heads]
        # Scratch buffers: for each piece its output, maximum and total of the softmax, and its list; then
        # the job that the pieces share.
        sums_data = allocate(pieces * (8 + 4 * group * (head_dim + 2)) + 6 * 8)
        top_data = sums_data + 4 * pieces * group * head_dim
        total_data = top_data + 4 * pieces * group
        list_data = total_data + 4 * pieces * group
        job_data = list_data + 8 * pieces
        out = floats(sums_data, (pieces, group, head_dim))
        top = floats(top_data, (pieces, group))
        total = floats(total_data, (pieces, group))
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
        final = carray(as_pointer(final_data), (rows * kv_heads, group, head_dim), np.float32)
        log_sum_exp = carray(as_pointer(log_data), (rows * kv_heads, group), np.float32)
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

    yield name, xla_handler(body)
