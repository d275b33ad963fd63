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
    q: jax.Array,
    summary: PageSummary,
    information: jax.Array,
    page_table: jax.Array,
    context_length: jax.Array,
    dropped_mass_limit: jax.Array,
    page_size: int,
    rules: SelectionRules,
) -> PageChoice:
    """Float32, head_dim a multiple of 16. See the package for the contract."""
    check_supported(q.dtype, *(x.dtype for x in summary), information.dtype)
    rows, kv_heads, group, head_dim = q.shape
    if head_dim % 16:
        raise NotImplementedError(f"head_dim {head_dim}: only multiples of 16 are supported")
    name = _register(kv_heads, group, head_dim, page_size, rules)

    def flat(kind, *shape):
        return jax.ShapeDtypeStruct((rows, kv_heads, *shape), kind)

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
    from ...cpu_runtime.kernel import compiled, operand, parallel_kernel

    @compiled
    def num_lists(frame):
        return operand(frame, 0)[1][0] * kv_heads

    yield from parallel_kernel(name, _list_selection(kv_heads, group, head_dim, page_size, rules), num_lists)


def _list_selection(kv_heads: int, group: int, head_dim: int, page_size: int, rules: SelectionRules) -> Any:
    """Compile the task of a thread: the page list of one (row, KV head)."""
    from ...cpu_runtime import vector
    from ...cpu_runtime.kernel import (
        FAST,
        allocate,
        floats,
        free,
        integers,
        njit,
        operand,
        operand_floats,
        operand_integers,
        result_floats,
        result_integers,
    )
    from ...cpu_runtime.threshold import BINS

    lanes, zero = vector.LANES, np.float32(0)
    sink_pages, recent_pages, min_pages = rules.sink_pages, rules.recent_pages, rules.min_pages
    page_scores = vector.page_scores(group, head_dim, kv_heads * head_dim)
    split_query, exponents = _query_parts(group, head_dim), _exponents()
    page_masses = _page_masses(group, page_size, rules.bound_weight, exponents)
    page_weights, keep_pages = _page_weights(), _kept_pages(group, rules)

    @njit(**FAST)
    def select_for_head(frame, list_number):
        row, head = list_number // kv_heads, list_number % kv_heads
        q_data, _ = operand(frame, 0)
        table_data, grid = operand(frame, 5)
        max_pages = grid[1]
        page_table = integers(table_data, (grid[0], max_pages))[row]
        context_length = operand_integers(frame, 6, (grid[0],))[row]
        dropped_mass_limit = operand_floats(frame, 7, (grid[0],))[row]
        page_list = result_integers(frame, 0, (grid[0], kv_heads, max_pages))[row, head]
        all_num_pages = result_integers(frame, 1, (grid[0], kv_heads))
        dropped_masses = result_floats(frame, 2, (grid[0], kv_heads))
        log_bound = result_floats(frame, 3, (grid[0], kv_heads, group))[row, head]
        pages = (max(context_length, 0) + page_size - 1) // page_size
        dropped_masses[row, head] = zero
        log_bound[:] = -np.inf
        if not dropped_mass_limit > 0 or pages <= max(min_pages, sink_pages + recent_pages):
            all_num_pages[row, head] = pages
            for b in range(max_pages):
                page_list[b] = b
            return
        query = floats(q_data, (grid[0], kv_heads, group, head_dim))[row, head]
        low_data, pool_shape = operand(frame, 1)
        information = operand_floats(frame, 4, (pool_shape[0], kv_heads))
        memory = allocate(4 * ((2 * group + 3) * pages + lanes + 2 * BINS + 3 * group * head_dim))
        bound = floats(memory, (group, pages))
        score = floats(memory + 4 * group * pages, (group, pages))
        mass = floats(memory + 8 * group * pages, (pages,))
        candidates = floats(memory + (8 * group + 4) * pages, (pages,))
        power = integers(memory + (8 * group + 8) * pages, (pages + lanes,))
        bin_data = memory + (8 * group + 12) * pages + 4 * lanes
        bin_mass, bin_count = floats(bin_data, (BINS,)), integers(bin_data + 4 * BINS, (BINS,))
        query_data = bin_data + 8 * BINS
        split_query(query, query_data)
        head_offset = 4 * head * head_dim
        low, high, sums = low_data, operand(frame, 2)[0], operand(frame, 3)[0]
        low, high, sums = low + head_offset, high + head_offset, sums + head_offset
        table, means = table_data + 4 * row * max_pages, memory + 4 * group * pages
        page_scores(low, high, sums, table, query_data, means, memory, pages)
        page_masses(score, bound, mass, power, pages, context_length)
        weight = score[0]
        page_weights(weight, mass, information, page_table, head, pages)
        num_pages, left_out, dropped_mass = keep_pages(
            weight, mass, bound, page_list, pages, dropped_mass_limit, candidates, bin_mass, bin_count
        )
        all_num_pages[row, head], dropped_masses[row, head] = num_pages, dropped_mass
        page_list[num_pages:] = 0
        if left_out > 0:
            for g in range(group):
                total, peak = exponents(bound[g], left_out, power)
                log_bound[g] = peak + np.log(total)
        free(memory)

    return select_for_head


