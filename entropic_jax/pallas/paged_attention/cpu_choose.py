"""The choice of pages on a CPU: the algorithm of the reference, a (row, KV head) at a time."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..native import library
from ..native.once import once
from .cpu import LOW, declines
from .reference import LEAST_WEIGHT, PASSES, Choice, Rules, Summary


def choose(q, summary: Summary, information, table, last, drop, page_size: int, rules: Rules) -> Choice:
    """See the package and the reference, whose algorithm this is; float32."""
    declines(q.dtype, *(x.dtype for x in summary), information.dtype)
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
    return Choice(*call(q, *summary, information, table, last, drop.astype(jnp.float32)))


@once
def _register_choose(kv_heads: int, group: int, head_dim: int, page_size: int, rules: Rules) -> str:
    """Make `choose` for one shape known to XLA; returns its name there."""
    code = "_".join(str(x).replace(".", "p") for x in rules)
    name = f"entropic_choose_pages_{kv_heads}_{group}_{head_dim}_{page_size}_{code}"
    library.register(name, lambda: _compile(name, kv_heads, group, head_dim, page_size, rules))
    return name


def _compile(
    name: str, kv_heads: int, group: int, head_dim: int, page_size: int, rules: Rules
) -> Iterator[tuple[str, Any]]:
    from numba import carray, njit

    from ..native import vector
    from ..native.call import allocate, floats, handler, operand, pointer, release, result, symbol, task
    from ..native.pool import parallel

    exponentials = vector.exponentials()
    page_scores = vector.page_scores(group, head_dim, kv_heads * head_dim)
    guard, rest, zero, least_weight = (np.float32(x) for x in (rules.guard, 1 - rules.guard, 0, LEAST_WEIGHT))
    sink, recent, least = rules.sink, rules.recent, rules.least

    @njit(fastmath={"reassoc", "contract", "nsz", "arcp"}, nogil=True, error_model="numpy")
    def kept_at(weight, pages, floor):
        """Mass and number of the pages that a floor keeps."""
        mass, count = zero, 0
        for b in range(pages):
            if weight[b] >= floor:
                mass += weight[b]
                count += 1
        return mass, count

    @njit(nogil=True, error_model="numpy")
    def one(frame, owner):
        row, head = owner // kv_heads, owner % kv_heads
        q_data, shape = operand(frame, 0)
        table_data, grid = operand(frame, 5)
        most = grid[1]
        table = carray(pointer(table_data), (grid[0], most), np.int32)[row]
        last = carray(pointer(operand(frame, 6)[0]), (grid[0],), np.int32)[row]
        drop = carray(pointer(operand(frame, 7)[0]), (grid[0],), np.float32)[row]
        index = carray(pointer(result(frame, 0)[0]), (grid[0], kv_heads, most), np.int32)[row, head]
        counts = carray(pointer(result(frame, 1)[0]), (grid[0], kv_heads), np.int32)
        dropped = carray(pointer(result(frame, 2)[0]), (grid[0], kv_heads), np.float32)
        log_bound = carray(pointer(result(frame, 3)[0]), (grid[0], kv_heads, group), np.float32)[row, head]
        pages = (max(last, 0) + page_size - 1) // page_size
        dropped[row, head] = zero
        log_bound[:] = -np.inf
        if not drop > 0 or pages <= max(least, sink + recent):
            counts[row, head] = pages
            for b in range(most):
                index[b] = b
            return
        query = carray(pointer(q_data), (grid[0], kv_heads, group, head_dim), np.float32)[row, head]
        low_data, pool_shape = operand(frame, 1)
        information = carray(pointer(operand(frame, 4)[0]), (pool_shape[0], kv_heads), np.float32)
        memory = allocate(4 * ((2 * group + 2) * pages + 3 * group * head_dim))
        bound = floats(memory, (group, pages))
        score = floats(memory + 4 * group * pages, (group, pages))
        mass = floats(memory + 8 * group * pages, (pages,))
        power = carray(pointer(memory + (8 * group + 4) * pages), (pages,), np.int32)
        split_data = memory + (8 * group + 8) * pages
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
        part = last - (pages - 1) * page_size
        full, log_part = np.float32(np.log(page_size)), np.float32(np.log(np.float32(part)))
        for g in range(group):
            for b in range(pages):
                filled, log_filled = np.float32(page_size), full
                if b == pages - 1:
                    filled, log_filled = np.float32(part), log_part
                score[g, b] = rest * score[g, b] / filled + guard * bound[g, b] + log_filled
                bound[g, b] += log_filled
        mass[:] = zero
        for g in range(group):
            peak = LOW
            for b in range(pages):
                peak = max(peak, score[g, b])
            scale = np.float32(1) / (exponentials(score[g], peak, power) * group)
            for b in range(pages):
                mass[b] += score[g, b] * scale
        weight = score[0]
        sum_of_weights = zero
        for b in range(pages):
            weight[b] = mass[b] * information[table[b], head]
            sum_of_weights += weight[b]
        inverse = np.float32(1) / max(sum_of_weights, np.float32(1e-30))
        always, forced = zero, 0  # what is kept in any case counts, and is taken out of the search
        for b in range(pages):
            weight[b] *= inverse
            if b < sink or b >= pages - recent:
                always += weight[b]
                forced += 1
                weight[b] = np.float32(-1)
        need, floor, above = np.float32(1) - drop - always, least_weight, np.float32(2)
        reached, count = kept_at(weight, pages, floor)
        everything, at_least = reached < need, min(least, count + forced)
        for _ in range(PASSES):
            middle = np.sqrt(floor * above)
            reached, count = kept_at(weight, pages, middle)
            if reached >= need and count + forced >= at_least:
                floor = middle
            else:
                above = middle
        count, left_out = 0, 0
        for b in range(pages):
            if everything or weight[b] >= floor or weight[b] < 0:
                index[count] = b
                count += 1
            else:
                dropped[row, head] += mass[b]
                for g in range(group):
                    bound[g, left_out] = bound[g, b]
                left_out += 1
        counts[row, head] = count
        for b in range(count, most):
            index[b] = 0
        if left_out > 0:
            for g in range(group):
                reach, peak = bound[g, :left_out], LOW
                for b in range(left_out):
                    peak = max(peak, reach[b])
                log_bound[g] = peak + np.log(exponentials(reach, peak, power))
        release(memory)

    yield f"{name}_one", task(one)
    place_of_one = symbol(f"{name}_one")

    @njit(nogil=True)
    def body(frame):
        _, shape = operand(frame, 0)
        parallel(place_of_one(), frame, shape[0] * kv_heads)

    yield name, handler(body)
