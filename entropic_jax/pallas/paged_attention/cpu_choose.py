"""The choice of pages on a CPU: the algorithm of the reference, a (row, KV head) at a time."""

import jax
import jax.numpy as jnp
import numpy as np

from ..native.once import once
from .cpu import LOW, declines
from .reference import LEAST_WEIGHT, PASSES, Choice, Rules, Summary


def choose(q, summary: Summary, information, table, last, drop, page_size: int, rules: Rules) -> Choice:
    """See the package and the reference, whose algorithm this is; float32."""
    declines(q.dtype, *(x.dtype for x in summary), information.dtype)
    rows, kv_heads, group, head_dim = q.shape
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
    """Compile `choose` for one shape and make it known to XLA; returns its name there."""
    from numba import carray, njit

    from ..native import pool, vector
    from ..native.call import operand, pointer, register, result, task

    exponentials, parallel = vector.exponentials(), pool.build()
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

    @njit(fastmath={"reassoc", "contract", "nsz", "arcp"}, nogil=True, error_model="numpy")
    def estimate(query, low, high, total, inverse):
        """Q · mean key, and the upper bound of q · k, over one page."""
        mean, bound = zero, zero
        for d in range(head_dim):
            mean += query[d] * total[d]
            bound += max(query[d] * low[d], query[d] * high[d])
        return mean * inverse, bound

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
        pool = (pool_shape[0], kv_heads, head_dim)
        low = carray(pointer(low_data), pool, np.float32)
        high = carray(pointer(operand(frame, 2)[0]), pool, np.float32)
        total = carray(pointer(operand(frame, 3)[0]), pool, np.float32)
        information = carray(pointer(operand(frame, 4)[0]), pool[:2], np.float32)
        bound = np.empty((group, pages), np.float32)
        score = np.empty((group, pages), np.float32)
        power = np.empty(pages, np.int32)
        mass = np.zeros(pages, np.float32)
        full, part = np.float32(np.log(page_size)), last - (pages - 1) * page_size
        for b in range(pages):
            page = table[b]
            filled = page_size if b < pages - 1 else part
            log_filled = full if b < pages - 1 else np.float32(np.log(part))
            for g in range(group):
                mean, most_of_it = estimate(
                    query[g], low[page, head], high[page, head], total[page, head], np.float32(1) / filled
                )
                score[g, b] = rest * mean + guard * most_of_it + log_filled
                bound[g, b] = most_of_it + log_filled
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
                reach = bound[g, :left_out]
                peak = reach.max()
                log_bound[g] = peak + np.log(exponentials(reach, peak, power))

    task_address = task(one)

    @njit(nogil=True)
    def body(frame):
        _, shape = operand(frame, 0)
        parallel(task_address, frame, shape[0] * kv_heads)

    code = "_".join(str(x).replace(".", "p") for x in rules)
    name = f"entropic_choose_pages_{kv_heads}_{group}_{head_dim}_{page_size}_{code}"
    register(name, body)
    return name