def _exponents() -> Any:
    from ...cpu_runtime import vector
    from ...cpu_runtime.kernel import FAST, njit

    exponentials, lane_maxima, lanes = vector.exponentials(), vector.lane_maxima(), vector.LANES

    @njit(**FAST)
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

    return exponents


def _query_parts(group: int, head_dim: int) -> Any:
    from ...cpu_runtime.kernel import floats, inlined

    zero = np.float32(0)

    @inlined
    def split_query(query, data):
        """Write the query, its positive and its negative part to the address `data`."""
        parts = floats(data, (3, group, head_dim))
        for g in range(group):
            for d in range(head_dim):
                x = query[g, d]
                parts[0, g, d], parts[1, g, d], parts[2, g, d] = x, max(x, zero), min(x, zero)

    return split_query


def _page_masses(group: int, page_size: int, weight_of_bound: float, exponents: Any) -> Any:
    from ...cpu_runtime.kernel import inlined

    bound_weight, mean_weight, zero = (np.float32(x) for x in (weight_of_bound, 1 - weight_of_bound, 0))
    inverse_size, log_size = np.float32(1 / page_size), np.float32(np.log(page_size))

    @inlined
    def page_masses(score, bound, mass, power, pages, context_length):
        """The share of the attention that each page receives, from the scores of means and of bounds.

        Bounds become those of the log-sum-exp of a page, and scores are overwritten.
        """
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

    return page_masses


def _page_weights() -> Any:
    from ...cpu_runtime.kernel import inlined

    zero = np.float32(0)

    @inlined
    def page_weights(weight, mass, information, page_table, head, pages):
        """The weight of each page: its mass times its information, normalised."""
        for b in range(pages):
            weight[b] = information[page_table[b], head]
        sum_of_weights = zero
        for b in range(pages):
            weight[b] *= mass[b]
            sum_of_weights += weight[b]
        inverse = np.float32(1) / max(sum_of_weights, np.float32(1e-30))
        for b in range(pages):
            weight[b] *= inverse

    return page_weights


def _kept_pages(group: int, rules: SelectionRules) -> Any:
    from ...cpu_runtime.kernel import inlined
    from ...cpu_runtime.threshold import compile_threshold

    threshold, zero = compile_threshold(MIN_WEIGHT), np.float32(0)
    sink_pages, recent_pages, min_pages = rules.sink_pages, rules.recent_pages, rules.min_pages

    @inlined
    def keep_pages(weight, mass, bound, page_list, pages, limit, candidates, bin_mass, bin_count):
        """Write the list of kept pages, and move the bounds of the others to the front.

        Returns: how many pages are kept, how many are left out, and their mass.
        """
        # Pages that are always kept count towards the mass, and are taken out of the search.
        mass_always_kept, num_always_kept = zero, 0
        for b in range(pages):
            if b < sink_pages or b >= pages - recent_pages:
                mass_always_kept += weight[b]
                weight[b] = np.float32(-1)
                num_always_kept += 1
        need = np.float32(1) - limit - mass_always_kept
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
        return num_pages, left_out, dropped_mass

    return keep_pages
