"""Page selection on a CPU: the algorithm of the reference, one (row, KV head) per thread."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...cpu_runtime import check_supported
from ...cpu_runtime.custom_call import register
from ...cpu_runtime.run_once import run_once
from .cpu import LOW
from .reference import MIN_WEIGHT, PageChoice, PageSummary, SelectionRules


def select_pages(
    q,
    summary: PageSummary,
    information,
    page_table,
    context_length,
    dropped_mass_limit,
    page_size: int,
    rules: SelectionRules,
) -> PageChoice:
    """Float32, head_dim a multiple of 16. The contract is in the package's docstring."""
    check_supported(q.dtype, *(x.dtype for x in summary), information.dtype)
    rows, kv_heads, group, head_dim = q.shape
    if head_dim % 16:
        raise NotImplementedError(f"head_dim {head_dim}: only multiples of 16 are supported")
    name = _register(kv_heads, group, head_dim, page_size, rules)
    flat = lambda kind, *shape: jax.ShapeDtypeStruct((rows, kv_heads, *shape), kind)
    shapes = (
        flat(jnp.int32, page_table.shape[1]),
        flat(jnp.int32),
        flat(jnp.float32),
        flat(jnp.float32, group),
    )
    call = jax.ffi.ffi_call(name, shapes, vmap_method="sequential")
    return PageChoice(
        *call(q, *summary, information, page_table, context_length, dropped_mass_limit.astype(jnp.float32))
    )


@run_once
def _register(kv_heads: int, group: int, head_dim: int, page_size: int, rules: SelectionRules) -> str:
    """Register `select_pages` for one shape with XLA; returns its name there."""
    code = "_".join(str(x).replace(".", "p") for x in rules)
    name = f"entropic_select_pages_{kv_heads}_{group}_{head_dim}_{page_size}_{code}"
    register(name, lambda: _compile(name, kv_heads, group, head_dim, page_size, rules))
    return name


