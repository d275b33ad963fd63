"""Paged attention in plain JAX: the oracle of the kernels, and what runs where none accepts."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK_POSITIONS = 256  # read at once
NEGATIVE = -1e30  # a score that is masked; finite, so that a fully masked chunk does no harm
PASSES = 24  # of the bisection for the least weight that is kept
LEAST_WEIGHT = 1e-12  # pages of less are kept only if all are, not to fill up to `least`


class Partial(NamedTuple):
    """Attention to a part of the positions; parts merge by their log_sum."""

    out: jax.Array  # [rows, kv_heads, group, head_dim]
    log_sum: jax.Array  # float32 [rows, kv_heads, group], ln Σ exp(score)


class Summary(NamedTuple):
    """What is known of the keys of each page without reading them."""

    key_min: jax.Array  # [pool, kv_heads, head_dim], element-wise over the page
    key_max: jax.Array  # [pool, kv_heads, head_dim]
    key_sum: jax.Array  # [pool, kv_heads, head_dim]


class Rules(NamedTuple):
    """How the mass of a page is estimated, and what is kept in any case; static.

    The score of a page lies between that of its mean key (guard 0), which overlooks the one key that stands
    out, and the upper bound from its extreme keys (guard 1), which overrates every page.
    """

    sink: int = 1  # pages at the start
    recent: int = 2  # newest pages
    least: int = 4  # pages in all (B_min)
    guard: float = 0.25


class Choice(NamedTuple):
    """Which pages to read, and what is known of the others."""

    index: jax.Array  # int32 [rows, kv_heads, most pages of a row], ascending
    count: jax.Array  # int32 [rows, kv_heads]
    dropped: jax.Array  # float32 [rows, kv_heads]: estimated attention mass of the pages left out
    log_bound: jax.Array  # float32 [rows, kv_heads, group]: ln Σ exp(score) over them is at most this


def decode(q, keys, values, table, index, count, first, last) -> Partial:
    """See the package. Rows one after another, each a loop over chunks of its listed pages."""
    rows, kv_heads, group, head_dim = q.shape
    size = keys.shape[2]
    dense = index is None
    if dense:
        index = jnp.broadcast_to(
            jnp.arange(table.shape[1], dtype=jnp.int32), (rows, kv_heads, table.shape[1])
        )
        count = jnp.broadcast_to((-(-last // size))[:, None], (rows, kv_heads))
    pages = max(1, CHUNK_POSITIONS // size)
    index = jnp.pad(index, ((0, 0), (0, 0), (0, -index.shape[2] % pages)))
    heads = jnp.arange(kv_heads)[:, None]

    def row(operands):
        q, table, index, count, first, last = operands

        def chunk(i, carry):
            top, total, out = carry
            entry = jax.lax.dynamic_slice_in_dim(index, i * pages, pages, 1)
            listed = i * pages + jnp.arange(pages) < count[:, None]
            position = (entry[:, :, None] * size + jnp.arange(size)).reshape(kv_heads, 1, -1)
            seen = jnp.repeat(listed, size, 1)[:, None] & (position >= first) & (position < last)
            page = jnp.where(listed, table[entry], keys.shape[0] - 1)
            flat = lambda x: x[page, heads].reshape(kv_heads, pages * size, head_dim)
            # Slots that are not seen may hold anything: they must not reach a product as NaN.
            score = jnp.einsum("kgd,ksd->kgs", q, flat(keys), preferred_element_type=jnp.float32)
            score = jnp.where(seen, score, NEGATIVE)
            v = jnp.where(seen[:, 0, :, None], flat(values), 0)
            new = jnp.maximum(top, score.max(-1))
            weight = jnp.where(seen, jnp.exp(score - new[..., None]), 0.0)
            scale = jnp.exp(top - new)
            part = jnp.einsum("kgs,ksd->kgd", weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
            return new, total * scale + weight.sum(-1), out * scale[..., None] + part

        blank = jnp.zeros((kv_heads, group))
        start = (blank + NEGATIVE, blank, jnp.zeros((kv_heads, group, head_dim)))
        stop = jnp.where(last > first, -(-count.max() // pages), 0)
        begin = first // (pages * size) if dense else 0
        top, total, out = jax.lax.fori_loop(begin, stop, chunk, start)
        some = total != 0  # true for NaN: it must reach the result
        out = out / jnp.where(some, total, 1.0)[..., None]
        return out.astype(q.dtype), jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)

    return Partial(*jax.lax.map(row, (q, table, index, count, first, last)))


class Estimate(NamedTuple):
    """What the summaries say of the pages of a row; each `[rows, kv_heads, pages]` unless stated."""

    mass: jax.Array  # share of the attention, mean over the group
    weight: jax.Array  # the same times information, summing to 1
    log_bound: jax.Array  # [rows, kv_heads, group, pages]: ln Σ exp(score) of a page is at most this
    real: jax.Array  # bool [rows, 1, pages]: the row has the page
    forced: jax.Array  # bool [rows, 1, pages]: of the sink or the newest


def estimate(q, summary: Summary, information, table, last, page_size: int, rules: Rules) -> Estimate:
    """The attention mass of every page, without reading it.

        s_b = (1 − guard) q·k̄_b + guard u_b,   u_b = Σ_d max(q_d k_min_d, q_d k_max_d)
        mass_b = mean over the group of softmax_b(s_b + ln n_b),   weight_b ∝ mass_b · information_b

    n_b is the number of positions of page b.
    """
    per_page = lambda x: x.astype(jnp.float32)[table].swapaxes(1, 2)  # [rows, kv_heads, pages, …]
    page = jnp.arange(table.shape[1])
    pages = -(-last // page_size)[:, None, None]
    real = page < pages
    filled = jnp.clip(last[:, None] - page * page_size, 0, page_size).astype(jnp.float32)  # n_b
    log_filled = jnp.log(jnp.maximum(filled, 1.0))[:, None, None]
    # Pages that the row does not have may hold anything.
    low, high, total = (jnp.where(real[..., None], per_page(x), 0.0) for x in summary)
    mean = total / jnp.maximum(filled, 1.0)[:, None, :, None]
    q = q.astype(jnp.float32)
    product = partial(jnp.einsum, "rkgd,rkpd->rkgp", preferred_element_type=jnp.float32)
    bound = product(jnp.maximum(q, 0), high) + product(jnp.minimum(q, 0), low)
    score = (1 - rules.guard) * product(q, mean) + rules.guard * bound + log_filled
    score = jnp.where(real[:, :, None], score, NEGATIVE)
    mass = jnp.where(real, jax.nn.softmax(score, -1).mean(2), 0.0)
    weight = mass * jnp.where(real, per_page(information), 0.0)
    weight = weight / jnp.maximum(weight.sum(-1, keepdims=True), 1e-30)
    forced = real & ((page < rules.sink) | (page >= pages - rules.recent))
    return Estimate(mass, weight, bound + log_filled, real, forced)


def choose(q, summary: Summary, information, table, last, drop, page_size: int, rules: Rules) -> Choice:
    """See the package: the fewest pages whose weighted mass reaches 1 − drop, found by a threshold.

    Pages of the sink and the newest are kept and count towards the mass; of pages as weighty as the least one
    that is needed all are kept.
    """
    mass, weight, bound, real, forced = estimate(q, summary, information, table, last, page_size, rules)
    worth = (forced | (real & (weight >= LEAST_WEIGHT))).sum(-1, keepdims=True)
    least = jnp.minimum(rules.least, worth)
    need = (1.0 - drop)[:, None, None]

    def kept_at(floor):
        return forced | (real & (weight >= floor))

    def enough(floor):
        kept = kept_at(floor)
        reached = jnp.where(kept, weight, 0.0).sum(-1, keepdims=True)
        return (reached >= need) & (kept.sum(-1, keepdims=True) >= least)

    def halve(_, ends):
        low, high = ends  # enough at low, not at high
        middle = jnp.sqrt(low * high)
        good = enough(middle)
        return jnp.where(good, middle, low), jnp.where(good, high, middle)

    blank = jnp.zeros_like(weight[..., :1])
    floor, _ = jax.lax.fori_loop(0, PASSES, halve, (blank + LEAST_WEIGHT, blank + 2.0))
    all_of_it = (drop <= 0)[:, None, None] | ~enough(floor)
    kept = jnp.where(all_of_it, real, kept_at(floor))
    index = jnp.argsort(~kept, axis=-1, stable=True).astype(jnp.int32)
    out = real & ~kept
    dropped = jnp.where(out, mass, 0.0).sum(-1)
    log_bound = jax.nn.logsumexp(jnp.where(out[:, :, None], bound, -jnp.inf), -1)
    return Choice(index, kept.sum(-1, dtype=jnp.int32), dropped, log_bound)


def gates(weight, forced, drop, softness):
    """A soft form of `choose`: how far each page is kept, in (0, 1); differentiable in weight and drop.

        gate_b = sigmoid((ln weight_b − θ) / softness),   Σ gate_b · weight_b = 1 − drop

    with gate 1 for forced pages. The floor θ solves the second equation; its gradient is that of the implicit
    function. As softness → 0 the gates become those of `choose`, but for the one page at the floor.
    """
    log_weight = jnp.log(jnp.maximum(weight, LEAST_WEIGHT))
    need = (1.0 - drop)[:, None, None]

    def at(floor, log_weight):
        return jnp.where(forced, 1.0, jax.nn.sigmoid((log_weight - floor) / softness))

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        enough = (at(middle, fixed[0]) * fixed[1]).sum(-1, keepdims=True) >= fixed[2]
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    fixed = jax.lax.stop_gradient((log_weight, weight, need))
    blank = jnp.zeros_like(fixed[2] + fixed[1][..., :1])
    reach = 20 * softness
    ends = (blank + jnp.log(LEAST_WEIGHT) - reach, blank + jnp.log(2.0) + reach)
    floor = jax.lax.stop_gradient(jax.lax.fori_loop(0, 2 * PASSES, halve, ends)[0])
    # One step of Newton changes nothing but brings the gradient.
    gate = at(floor, fixed[0])
    slope = jnp.where(forced, 0.0, -gate * (1 - gate) * fixed[1] / softness).sum(-1, keepdims=True)
    error = (at(floor, log_weight) * weight).sum(-1, keepdims=True) - need
    solvable = (jnp.abs(slope) > 1e-6) & (jnp.abs(jax.lax.stop_gradient(error)) < 1e-3)
    floor = floor - jnp.where(solvable, error / jnp.where(solvable, slope, 1.0), 0.0)
    return at(floor, log_weight)


def prefill(q, keys, values, table, first, query, last):
    """Causal attention of several queries per row, with the softmax kept online over chunks of pages.

    q `[rows, kv_heads, group, n, head_dim]`, scaled. Query i of a row stands at position `query + i` and
    sees positions from `first[row, i]` to its own; nothing at or past `last` is read into the result.
    Scores are kept as `[kv_heads, positions, queries]`: reductions over positions then vectorise.
    """
    rows, kv_heads, group, n, head_dim = q.shape
    size = keys.shape[2]
    pages = max(1, CHUNK_POSITIONS // size)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)), constant_values=keys.shape[0] - 1)
    q = q.reshape(rows, kv_heads, group * n, head_dim).swapaxes(2, 3)

    def row(operands):
        q, table, first, query, last = operands
        own, first_seen = (jnp.tile(x, group) for x in (query + jnp.arange(n), first))

        def chunk(i, carry):
            top, total, out = carry
            page = jax.lax.dynamic_slice_in_dim(table, i * pages, pages)
            position = i * pages * size + jnp.arange(pages * size)[:, None]
            flat = lambda x: x[page].swapaxes(0, 1).reshape(kv_heads, pages * size, head_dim)
            # Slots at or past `last` may hold anything: they must not reach a product as NaN.
            k, v = flat(keys), jnp.where(position < last, flat(values), 0)
            score = jnp.matmul(k, q, preferred_element_type=jnp.float32)
            score = jnp.where((position <= own) & (position >= first_seen), score, NEGATIVE)
            new = jnp.maximum(top, score.max(1, keepdims=True))
            weight, scale = jnp.exp(score - new), jnp.exp(top - new)
            part = jnp.matmul(v.swapaxes(1, 2), weight.astype(v.dtype), preferred_element_type=jnp.float32)
            return new, total * scale + weight.sum(1, keepdims=True), out * scale + part

        blank = jnp.zeros((kv_heads, 1, group * n))
        start = (blank + NEGATIVE, blank, jnp.zeros((kv_heads, head_dim, group * n)))
        stop = jnp.where(last > first.min(), -(-last // (pages * size)), 0)
        _, total, out = jax.lax.fori_loop(first.min() // (pages * size), stop, chunk, start)
        return (out / jnp.maximum(total, 1e-30)).swapaxes(1, 2).astype(keys.dtype)

    out = jax.lax.map(row, (q, table, first, query, last))
    return out.reshape(rows, kv_heads, group, n, head_dim)


def prefill_listed(q, keys, values, table, index, count, first, query, last):
    """`prefill` in the form of the package's contract; every page is read."""
    if index is not None:
        raise NotImplementedError("lists of pages: the reference reads every page when it prefills")
    return prefill(q, keys, values, table, first, query, last)


