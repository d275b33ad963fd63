"""Paged attention in plain JAX: the oracle of the kernels, and what runs where none accepts."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...devices import default_device
from .quantised import Quantised, gather, quantise, stored

CHUNK_POSITIONS = 256  # read at once
UNROLLED_ROWS = 16  # up to here one row's writes after another's are cheaper than a loop over rows
LANES = 128  # of a TPU's registers, to which it pads the last axis of what it stores
NEGATIVE = -1e30  # a score that is masked; finite, so that a fully masked chunk does no harm
PASSES = 24  # of the bisection for the least weight that is kept
WAYS, ROUNDS = 64, 4  # the same resolution in fewer passes
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
    wide = jnp.float32 if isinstance(keys, Quantised) else q.dtype  # a tile times its scale is not rounded

    def row(operands):
        q, table, index, count, first, last = operands

        def chunk(i, carry):
            top, total, out = carry
            entry = jax.lax.dynamic_slice_in_dim(index, i * pages, pages, 1)
            listed = i * pages + jnp.arange(pages) < count[:, None]
            position = (entry[:, :, None] * size + jnp.arange(size)).reshape(kv_heads, 1, -1)
            seen = jnp.repeat(listed, size, 1)[:, None] & (position >= first) & (position < last)
            page = jnp.where(listed, table[entry], keys.shape[0] - 1)
            flat = lambda x: gather(x, (page, heads), wide).reshape(kv_heads, pages * size, head_dim)
            # Slots that are not seen may hold anything: they must not reach a product as NaN.
            score = jnp.einsum("kgd,ksd->kgs", q.astype(wide), flat(keys), preferred_element_type=jnp.float32)
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
    if default_device().platform == "cpu":
        product = partial(jnp.einsum, "rkgd,rkpd->rkgp", preferred_element_type=jnp.float32)
    else:
        # Fused with the gather, whose result a product of matrices would want in memory, and rounded to
        # nothing less than float32, without which the bound would be none.
        product = lambda q, x: (q[:, :, :, None] * x[:, :, None]).sum(-1)
    bound = product(jnp.maximum(q, 0), high) + product(jnp.minimum(q, 0), low)
    score = (1 - rules.guard) * product(q, mean) + rules.guard * bound + log_filled
    score = jnp.where(real[:, :, None], score, NEGATIVE)
    mass = jnp.where(real, jax.nn.softmax(score, -1).mean(2), 0.0)
    weight = mass * jnp.where(real, per_page(information), 0.0)
    weight = weight / jnp.maximum(weight.sum(-1, keepdims=True), 1e-30)
    forced = real & ((page < rules.sink) | (page >= pages - rules.recent))
    return Estimate(mass, weight, bound + log_filled, real, forced)


def choose(
    q, summary: Summary, information, table, last, dropped_mass_limit, page_size: int, rules: Rules
) -> Choice:
    """See the package: the fewest pages whose weighted mass reaches 1 − ε, found by a threshold.

    Pages of the sink and the newest are kept and count towards the mass; of pages as weighty as the least one
    that is needed all are kept. Of so many thresholds at once the highest that keeps enough is taken, and
    then between it and the next one again: a pass costs more than what it computes.
    """
    mass, weight, bound, real, forced = estimate(q, summary, information, table, last, page_size, rules)
    worth = (forced | (real & (weight >= LEAST_WEIGHT))).sum(-1, keepdims=True)
    least = jnp.minimum(rules.least, worth)
    need = (1.0 - dropped_mass_limit)[:, None, None]

    def kept_at(floor):
        return forced | (real & (weight >= floor))

    def enough(floors):
        """Whether each of the floors `[rows, kv_heads, 1, n]` keeps enough."""
        kept = forced[..., None] | (real[..., None] & (weight[..., None] >= floors))
        reached = jnp.where(kept, weight[..., None], 0.0).sum(2)
        return ((reached >= need) & (kept.sum(2) >= least))[:, :, None]

    def narrow(_, ends):
        low, width = ends  # enough at low, not at low · exp(width)
        steps = jnp.arange(1, WAYS, dtype=jnp.float32) / WAYS
        good = enough(low[..., None] * jnp.exp(width * steps))
        width = width / WAYS
        return low * jnp.exp(width * good.sum(-1).astype(jnp.float32)), width

    blank = jnp.zeros_like(weight[..., :1])
    ends = (blank + LEAST_WEIGHT, jnp.log(2 / LEAST_WEIGHT).astype(jnp.float32))
    floor, _ = jax.lax.fori_loop(0, ROUNDS, narrow, ends, unroll=True)
    all_of_it = (dropped_mass_limit <= 0)[:, None, None] | ~enough(floor[..., None])[..., 0]
    kept = jnp.where(all_of_it, real, kept_at(floor))
    index = _places(kept)
    out = real & ~kept
    dropped = jnp.where(out, mass, 0.0).sum(-1)
    log_bound = jax.nn.logsumexp(jnp.where(out[:, :, None], bound, -jnp.inf), -1)
    return Choice(index, kept.sum(-1, dtype=jnp.int32), dropped, log_bound)


def _places(kept):
    """Where on the last axis the flags are set, ascending, then zeros; int32 in the same shape."""
    size = kept.shape[-1]
    flags = kept.reshape(-1, size)
    place = jnp.where(flags, jnp.cumsum(flags, -1, dtype=jnp.int32) - 1, size)
    number = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), flags.shape)
    row = jnp.arange(flags.shape[0])[:, None]
    return jnp.zeros_like(number).at[row, place].set(number, mode="drop").reshape(kept.shape)


def gates(weight, forced, dropped_mass_limit, softness):
    """A soft form of `choose`: how far each page is kept, in (0, 1); differentiable in weight and ε.

        gate_b = sigmoid((ln weight_b − θ) / softness),   Σ gate_b · weight_b = 1 − ε

    with gate 1 for forced pages. The floor θ solves the second equation; its gradient is that of the implicit
    function. As softness → 0 the gates become those of `choose`, but for the one page at the floor.
    """
    log_weight = jnp.log(jnp.maximum(weight, LEAST_WEIGHT))
    need = (1.0 - dropped_mass_limit)[:, None, None]

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


def prefill_gathered(q, keys, values, table, index, count, first, query, last, gate=None) -> Partial:
    """`prefill` without a loop of unknown length, so that it can be differentiated; reads every page.

    q `[rows, kv_heads, group, n, head_dim]`. `gate` `[rows, kv_heads, pages]` in (0, 1] multiplies the
    attention of each page before it is normalised. The log-sum-exp is `[rows, kv_heads, group, n]`.
    """
    rows, kv_heads, _, n, head_dim = q.shape
    size, most = keys.shape[2], table.shape[1]
    flat = lambda x: jnp.swapaxes(gather(x, table, q.dtype), 2, 3).reshape(rows, -1, kv_heads, head_dim)
    position = jnp.arange(most * size)
    held = (position < last[:, None])[:, None]  # [rows, kv_heads, positions]
    if index is not None:
        listed = jnp.arange(index.shape[2]) < count[..., None]
        kept = (jax.nn.one_hot(index, most, dtype=bool) & listed[..., None]).any(2)
        held = held & jnp.repeat(kept, size, 2)
    held = jnp.broadcast_to(held, (rows, kv_heads, most * size))
    own = query[:, None] + jnp.arange(n)
    seen = (position >= first[..., None]) & (position <= own[..., None])  # [rows, n, positions]
    seen = seen[:, None] & held[:, :, None]
    k, v = (jnp.where(held.swapaxes(1, 2)[..., None], flat(x), 0) for x in (keys, values))
    score = jnp.einsum("rkgnd,rskd->rkgns", q, k, preferred_element_type=jnp.float32)
    if gate is not None:
        score = score + jnp.repeat(jnp.log(jnp.maximum(gate, 1e-30)), size, 2)[:, :, None, None]
    score = jnp.where(seen[:, :, None], score, NEGATIVE)
    some = seen.any(-1)[:, :, None]
    weight = jnp.where(some[..., None], jax.nn.softmax(score, -1), 0.0)
    out = jnp.einsum("rkgns,rskd->rkgnd", weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
    log_sum = jnp.where(some, jax.nn.logsumexp(score, -1), -jnp.inf)
    return Partial(out.astype(q.dtype), log_sum)


def gathered(q, keys, values, table, index, count, first, last, gate=None) -> Partial:
    """`decode` in the same way: its query stands at the last position."""
    where = (table, index, count, first[:, None], last - 1, last)
    part = prefill_gathered(q[:, :, :, None], keys, values, *where, gate)
    return Partial(part.out[:, :, :, 0], part.log_sum[:, :, :, 0])


def write(tiles, summaries, k, v, page, slot):
    """See the package; every pool in place."""
    key, value = (stored(x, pool) for pool, x in zip(tiles, (k, v), strict=True))
    tiles = tuple(_put(pool, x, page, slot) for pool, x in zip(tiles, (k, v), strict=True))
    joins = (jnp.minimum, jnp.maximum, jnp.add, jnp.maximum)
    new = (key, key, key, jnp.linalg.norm(value, axis=-1))
    parts = zip(summaries, new, joins, strict=True)
    return tiles, tuple(fold(pool, x, page, slot, join) for pool, x, join in parts)


def fold(pool, x, page, slot, join):
    """Take x `[rows, …]` into what is kept of each row's page `[pool, …]`; slot 0 starts anew."""
    if default_device().platform != "cpu":
        fresh = (slot == 0).reshape(-1, *(1,) * (x.ndim - 1))
        return pool.at[page].set(jnp.where(fresh, x, join(pool[page], x)))

    def row(i, pool):
        old = jax.lax.dynamic_index_in_dim(pool, page[i], keepdims=False)
        new = jnp.where(slot[i] == 0, x[i], join(old, x[i]))
        return jax.lax.dynamic_update_slice(pool, new[None], (page[i], *(0,) * new.ndim))

    return _over_rows(x.shape[0], row, pool)


