"""Paged attention on a CPU: every tile that is listed is read once, where it lies.

The list of a (row, KV head) is dealt in pieces of `PIECE` positions to whichever thread is free, and the
partial softmaxes of the pieces are merged at the end, in their order. The pieces depend on the row alone, so
neither its neighbours nor the number of threads changes a bit of its result.
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
from .reference import Partial

PIECE = 1024  # positions
LOW = np.float32(-1e30)


def kind_of(keys, values) -> str:
    """The name of the dtype of two pools. NotImplementedError if they are not served."""
    kinds = {jnp.dtype(pool.dtype).name for pool in (keys, values)}
    if len(kinds) > 1 or not kinds <= {"float32", "bfloat16", "int8"}:
        served = "float32, bfloat16 and int8 are served"
        raise NotImplementedError(f"pages of {' and '.join(sorted(kinds))}: {served}")
    return kinds.pop()


def decode(q, keys, values, table, index, count, first, last) -> Partial:
    """See the package; float32 queries, head_dim a multiple of 16, pages of float32, bfloat16 or int8."""
    check_supported(q.dtype)
    kind = kind_of(keys, values)
    rows, kv_heads, group, head_dim = q.shape
    if head_dim % 16:
        raise NotImplementedError(f"head_dim {head_dim}: multiples of 16 are served")
    name = _register_decode(kv_heads, group, head_dim, keys.shape[2], index is None, kind)
    scales = ()
    if isinstance(keys, Quantised):
        keys, values, scales = keys.tiles, values.tiles, (keys.scale, values.scale)
    lists = () if index is None else (index, count)
    shapes = (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], q.dtype))
    call = jax.ffi.ffi_call(name, shapes, vmap_method="sequential")
    return Partial(*call(q, keys, values, table, first, last, *lists, *scales))


@run_once
def _register_decode(kv_heads: int, group: int, head_dim: int, page_size: int, dense: bool, kind: str) -> str:
    """Make `decode` for one shape known to XLA; returns its name there."""
    name = f"entropic_paged_decode_{kv_heads}_{group}_{head_dim}_{page_size}_{kind}"
    name += "_dense" if dense else "_listed"
    register(name, lambda: _compile(name, kv_heads, group, head_dim, page_size, dense, kind))
    return name


def _compile(
    name: str, kv_heads: int, group: int, head_dim: int, page_size: int, dense: bool, kind: str
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

    scores, accumulate = vector.scores(group, head_dim, kind), vector.accumulate(group, head_dim, kind)
    exponentials = vector.exponentials()
    per_piece = max(1, PIECE // page_size)
    tile = page_size * head_dim * vector.ITEMSIZE[kind]  # bytes
    scaled, scales = kind == "int8", 6 if dense else 8  # and which operand the scales of keys are

    @njit(nogil=True)
    def pages(frame, row, head):
        """The first entry of the list to read, and how many there are."""
        first_data, shape = operand(frame, 4)
        last_data, _ = operand(frame, 5)
        rows = shape[0]
        first = carray(as_pointer(first_data), (rows,), np.int32)[row]
        last = carray(as_pointer(last_data), (rows,), np.int32)[row]
        if last <= first:
            return 0, 0, first, last
        lead = first // page_size
        if dense:
            return lead, (last + page_size - 1) // page_size - lead, first, last
        count_data, _ = operand(frame, 7)
        return 0, carray(as_pointer(count_data), (rows, kv_heads), np.int32)[row, head], first, last

    @njit(nogil=True)
    def listed(frame, row, head, lead, entry):
        """Which page of the row an entry of the list is."""
        if dense:
            return lead + entry
        data, shape = operand(frame, 6)
        return np.int64(carray(as_pointer(data), (shape[0], kv_heads, shape[2]), np.int32)[row, head, entry])

    @njit(nogil=True)
    def piece(job_address, number):
        """One piece of the list of one (row, KV head): its partial softmax."""
        job = words(job_address, 6)
        frame, out_data, top_data, total_data, owner_data, before_data = (
            job[0],
            job[1],
            job[2],
            job[3],
            job[4],
            job[5],
        )
        owner = words(owner_data + 8 * number, 1)[0]
        row, head = owner // kv_heads, owner % kv_heads
        part = number - words(before_data + 8 * owner, 1)[0]
        lead, count, first, last = pages(frame, row, head)
        q_data, _ = operand(frame, 0)
        key_data, _ = operand(frame, 1)
        value_data, _ = operand(frame, 2)
        table_data, grid = operand(frame, 3)
        table = carray(as_pointer(table_data), (grid[0], grid[1]), np.int32)[row]
        query = q_data + 4 * (row * kv_heads + head) * group * head_dim
        out = out_data + 4 * number * group * head_dim
        sums = carray(as_pointer(out), (group, head_dim), np.float32)
        sums[:] = np.float32(0)
        top = carray(as_pointer(top_data), (number + 1, group), np.float32)[number]
        total = carray(as_pointer(total_data), (number + 1, group), np.float32)[number]
        top[:], total[:] = LOW, np.float32(0)
        key_scale, value_scale = np.int64(0), np.int64(0)
        if scaled:
            key_scale, value_scale = operand(frame, scales)[0], operand(frame, scales + 1)[0]
        memory = allocate(4 * (group + 1) * page_size)
        score = floats(memory, (group, page_size))
        power = carray(as_pointer(memory + 4 * group * page_size), (page_size,), np.int32)
        end = min(count, (part + 1) * per_piece)
        later = np.int64(table[listed(frame, row, head, lead, part * per_piece)])
        for entry in range(part * per_piece, end):
            place, page = listed(frame, row, head, lead, entry), later
            if entry + 1 < end:
                later = np.int64(table[listed(frame, row, head, lead, entry + 1)])
            low = max(first - place * page_size, 0)
            high = min(last - place * page_size, page_size)
            if high <= low:
                continue
            offset, after = (page * kv_heads + head) * tile, (later * kv_heads + head) * tile
            scores(key_data + offset, query, memory, page_size, low, high, key_data + after)
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
            accumulate(memory, value_data + offset, out, page_size, low, high, value_data + after)
        free(memory)

    yield f"{name}_piece", thread_task(piece)
    place_of_piece = symbol_address(f"{name}_piece")

    @njit(nogil=True)
    def body(frame):
        _, shape = operand(frame, 0)
        rows = shape[0]
        count_data = allocate(8 * (rows * kv_heads + 1))
        before = words(count_data, rows * kv_heads + 1)
        before[0] = 0
        for owner in range(rows * kv_heads):
            _, count, _, _ = pages(frame, owner // kv_heads, owner % kv_heads)
            before[owner + 1] = before[owner] + (count + per_piece - 1) // per_piece
        pieces = before[rows * kv_heads]
        # Of every piece its owner, sums, and the top and total of its softmax; then what the pieces share.
        sums_data = allocate(pieces * (8 + 4 * group * (head_dim + 2)) + 6 * 8)
        top_data = sums_data + 4 * pieces * group * head_dim
        total_data = top_data + 4 * pieces * group
        owner_data = total_data + 4 * pieces * group
        job_data = owner_data + 8 * pieces
        out = floats(sums_data, (pieces, group, head_dim))
        top = floats(top_data, (pieces, group))
        total = floats(total_data, (pieces, group))
        owners = words(owner_data, pieces)
        for owner in range(rows * kv_heads):
            for number in range(before[owner], before[owner + 1]):
                owners[number] = owner
        job = words(job_data, 6)
        job[0], job[1], job[2] = frame, sums_data, top_data
        job[3], job[4], job[5] = total_data, owner_data, count_data
        parallel_for(place_of_piece(), job_data, pieces)
        final_data, _ = result(frame, 0)
        log_data, _ = result(frame, 1)
        final = carray(as_pointer(final_data), (rows * kv_heads, group, head_dim), np.float32)
        log_sum = carray(as_pointer(log_data), (rows * kv_heads, group), np.float32)
        for owner in range(rows * kv_heads):
            for g in range(group):
                peak = LOW
                for p in range(before[owner], before[owner + 1]):
                    peak = max(peak, top[p, g])
                mass = np.float32(0)
                for p in range(before[owner], before[owner + 1]):
                    mass += total[p, g] * np.exp(top[p, g] - peak)
                for d in range(head_dim):
                    final[owner, g, d] = np.float32(0)
                log_sum[owner, g] = -np.inf
                if mass != 0:  # NaN passes: it must end the sequence, not look like silence
                    log_sum[owner, g] = peak + np.log(mass)
                    for p in range(before[owner], before[owner + 1]):
                        scale = np.exp(top[p, g] - peak) / mass
                        for d in range(head_dim):
                            final[owner, g, d] += out[p, g, d] * scale
        free(sums_data)
        free(count_data)

    yield name, xla_handler(body)
