"""Paged attention in plain JAX: the reference for the kernels, and their fallback."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...mesh.devices import default_device
from .quantised import Quantised, gather

CHUNK_POSITIONS = 256  # positions read at once
LANES = 128  # of a TPU's registers, to which it pads the last axis of an array
NEGATIVE = -1e30  # a masked score; finite, so that a fully masked chunk gives no NaN
PASSES = 24  # of the bisection for the threshold of the gates
WAYS, ROUNDS = 64, 4  # thresholds tried at once, and how often, to find that of a selection
MIN_WEIGHT = 1e-12  # pages of less weight are kept only if all are, not to reach `min_pages`

Array = jax.Array | np.ndarray


class PartialAttention(NamedTuple):
    """Attention to some of the positions; partial results merge by their log-sum-exps, see `split_kv`."""

    out: jax.Array  # [rows, kv_heads, group, head_dim]
    log_sum_exp: jax.Array  # float32 [rows, kv_heads, group], ln Σ exp(score)


class PageSummary(NamedTuple):
    """Bounds and sum of the keys of each page, from which its attention mass is estimated."""

    key_min: jax.Array  # [pool, kv_heads, head_dim], element-wise over the page
    key_max: jax.Array  # [pool, kv_heads, head_dim]
    key_sum: jax.Array  # [pool, kv_heads, head_dim]


class SelectionRules(NamedTuple):
    """Rules of page selection: which pages are always kept, and how attention mass is estimated; static.

    The score of a page is a mean of two: that of its mean key, which overlooks a single key that stands out,
    and the upper bound from its extreme keys, which overrates every page.
    """

    sink_pages: int = 1  # always kept, at the start (attention sinks)
    recent_pages: int = 2  # always kept, at the end
    min_pages: int = 4  # kept in all (B_min)
    bound_weight: float = 0.25  # of the upper bound in the score; the rest is that of the mean key


class PageChoice(NamedTuple):
    """The pages to read, and estimates for the others."""

    page_list: jax.Array  # int32 [rows, kv_heads, max_pages], ascending entries of the page table
    num_pages: jax.Array  # int32 [rows, kv_heads]
    dropped_mass: jax.Array  # float32 [rows, kv_heads]: estimated attention mass of the other pages
    log_bound: jax.Array  # float32 [rows, kv_heads, group]: an upper bound of their log-sum-exp


def decode(
    q: jax.Array,
    keys: Any,
    values: Any,
    page_table: jax.Array,
    page_list: jax.Array | None,
    num_pages: jax.Array | None,
    window_start: jax.Array,
    context_length: jax.Array,
    *,
    soft_cap: float | None = None,
) -> PartialAttention:
    """The rows one after another, each with an online softmax over chunks of its listed pages.

    See the package for the contract.
    """
    rows, kv_heads, group, head_dim = q.shape
    size = keys.shape[2]
    dense = page_list is None
    if dense:
        page_list = jnp.broadcast_to(
            jnp.arange(page_table.shape[1], dtype=jnp.int32), (rows, kv_heads, page_table.shape[1])
        )
        num_pages = jnp.broadcast_to((-(-context_length // size))[:, None], (rows, kv_heads))
    pages = max(1, CHUNK_POSITIONS // size)
    page_list = jnp.pad(page_list, ((0, 0), (0, 0), (0, -page_list.shape[2] % pages)))
    heads = jnp.arange(kv_heads)[:, None]
    # Quantised tiles are not rounded after the product with their scales.
    wide = jnp.float32 if isinstance(keys, Quantised) else q.dtype

    def row(operands):
        q, page_table, page_list, num_pages, window_start, context_length = operands

        def chunk(i, carry):
            top, total, out = carry
            entry = jax.lax.dynamic_slice_in_dim(page_list, i * pages, pages, 1)
            listed = i * pages + jnp.arange(pages) < num_pages[:, None]
            position = (entry[:, :, None] * size + jnp.arange(size)).reshape(kv_heads, 1, -1)
            seen = (
                jnp.repeat(listed, size, 1)[:, None]
                & (position >= window_start)
                & (position < context_length)
            )
            page = jnp.where(listed, page_table[entry], keys.shape[0] - 1)

            def flat(x):
                return gather(x, (page, heads), wide).reshape(kv_heads, pages * size, head_dim)

            # A slot that is not seen may hold NaN, which must not reach a product.
            score = jnp.einsum("kgd,ksd->kgs", q.astype(wide), flat(keys), preferred_element_type=jnp.float32)
            score = jnp.where(seen, capped(score, soft_cap), NEGATIVE)
            v = jnp.where(seen[:, 0, :, None], flat(values), 0)
            new = jnp.maximum(top, score.max(-1))
            weight = jnp.where(seen, jnp.exp(score - new[..., None]), 0.0)
            scale = jnp.exp(top - new)
            part = jnp.einsum("kgs,ksd->kgd", weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
            return new, total * scale + weight.sum(-1), out * scale[..., None] + part

        blank = jnp.zeros((kv_heads, group))
        start = (blank + NEGATIVE, blank, jnp.zeros((kv_heads, group, head_dim)))
        stop = jnp.where(context_length > window_start, -(-num_pages.max() // pages), 0)
        begin = window_start // (pages * size) if dense else 0
        top, total, out = jax.lax.fori_loop(begin, stop, chunk, start)
        not_empty = total != 0  # true for NaN, which must reach the result
        out = out / jnp.where(not_empty, total, 1.0)[..., None]
        return out.astype(q.dtype), jnp.where(
            not_empty, top + jnp.log(jnp.where(not_empty, total, 1.0)), -jnp.inf
        )

    return PartialAttention(
        *jax.lax.map(row, (q, page_table, page_list, num_pages, window_start, context_length))
    )


def capped(score: jax.Array, soft_cap: float | None) -> jax.Array:
    """The score with a soft cap c, c · tanh(score / c), or the score itself."""
    return score if soft_cap is None else soft_cap * jnp.tanh(score / soft_cap)


class PageEstimate(NamedTuple):
    """Estimates for the pages of a row from their summaries; each `[rows, kv_heads, pages]` unless stated."""

    mass: jax.Array  # share of the attention, mean over the group
    weight: jax.Array  # the same times information, summing to 1
    log_bound: jax.Array  # [rows, kv_heads, group, pages]: ln Σ exp(score) of a page is at most this
    in_use: jax.Array  # bool [rows, 1, pages]: the row has the page
    always_kept: jax.Array  # bool [rows, 1, pages]: of the sink or the newest


def estimate_pages(
    q: Array,
    summary: PageSummary,
    information: Array,
    page_table: Array,
    context_length: Array,
    page_size: int,
    rules: SelectionRules,
    complete: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> PageEstimate:
    """Estimate the attention mass of every page from the page summaries.

        s_b = (1 − w) q·k̄_b + w u_b,   u_b = Σ_d max(q_d k_min_d, q_d k_max_d),   w = `rules.bound_weight`
        mass_b = mean over the group of softmax_b(s_b + ln n_b),   weight_b ∝ mass_b · information_b

    n_b is the number of positions in page b. The arguments are those of `select_pages`.

    Args:
        q, summary, information, page_table, context_length, page_size, rules: as for `select_pages`.
        complete: makes arrays `[…, pages]` of all pages from what this device has computed of its own.

    Source: the upper bound u_b is that of Quest (Tang et al. 2024, arXiv 2406.10774), section 3.
    """
    per_page = lambda x: x.astype(jnp.float32)[page_table].swapaxes(1, 2)  # [rows, kv_heads, pages, …]
    page = jnp.arange(page_table.shape[1])
    pages = -(-context_length // page_size)[:, None, None]
    in_use = page < pages
    filled = jnp.clip(context_length[:, None] - page * page_size, 0, page_size).astype(jnp.float32)  # n_b
    log_filled = jnp.log(jnp.maximum(filled, 1.0))[:, None, None]
    # Pages that the row does not have may hold NaN.
    low, high, total = (jnp.where(in_use[..., None], per_page(x), 0.0) for x in summary)
    mean = total / jnp.maximum(filled, 1.0)[:, None, :, None]
    q = q.astype(jnp.float32)
    if default_device().platform == "cpu":
        product = partial(jnp.einsum, "rkgd,rkpd->rkgp", preferred_element_type=jnp.float32)
    else:
        # This form is fused with the gather, whose result a matrix product would need in memory, and is
        # computed in full float32, without which the bound would not hold.
        def product(q, x):
            return (q[:, :, :, None] * x[:, :, None]).sum(-1)

    bound = complete(product(jnp.maximum(q, 0), high) + product(jnp.minimum(q, 0), low))
    score = (1 - rules.bound_weight) * complete(product(q, mean)) + rules.bound_weight * bound + log_filled
    score = jnp.where(in_use[:, :, None], score, NEGATIVE)
    mass = jnp.where(in_use, jax.nn.softmax(score, -1).mean(2), 0.0)
    weight = mass * complete(jnp.where(in_use, per_page(information), 0.0))
    weight = weight / jnp.maximum(weight.sum(-1, keepdims=True), 1e-30)
    always_kept = in_use & ((page < rules.sink_pages) | (page >= pages - rules.recent_pages))
    return PageEstimate(mass, weight, bound + log_filled, in_use, always_kept)


def select_pages(
    q: jax.Array,
    summary: PageSummary,
    information: jax.Array,
    page_table: jax.Array,
    context_length: jax.Array,
    dropped_mass_limit: jax.Array,
    page_size: int,
    rules: SelectionRules,
    complete: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> PageChoice:
    """Keep the fewest pages whose weighted mass reaches 1 − ε, by a threshold on the weight.

    Sink pages and recent pages are kept and count towards the mass. Pages of equal weight are kept together.
    A pass costs more than what it computes, so each tries `WAYS` thresholds and takes the highest that keeps
    enough; the next pass divides the interval above it. See the package for the contract, and
    `estimate_pages` for `complete`.

    Args:
        q, summary, information, page_table, context_length, dropped_mass_limit: as in the contract.
        page_size, rules: as in the contract.
        complete: as for `estimate_pages`; by default, this device has all pages.
    """
    mass, weight, bound, in_use, always_kept = estimate_pages(
        q, summary, information, page_table, context_length, page_size, rules, complete
    )
    worth = (always_kept | (in_use & (weight >= MIN_WEIGHT))).sum(-1, keepdims=True)
    least = jnp.minimum(rules.min_pages, worth)
    need = (1.0 - dropped_mass_limit)[:, None, None]

    def kept_at(floor):
        return always_kept | (in_use & (weight >= floor))

    def enough(floors):
        """Whether each of the thresholds `[rows, kv_heads, 1, n]` keeps enough."""
        kept = always_kept[..., None] | (in_use[..., None] & (weight[..., None] >= floors))
        reached = jnp.where(kept, weight[..., None], 0.0).sum(2)
        return ((reached >= need) & (kept.sum(2) >= least))[:, :, None]

    def narrow(_, ends):
        low, width = ends  # low keeps enough, low · exp(width) does not
        steps = jnp.arange(1, WAYS, dtype=jnp.float32) / WAYS
        good = enough(low[..., None] * jnp.exp(width * steps))
        width = width / WAYS
        return low * jnp.exp(width * good.sum(-1).astype(jnp.float32)), width

    blank = jnp.zeros_like(weight[..., :1])
    ends = (blank + MIN_WEIGHT, jnp.log(2 / MIN_WEIGHT).astype(jnp.float32))
    floor, _ = jax.lax.fori_loop(0, ROUNDS, narrow, ends, unroll=True)
    keep_all = (dropped_mass_limit <= 0)[:, None, None] | ~enough(floor[..., None])[..., 0]
    kept = jnp.where(keep_all, in_use, kept_at(floor))
    page_list = _places(kept)
    out = in_use & ~kept
    dropped_mass = jnp.where(out, mass, 0.0).sum(-1)
    log_bound = jax.nn.logsumexp(jnp.where(out[:, :, None], bound, -jnp.inf), -1)
    return PageChoice(page_list, kept.sum(-1, dtype=jnp.int32), dropped_mass, log_bound)


def _places(kept):
    """The places on the last axis where flags are set, ascending, then zeros; int32 in the same shape."""
    size = kept.shape[-1]
    flags = kept.reshape(-1, size)
    place = jnp.where(flags, jnp.cumsum(flags, -1, dtype=jnp.int32) - 1, size)
    number = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), flags.shape)
    row = jnp.arange(flags.shape[0])[:, None]
    return jnp.zeros_like(number).at[row, place].set(number, mode="drop").reshape(kept.shape)


def page_gates(
    weight: jax.Array, always_kept: jax.Array, dropped_mass_limit: jax.Array, softness: float
) -> jax.Array:
    """Soft page selection: a gate in (0, 1) for each page, differentiable in the weight and in ε.

        gate_b = sigmoid((ln weight_b − θ) / softness),   Σ gate_b · weight_b = 1 − ε

    The threshold θ solves the second equation; its gradient is that of the implicit function. As softness → 0
    the gates become the choice of `select_pages`, apart from the one page at the threshold.

    Args:
        weight: `[rows, kv_heads, pages]`, from `estimate_pages`.
        always_kept: bool `[rows, 1, pages]`: pages with gate 1.
        dropped_mass_limit: ε, float32 `[rows]`.
        softness: the width of the threshold in ln weight, > 0.
    """
    log_weight = jnp.log(jnp.maximum(weight, MIN_WEIGHT))
    need = (1.0 - dropped_mass_limit)[:, None, None]

    def gate_at(floor, log_weight):
        return jnp.where(always_kept, 1.0, jax.nn.sigmoid((log_weight - floor) / softness))

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        enough = (gate_at(middle, constants[0]) * constants[1]).sum(-1, keepdims=True) >= constants[2]
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    constants = jax.lax.stop_gradient((log_weight, weight, need))
    blank = jnp.zeros_like(constants[2] + constants[1][..., :1])
    reach = 20 * softness
    ends = (blank + jnp.log(MIN_WEIGHT) - reach, blank + jnp.log(2.0) + reach)
    floor = jax.lax.stop_gradient(jax.lax.fori_loop(0, 2 * PASSES, halve, ends)[0])
    # One Newton step from the solution leaves the value as it is and adds the gradient.
    gate = gate_at(floor, constants[0])
    slope = jnp.where(always_kept, 0.0, -gate * (1 - gate) * constants[1] / softness).sum(-1, keepdims=True)
    error = (gate_at(floor, log_weight) * weight).sum(-1, keepdims=True) - need
    solvable = (jnp.abs(slope) > 1e-6) & (jnp.abs(jax.lax.stop_gradient(error)) < 1e-3)
    floor = floor - jnp.where(solvable, error / jnp.where(solvable, slope, 1.0), 0.0)
    return gate_at(floor, log_weight)


def prefill_gathered(
    q: jax.Array,
    keys: Any,
    values: Any,
    page_table: jax.Array,
    page_list: jax.Array | None,
    num_pages: Any,
    window_start: jax.Array,
    query_start: jax.Array,
    context_length: jax.Array,
    gate: jax.Array | None = None,
    soft_cap: float | None = None,
) -> PartialAttention:
    """`prefill` without a loop of dynamic length, so that it can be differentiated; it reads every page.

    Args:
        q, keys, values, page_table, page_list, num_pages, window_start, query_start, context_length: as for
            `prefill`.
        gate: `[rows, kv_heads, pages]` in (0, 1], multiplies the attention to each page before normalisation.
        soft_cap: c: scores are c · tanh(score / c); None for the scores themselves.

    Returns:
        The output, and the log-sum-exp `[rows, kv_heads, group, n]`.
    """
    rows, kv_heads, _, n, head_dim = q.shape
    size, max_pages = keys.shape[2], page_table.shape[1]

    def flat(x):
        return jnp.swapaxes(gather(x, page_table, q.dtype), 2, 3).reshape(rows, -1, kv_heads, head_dim)

    position = jnp.arange(max_pages * size)
    held = (position < context_length[:, None])[:, None]  # [rows, kv_heads, positions]
    if page_list is not None:
        listed = jnp.arange(page_list.shape[2]) < num_pages[..., None]
        kept = (jax.nn.one_hot(page_list, max_pages, dtype=bool) & listed[..., None]).any(2)
        held = held & jnp.repeat(kept, size, 2)
    held = jnp.broadcast_to(held, (rows, kv_heads, max_pages * size))
    own_position = query_start[:, None] + jnp.arange(n)
    seen = (position >= window_start[..., None]) & (
        position <= own_position[..., None]
    )  # [rows, n, positions]
    seen = seen[:, None] & held[:, :, None]
    k, v = (jnp.where(held.swapaxes(1, 2)[..., None], flat(x), 0) for x in (keys, values))
    score = capped(jnp.einsum("rkgnd,rskd->rkgns", q, k, preferred_element_type=jnp.float32), soft_cap)
    if gate is not None:
        score = score + jnp.repeat(jnp.log(jnp.maximum(gate, 1e-30)), size, 2)[:, :, None, None]
    score = jnp.where(seen[:, :, None], score, NEGATIVE)
    not_empty = seen.any(-1)[:, :, None]
    weight = jnp.where(not_empty[..., None], jax.nn.softmax(score, -1), 0.0)
    out = jnp.einsum("rkgns,rskd->rkgnd", weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
    log_sum_exp = jnp.where(not_empty, jax.nn.logsumexp(score, -1), -jnp.inf)
    return PartialAttention(out.astype(q.dtype), log_sum_exp)


def decode_gathered(
    q: jax.Array,
    keys: Any,
    values: Any,
    page_table: jax.Array,
    page_list: jax.Array | None,
    num_pages: Any,
    window_start: jax.Array,
    context_length: jax.Array,
    gate: jax.Array | None = None,
    soft_cap: float | None = None,
) -> PartialAttention:
    """`decode` by `prefill_gathered`: its query is at the last position.

    Args:
        gate: `[rows, kv_heads, pages]` in (0, 1], multiplies the attention to each page before normalisation.
        soft_cap: as for `prefill_gathered`.
        q, keys, values, page_table, page_list, num_pages, window_start, context_length: as for `decode`.
    """
    positions = (page_table, page_list, num_pages, window_start[:, None], context_length - 1, context_length)
    part = prefill_gathered(q[:, :, :, None], keys, values, *positions, gate, soft_cap)
    return PartialAttention(part.out[:, :, :, 0], part.log_sum_exp[:, :, :, 0])