def gathered(q, keys, values, table, index, count, first, last, gate=None) -> Partial:
    """`decode` without a loop of unknown length, so that it can be differentiated; reads every page.

    `gate` `[rows, kv_heads, pages]` in (0, 1] multiplies the attention of each page before it is normalised.
    """
    rows, kv_heads, _, head_dim = q.shape
    size, most = keys.shape[2], table.shape[1]
    flat = lambda x: jnp.swapaxes(x[table], 2, 3).reshape(rows, -1, kv_heads, head_dim)
    position = jnp.arange(most * size)
    seen = ((position >= first[:, None]) & (position < last[:, None]))[:, None]  # [rows, kv_heads, positions]
    if index is not None:
        listed = jnp.arange(index.shape[2]) < count[..., None]
        kept = (jax.nn.one_hot(index, most, dtype=bool) & listed[..., None]).any(2)
        seen = seen & jnp.repeat(kept, size, 2)
    seen = jnp.broadcast_to(seen, (rows, kv_heads, most * size))
    k, v = (jnp.where(seen.swapaxes(1, 2)[..., None], flat(x), 0) for x in (keys, values))
    score = jnp.einsum("rkgd,rskd->rkgs", q, k, preferred_element_type=jnp.float32)
    if gate is not None:
        score = score + jnp.repeat(jnp.log(jnp.maximum(gate, 1e-30)), size, 2)[:, :, None]
    score = jnp.where(seen[:, :, None], score, NEGATIVE)
    some = seen.any(-1)[:, :, None]
    weight = jnp.where(some[..., None], jax.nn.softmax(score, -1), 0.0)
    out = jnp.einsum("rkgs,rskd->rkgd", weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
    log_sum = jnp.where(some, jax.nn.logsumexp(score, -1), -jnp.inf)
    return Partial(out.astype(q.dtype), log_sum)
