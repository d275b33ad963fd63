"""The choice of pages on a CPU: the algorithm of the reference, a (row, KV head) at a time."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...cpu_runtime import check_supported
from ...cpu_runtime.custom_call import register
from ...cpu_runtime.run_once import run_once
from .cpu import LOW
from .reference import LEAST_WEIGHT, Choice, Rules, Summary


def choose(
    q, summary: Summary, information, table, last, dropped_mass_limit, page_size: int, rules: Rules
) -> Choice:
    """See the package and the reference, whose algorithm this is; float32."""
    check_supported(q.dtype, *(x.dtype for x in summary), information.dtype)
    rows, kv_heads, group, head_dim = q.shape
    if head_dim % 16:
        raise NotImplementedError(f"head_dim {head_dim}: multiples of 16 are served")
    name = _register_choose(kv_heads, group, head_dim, page_size, rules)
    flat = lambda kind, *shape: jax.ShapeDtypeStruct((rows, kv_heads, *shape), kind)
    shapes = (
        flat(jnp.int32, table.shape[1]),
        flat(jnp.int32),
        flat(jnp.float32),
        flat(jnp.float32, group),
    )
    call = jax.ffi.ffi_call(name, shapes, vmap_method="sequential")
    return Choice(*call(q, *summary, information, table, last, dropped_mass_limit.astype(jnp.float32)))


@run_once
def _register_choose(kv_heads: int, group: int, head_dim: int, page_size: int, rules: Rules) -> str:
    """Make `choose` for one shape known to XLA; returns its name there."""
    code = "_".join(str(x).replace(".", "p") for x in rules)
    name = f"entropic_choose_pages_{kv_heads}_{group}_{head_dim}_{page_size}_{code}"
    register(name, lambda: _compile(name, kv_heads, group, head_dim, page_size, rules))
    return name


def _compile(
    name: str, kv_heads: int, group: int, head_dim: int, page_size: int, rules: Rules
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

    exponentials, peaks = vector.exponentials(), vector.lane_maxima()
    page_scores = vector.page_scores(group, head_dim, kv_heads * head_dim)
    threshold = compile_threshold(LEAST_WEIGHT)
    guard, rest, zero = (np.float32(x) for x in (rules.guard, 1 - rules.guard, 0))
    sink, recent, least = rules.sink, rules.recent, rules.least
    lanes, one_page, full = vector.LANES, np.float32(1 / page_size), np.float32(np.log(page_size))
    fast = dict(fastmath={"reassoc", "contract", "nsz", "arcp"}, nogil=True, error_model="numpy")

    @njit(**fast)
    def exponents(x, size, power):
        """x[:size] ← exp(x − its peak) in place; the sum and the peak."""
        place, at_once = x.ctypes.data, size // lanes
        found = power[:lanes].view(np.float32)
        peaks(place, found.ctypes.data, at_once)
        peak = LOW
        for lane in range(lanes):
            peak = max(peak, found[lane])
        for b in range(at_once * lanes, size):
            peak = max(peak, x[b])
        return exponentials(x[:size], peak, power), peak

    @njit(**fast)
    def one(frame, owner):
        row, head = owner // kv_heads, owner % kv_heads
        q_data, shape = operand(frame, 0)
        table_data, grid = operand(frame, 5)
        most = grid[1]
        table = carray(as_pointer(table_data), (grid[0], most), np.int32)[row]
        last = carray(as_pointer(operand(frame, 6)[0]), (grid[0],), np.int32)[row]
        dropped_mass_limit = carray(as_pointer(operand(frame, 7)[0]), (grid[0],), np.float32)[row]
        index = carray(as_pointer(result(frame, 0)[0]), (grid[0], kv_heads, most), np.int32)[row, head]
        counts = carray(as_pointer(result(frame, 1)[0]), (grid[0], kv_heads), np.int32)
        dropped = carray(as_pointer(result(frame, 2)[0]), (grid[0], kv_heads), np.float32)
        log_bound = carray(as_pointer(result(frame, 3)[0]), (grid[0], kv_heads, group), np.float32)[row, head]
        pages = (max(last, 0) + page_size - 1) // page_size
        dropped[row, head] = zero
        log_bound[:] = -np.inf
        if not dropped_mass_limit > 0 or pages <= max(least, sink + recent):
            counts[row, head] = pages
            for b in range(most):
                index[b] = b
            return
        query = carray(as_pointer(q_data), (grid[0], kv_heads, group, head_dim), np.float32)[row, head]
        low_data, pool_shape = operand(frame, 1)
        information = carray(as_pointer(operand(frame, 4)[0]), (pool_shape[0], kv_heads), np.float32)
        memory = allocate(4 * ((2 * group + 3) * pages + lanes + 2 * BINS + 3 * group * head_dim))
        bound = floats(memory, (group, pages))
        score = floats(memory + 4 * group * pages, (group, pages))
        mass = floats(memory + 8 * group * pages, (pages,))
        left = floats(memory + (8 * group + 4) * pages, (pages,))
        power = carray(as_pointer(memory + (8 * group + 8) * pages), (pages + lanes,), np.int32)
        tally_data = memory + (8 * group + 12) * pages + 4 * lanes
        tally = floats(tally_data, (BINS,))
        number = carray(as_pointer(tally_data + 4 * BINS), (BINS,), np.int32)
        split_data = tally_data + 8 * BINS
        split = floats(split_data, (3, group, head_dim))
        for g in range(group):
            for d in range(head_dim):
                x = query[g, d]
                split[0, g, d], split[1, g, d], split[2, g, d] = x, max(x, zero), min(x, zero)
        mine = 4 * head * head_dim
        page_scores(
            low_data + mine,
            operand(frame, 2)[0] + mine,
            operand(frame, 3)[0] + mine,
            table_data + 4 * row * most,
            split_data,
            memory + 4 * group * pages,
            memory,
            pages,
        )
        mass[:] = zero
        part = np.float32(last - (pages - 1) * page_size)
        for g in range(group):
            partly = rest * score[g, pages - 1] / part + guard * bound[g, pages - 1] + np.log(part)
            for b in range(pages):
                score[g, b] = rest * one_page * score[g, b] + guard * bound[g, b] + full
                bound[g, b] += full
            score[g, pages - 1] = partly
            bound[g, pages - 1] += np.log(part) - full
            scale = np.float32(1) / (exponents(score[g], pages, power)[0] * group)
            for b in range(pages):
                mass[b] += score[g, b] * scale
        weight = score[0]
        for b in range(pages):
            weight[b] = information[table[b], head]
        sum_of_weights = zero
        for b in range(pages):
            weight[b] *= mass[b]
            sum_of_weights += weight[b]
        inverse = np.float32(1) / max(sum_of_weights, np.float32(1e-30))
        for b in range(pages):
            weight[b] *= inverse
        always, forced = zero, 0  # what is kept in any case counts, and is taken out of the search
        for b in range(pages):
            if b < sink or b >= pages - recent:
                always += weight[b]
                weight[b] = np.float32(-1)
                forced += 1
        floor = threshold(
            weight, np.float32(1) - dropped_mass_limit - always, least - forced, left, tally, number
        )
        count, left_out, lost = 0, 0, zero
        for b in range(pages):
            index[count] = b
            kept = floor < 0 or weight[b] >= floor or weight[b] < 0
            count += np.int64(kept)
            lost += zero if kept else mass[b]
            for g in range(group):
                bound[g, left_out] = bound[g, b]
            left_out += np.int64(not kept)
        counts[row, head], dropped[row, head] = count, lost
        index[count:] = 0
        if left_out > 0:
            for g in range(group):
                total, peak = exponents(bound[g], left_out, power)
                log_bound[g] = peak + np.log(total)
        free(memory)

    yield f"{name}_one", thread_task(one)
    place_of_one = symbol_address(f"{name}_one")

    @njit(nogil=True)
    def body(frame):
        _, shape = operand(frame, 0)
        parallel_for(place_of_one(), frame, shape[0] * kv_heads)

    yield name, xla_handler(body)