def _compile(
    name: str, kv_heads: int, group: int, head_dim: int, page_size: int, rules: SelectionRules
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
        xla_handler,
    )
    from ...cpu_runtime.thread_pool import parallel_for
    from ...cpu_runtime.threshold import BINS, compile_threshold

    exponentials, lane_maxima = vector.exponentials(), vector.lane_maxima()
    page_scores = vector.page_scores(group, head_dim, kv_heads * head_dim)
    threshold = compile_threshold(MIN_WEIGHT)
    bound_weight, mean_weight, zero = (np.float32(x) for x in (rules.bound_weight, 1 - rules.bound_weight, 0))
    sink_pages, recent_pages, min_pages = rules.sink_pages, rules.recent_pages, rules.min_pages
    lanes, inverse_size, log_size = vector.LANES, np.float32(1 / page_size), np.float32(np.log(page_size))
    fast = dict(fastmath={"reassoc", "contract", "nsz", "arcp"}, nogil=True, error_model="numpy")

    @njit(**fast)
    def exponents(x, size, power):
        """x[:size] ← exp(x − max x) in place; returns the sum and the maximum."""
        data, full_vectors = x.ctypes.data, size // lanes
        maxima = power[:lanes].view(np.float32)
        lane_maxima(data, maxima.ctypes.data, full_vectors)
        peak = LOW
        for lane in range(lanes):
            peak = max(peak, maxima[lane])
        for b in range(full_vectors * lanes, size):
            peak = max(peak, x[b])
        return exponentials(x[:size], peak, power), peak

    @njit(**fast)
    def select_for_head(frame, list_number):
        row, head = list_number // kv_heads, list_number % kv_heads
        q_data, shape = operand(frame, 0)
        table_data, grid = operand(frame, 5)
        max_pages = grid[1]
        page_table = carray(as_pointer(table_data), (grid[0], max_pages), np.int32)[row]
        context_length = carray(as_pointer(operand(frame, 6)[0]), (grid[0],), np.int32)[row]
        dropped_mass_limit = carray(as_pointer(operand(frame, 7)[0]), (grid[0],), np.float32)[row]
        page_list = carray(as_pointer(result(frame, 0)[0]), (grid[0], kv_heads, max_pages), np.int32)[
            row, head
        ]
        all_num_pages = carray(as_pointer(result(frame, 1)[0]), (grid[0], kv_heads), np.int32)
        dropped_masses = carray(as_pointer(result(frame, 2)[0]), (grid[0], kv_heads), np.float32)
        log_bound = carray(as_pointer(result(frame, 3)[0]), (grid[0], kv_heads, group), np.float32)[row, head]
        pages = (max(context_length, 0) + page_size - 1) // page_size
        dropped_masses[row, head] = zero
        log_bound[:] = -np.inf
        if not dropped_mass_limit > 0 or pages <= max(min_pages, sink_pages + recent_pages):
            all_num_pages[row, head] = pages
            for b in range(max_pages):
                page_list[b] = b
            return
        query = carray(as_pointer(q_data), (grid[0], kv_heads, group, head_dim), np.float32)[row, head]
        low_data, pool_shape = operand(frame, 1)
        information = carray(as_pointer(operand(frame, 4)[0]), (pool_shape[0], kv_heads), np.float32)
        memory = allocate(4 * ((2 * group + 3) * pages + lanes + 2 * BINS + 3 * group * head_dim))
        bound = floats(memory, (group, pages))
        score = floats(memory + 4 * group * pages, (group, pages))
        mass = floats(memory + 8 * group * pages, (pages,))
        candidates = floats(memory + (8 * group + 4) * pages, (pages,))
        power = carray(as_pointer(memory + (8 * group + 8) * pages), (pages + lanes,), np.int32)
        bin_data = memory + (8 * group + 12) * pages + 4 * lanes
        bin_mass = floats(bin_data, (BINS,))
        bin_count = carray(as_pointer(bin_data + 4 * BINS), (BINS,), np.int32)
        query_data = bin_data + 8 * BINS
        query_parts = floats(query_data, (3, group, head_dim))
        for g in range(group):
            for d in range(head_dim):
                x = query[g, d]
                query_parts[0, g, d], query_parts[1, g, d], query_parts[2, g, d] = (
                    x,
                    max(x, zero),
                    min(x, zero),
                )
        head_offset = 4 * head * head_dim
        page_scores(
            low_data + head_offset,
            operand(frame, 2)[0] + head_offset,
            operand(frame, 3)[0] + head_offset,
            table_data + 4 * row * max_pages,
            query_data,
            memory + 4 * group * pages,
            memory,
            pages,
        )
        mass[:] = zero
        last_filled = np.float32(context_length - (pages - 1) * page_size)
        for g in range(group):
            last_score = (
                mean_weight * score[g, pages - 1] / last_filled
                + bound_weight * bound[g, pages - 1]
                + np.log(last_filled)
            )
            for b in range(pages):
                score[g, b] = mean_weight * inverse_size * score[g, b] + bound_weight * bound[g, b] + log_size
                bound[g, b] += log_size
            score[g, pages - 1] = last_score
            bound[g, pages - 1] += np.log(last_filled) - log_size
            scale = np.float32(1) / (exponents(score[g], pages, power)[0] * group)
            for b in range(pages):
                mass[b] += score[g, b] * scale
        weight = score[0]
        for b in range(pages):
            weight[b] = information[page_table[b], head]
        sum_of_weights = zero
        for b in range(pages):
            weight[b] *= mass[b]
            sum_of_weights += weight[b]
        inverse = np.float32(1) / max(sum_of_weights, np.float32(1e-30))
        for b in range(pages):
            weight[b] *= inverse
        # Pages that are always kept count towards the mass, and are taken out of the search.
        mass_always_kept, num_always_kept = zero, 0
        for b in range(pages):
            if b < sink_pages or b >= pages - recent_pages:
                mass_always_kept += weight[b]
                weight[b] = np.float32(-1)
                num_always_kept += 1
        need = np.float32(1) - dropped_mass_limit - mass_always_kept
        floor = threshold(weight, need, min_pages - num_always_kept, candidates, bin_mass, bin_count)
        num_pages, left_out, dropped_mass = 0, 0, zero
        for b in range(pages):
            page_list[num_pages] = b
            kept = floor < 0 or weight[b] >= floor or weight[b] < 0
            num_pages += np.int64(kept)
            dropped_mass += zero if kept else mass[b]
            for g in range(group):
                bound[g, left_out] = bound[g, b]
            left_out += np.int64(not kept)
        all_num_pages[row, head], dropped_masses[row, head] = num_pages, dropped_mass
        page_list[num_pages:] = 0
        if left_out > 0:
            for g in range(group):
                total, peak = exponents(bound[g], left_out, power)
                log_bound[g] = peak + np.log(total)
        free(memory)

    yield f"{name}_head", thread_task(select_for_head)
    select_address = symbol_address(f"{name}_head")

    @njit(nogil=True)
    def body(frame):
        _, shape = operand(frame, 0)
        parallel_for(select_address(), frame, shape[0] * kv_heads)

    yield name, xla_handler(body)
