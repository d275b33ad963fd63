"""Entropy of the next-token distribution: exact in one pass, and estimates from the k largest logits.

All functions take `[..., vocabulary]` and return `[...]`, in nats and float32; they are differentiable and
work under `jit` and `vmap`. Throughout, p = softmax(z), V is the size of the vocabulary, m the mass of the k
most probable tokens, m̄ = 1 − m, H̃ the entropy of those k renormalised, and
h(x) = −x ln x − (1 − x) ln(1 − x).

Exact entropy is the default: m needs the full log-sum-exp, and the exact entropy comes out of the same pass
over the logits. The estimators from the top k are kept for comparison.

Source: Kiruluta 2026, Entropic-Time Inference, arXiv 2603.03310; deviations are stated where they occur.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .pallas.entropy_moments import entropy_moments

LOWEST_TEMPERATURE = 1e-9  # smaller positive temperatures count as it; keeps gradients finite


class EntropyStatistics(NamedTuple):
    """Mean and variance of −ln p under p, and the log-normaliser; each `[...]`."""

    log_normaliser: jax.Array  # ln Σ exp z
    entropy: jax.Array  # nats, in [0, ln V]
    varentropy: jax.Array  # nats², ≥ 0: the variance of −ln p


def _statistics(
    logits: jax.Array, inverse_temperature: jax.Array | float, active: jax.Array | None
) -> EntropyStatistics:
    scale = jnp.broadcast_to(jnp.float32(inverse_temperature), logits.shape[:-1])
    highest, log_total, mean, square = entropy_moments(logits.astype(jnp.float32), scale, active)
    return EntropyStatistics(
        log_normaliser=highest * scale + log_total,
        entropy=log_total - mean,
        varentropy=jnp.maximum(square - mean * mean, 0.0),
    )


def entropy_statistics(logits: jax.Array, active: jax.Array | None = None) -> EntropyStatistics:
    """Exact entropy and varentropy of softmax(z).

        H = ln Σ exp d − Σ p d,   V = Σ p d² − (Σ p d)²,   d = z − max z

    One pass for the maximum, one for the sums. Masked tokens (−inf) have probability 0. A row without a
    distribution (every token masked, or a logit +inf or NaN) has entropy NaN; other rows are not affected.
    Gradients are finite, also with masked tokens and one-hot distributions. The rounding error of V is about
    1e-7 · max(1, Σ p d²).

    Args:
        logits: z, `[..., vocabulary]`.
        active: bool `[...]`, the rows to measure; those of others are 0. None measures all.

    Returns:
        H in nats and V in nats², float32 `[...]`.

    >>> import math
    >>> belief = entropy_statistics(jnp.zeros(8))
    >>> math.isclose(belief.entropy, math.log(8), rel_tol=1e-6), float(belief.varentropy)
    (True, 0.0)
    """
    return _statistics(logits, 1.0, active)


def at_temperature(
    logits: jax.Array, temperature: jax.Array | float, active: jax.Array | None = None
) -> EntropyStatistics:
    """Entropy H_T and varentropy V_T of softmax(z / T), with dH_T/d ln T = V_T.

    Differentiable in logits and temperature, at T = 0 with gradient 0.

    Args:
        logits: z, `[..., vocabulary]`.
        temperature: T ≥ 0, a number or `[...]`. Values in (0, 1e-9) count as 1e-9. At T = 0 the distribution
            is greedy: entropy and varentropy are 0, also where logits tie, and `log_normaliser` is 0.
        active: bool `[...]`, the rows to measure; those of others are 0. None measures all.

    Returns:
        As `entropy_statistics`.

    >>> logits = jnp.array([[0.0, 0.0], [0.0, 0.0]])
    >>> [round(x, 4) for x in at_temperature(logits, jnp.array([1.0, 0.0])).entropy.tolist()]
    [0.6931, 0.0]
    """
    temperature = jnp.asarray(temperature, jnp.float32)
    warm = temperature > 0
    divisor = jnp.maximum(jnp.where(warm, temperature, 1.0), LOWEST_TEMPERATURE)
    tempered = _statistics(logits, 1 / divisor, active)
    return jax.tree.map(lambda value: jnp.where(warm | jnp.isnan(tempered.entropy), value, 0.0), tempered)


def surprisal(logits: jax.Array, token: jax.Array, log_normaliser: jax.Array) -> jax.Array:
    """Surprisal of a token, −ln p(token) = ln Σ exp z − z[token], in nats, ≥ 0.

    Differentiable in logits and log_normaliser.

    Args:
        logits: z, `[..., vocabulary]`.
        token: int `[...]`, in [0, V). A masked token (−inf) has surprisal +inf.
        log_normaliser: `[...]`, as `entropy_statistics` returns it.

    >>> logits = jnp.log(jnp.array([0.25, 0.75]))
    >>> round(float(surprisal(logits, jnp.array(0), entropy_statistics(logits).log_normaliser)), 4)
    1.3863
    """
    logit = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return log_normaliser - logit.astype(jnp.float32)


def surrogate(logits: jax.Array) -> jax.Array:
    """The log-sum-exp surrogate of the entropy, in nats: ln Σ exp z − max z = −ln max p.

    logits `[..., vocabulary]`. In [0, H]: this is the Rényi entropy of order ∞ (min-entropy), a lower bound
    of the exact entropy that uniform and one-hot distributions reach. It saves the weighted sum of the exact
    entropy, not the pass over the logits. NaN where `entropy_statistics` is NaN. Gradients are finite; tied
    largest logits share the gradient. Source: Kiruluta 2026, arXiv 2603.03310. Differs from the paper, which
    leaves the surrogate open: this form is a certain bound.

    >>> round(float(surrogate(jnp.log(jnp.array([0.5, 0.25, 0.25])))), 4)
    0.6931
    """
    logits = logits.astype(jnp.float32)
    return jnp.log(jnp.sum(jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), axis=-1))


class TopKSummary(NamedTuple):
    """Summary of the k most probable tokens (the head) and of the mass of all others (the tail)."""

    head_mass: jax.Array  # m, in (0, 1]
    tail_mass: jax.Array  # m̄ = 1 − m, summed over the tail, without cancellation
    head_entropy: jax.Array  # H̃ in nats, of the renormalised head
    kth_probability: jax.Array  # p_k, the smallest probability in the head
    tail_size: jax.Array  # V − k


def top_k_summary(logits: jax.Array, k: int) -> TopKSummary:
    """Summarises the k most probable tokens of softmax(z).

    Differentiable wherever the k-th logit is not tied.

    Args:
        logits: z, `[..., vocabulary]`. No result depends on how ties at the k-th place are broken.
        k: tokens in the head; static.

    Raises:
        ValueError: for k outside [1, V].

    >>> summary = top_k_summary(jnp.log(jnp.array([0.5, 0.3, 0.1, 0.1])), 2)
    >>> round(float(summary.head_mass), 4), round(float(summary.kth_probability), 4), int(summary.tail_size)
    (0.8, 0.3, 2)
    """
    vocabulary = logits.shape[-1]
    if not 1 <= k <= vocabulary:
        raise ValueError(f"k must be between 1 and {vocabulary}, the size of the vocabulary; got {k}")
    logits = logits.astype(jnp.float32)
    largest = lax.top_k(logits, k)[0]
    # Minimum and maximum instead of slices: XLA's CPU backend sorts the vocabulary for a slice of top_k.
    highest = lax.stop_gradient(jnp.max(largest, axis=-1, keepdims=True))
    kth = lax.stop_gradient(jnp.min(largest, axis=-1, keepdims=True))
    ratios = jnp.exp(largest - highest)
    kth_ratio = jnp.min(ratios, axis=-1)
    # Tokens tied with the k-th lie on both sides of the cut: these are the ones in the tail.
    tied = jnp.sum(logits == kth, axis=-1) - jnp.sum(largest == kth, axis=-1)
    # NaN may sort last and so fall outside the head: it fails the comparison and reaches the sum.
    tail = jnp.sum(jnp.where(logits >= kth, 0.0, jnp.exp(logits - highest)), axis=-1)
    tail += tied.astype(jnp.float32) * kth_ratio
    head = jnp.sum(ratios, axis=-1)
    total = head + tail
    tail_size = jnp.full(total.shape, vocabulary - k, jnp.int32)
    head_entropy = jnp.where(jnp.isnan(total), jnp.nan, entropy_statistics(largest).entropy)
    return TopKSummary(head / total, tail / total, head_entropy, kth_ratio / total, tail_size)


def _information(probability: jax.Array) -> jax.Array:
    # −x ln x, with 0 and a finite gradient at 0.
    positive = probability > 0
    return jnp.where(positive, -probability * jnp.log(jnp.where(positive, probability, 1.0)), 0.0)


def _split_entropy(summary: TopKSummary) -> jax.Array:
    """h(m̄), nats."""
    return _information(summary.head_mass) + _information(summary.tail_mass)


def _uniform_tail(summary: TopKSummary) -> jax.Array:
    """m̄ ln(V − k), nats."""
    return summary.tail_mass * jnp.log(jnp.maximum(summary.tail_size, 1).astype(jnp.float32))


def truncated(summary: TopKSummary) -> jax.Array:
    """Entropy H̃ of the k most probable tokens renormalised, in nats: a lower bound of the exact entropy.

    It is a lower bound because the renormalised head majorises p. Equal to the exact entropy at k = V.

    >>> round(float(truncated(top_k_summary(jnp.zeros(8), 2))), 4)
    0.6931
    """
    return summary.head_entropy


def tail_corrected(summary: TopKSummary) -> jax.Array:
    """The paper's tail-corrected estimate, as printed, in nats: H̃ + h(m̄) + m̄ ln(V − k).

    An upper bound of the exact entropy, looser than `upper_bound` by m̄ · H̃. It can exceed ln V: for Zipf's
    law with exponent 0.8, 128256 tokens and k = 50 it is 14.05, where ln V is 11.76 and the exact entropy
    10.20. Kept for comparison; `upper_bound` is the corrected form. Gradients are finite. Source: Kiruluta
    2026, arXiv 2603.03310, as printed.

    >>> logits = jnp.zeros(8)
    >>> bool(tail_corrected(top_k_summary(logits, 2)) > entropy_statistics(logits).entropy + 0.5)
    True
    """
    return summary.head_entropy + _split_entropy(summary) + _uniform_tail(summary)


def upper_bound(summary: TopKSummary) -> jax.Array:
    """The tight upper bound of the entropy, in nats: h(m̄) + m H̃ + m̄ ln(V − k), at most ln V.

    Reached where the tail is uniform, by the chain rule H = h(m̄) + m H̃ + m̄ H_tail and H_tail ≤ ln(V − k).
    Differs from the paper (Kiruluta 2026, arXiv 2603.03310): H̃ is weighted by m, as the chain rule asks.

    >>> round(float(upper_bound(top_k_summary(jnp.zeros(8), 2))), 4)
    2.0794
    """
    return _split_entropy(summary) + summary.head_mass * summary.head_entropy + _uniform_tail(summary)


def lower_bound(summary: TopKSummary) -> jax.Array:
    """The tight lower bound of the entropy, in nats: h(m̄) + m H̃ + m̄ H_min(c), at least H̃.

        c = min(1, p_k / m̄),  H_min(c) = −n c ln c − r ln r,  n = ⌊1/c⌋,  r = 1 − n c

    No tail token is more probable than p_k, so the most concentrated tail has n tokens of conditional
    probability c and one of r; the bound is reached there. Differentiable almost everywhere (for constant n).
    Differs from the paper (Kiruluta 2026, arXiv 2603.03310), which has no lower bound but H̃.

    >>> round(float(lower_bound(top_k_summary(jnp.zeros(8), 2))), 4)
    2.0794
    """
    has_tail = summary.tail_mass > 0
    cap = jnp.minimum(
        jnp.where(has_tail, summary.kth_probability, 1.0) / jnp.where(has_tail, summary.tail_mass, 1.0), 1.0
    )
    # Where p_k and m̄ both round to 0, c would be 0: it is at least that of a uniform tail.
    cap = jnp.maximum(cap, 1 / jnp.maximum(summary.tail_size, 1).astype(jnp.float32))
    full = jnp.floor(1 / cap)
    rest = jnp.clip(1 - full * cap, 0.0, 1.0)
    tail = full * _information(cap) + _information(rest)
    return _split_entropy(summary) + summary.head_mass * summary.head_entropy + summary.tail_mass * tail


class Estimate(NamedTuple):
    """An entropy estimate with a certified error bound, both in nats."""

    entropy: jax.Array
    error: jax.Array


def midpoint(summary: TopKSummary) -> Estimate:
    """The middle of the tight bounds, with the certified error ε_H = (upper − lower) / 2, in nats.

    The exact entropy lies in [entropy − error, entropy + error], up to float32 rounding; the error is 0 at
    k = V. Differentiable as `lower_bound`.
    Differs from the paper (Kiruluta 2026, arXiv 2603.03310), whose estimate certifies no error.

    >>> estimate = midpoint(top_k_summary(jnp.array([4.0, 1.0, 1.0, 0.0]), 2))
    >>> exact = entropy_statistics(jnp.array([4.0, 1.0, 1.0, 0.0])).entropy
    >>> bool(abs(exact - estimate.entropy) <= estimate.error)
    True
    """
    upper, lower = upper_bound(summary), lower_bound(summary)
    return Estimate((upper + lower) / 2, jnp.maximum(upper - lower, 0.0) / 2)