def _put(pool: Any, x, page, slot) -> Any:
    if isinstance(pool, Quantised):
        tile, scale = quantise(x, pool.dtype)
        column = pool.scale.swapaxes(2, 3)  # as a tile of one number a position
        scales = _put(column, scale[..., None], page, slot).swapaxes(2, 3)
        return Quantised(_put(pool.tiles, tile, page, slot), scales)
    x = x.astype(pool.dtype)
    platform = default_device().platform
    if platform == "tpu" and pool.shape[3] % LANES:
        # It may have positions along the lanes, and what scatters rows would copy it: pages come back whole.
        mine = jnp.arange(pool.shape[2])[:, None] == slot[:, None, None, None]
        return pool.at[page].set(jnp.where(mine, x[:, :, None], pool[page]))
    if platform != "cpu":
        return pool.at[page, :, slot].set(x)
    put = lambda i, pool: jax.lax.dynamic_update_slice(pool, x[i][None, :, None], (page[i], 0, slot[i], 0))
    return _over_rows(x.shape[0], put, pool)


def _over_rows(rows: int, body, pool):
    # XLA's CPU backend copies what it scatters into; elsewhere every slice would be a launch of its own.
    return jax.lax.fori_loop(0, rows, body, pool, unroll=rows if rows <= UNROLLED_ROWS else 1)
