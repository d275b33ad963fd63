"""Entropy of the next-token distribution: exact in one pass, and what the k largest logits say of it.

Everything is in nats and float32, `[..., vocabulary]` in and `[...]` out, differentiable, clean under `jit`
and `vmap`. Throughout, p = softmax(z), V is the size of the vocabulary, m the mass of the k most probable
tokens, m̄ = 1 − m, H̃ the entropy of those k renormalised, and h(x) = −x ln x − (1 − x) ln(1 − x).

The exact measure is the default: m needs the full log-sum-exp, so the head is never free, and exact entropy
comes out of the same pass. The estimators from the head are kept as choices, for comparison.

Source: Kiruluta 2026, Entropic-Time Inference, arXiv 2603.03310; deviations are stated where they occur.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .pallas.entropy_moments import entropy_moments

LOWEST_TEMPERATURE = 1e-9  # above 0; what is colder counts as this, so that gradients stay finite


class Entropy(NamedTuple):
    """The first two moments of −ln p under p."""

    log_normaliser: jax.Array  # ln Σ exp z
    entropy: jax.Array  # nats, in [0, ln V]
    varentropy: jax.Array  # nats², ≥ 0: the variance of −ln p


def _measure(logits: jax.Array, inverse_temperature: jax.Array | float) -> Entropy:
    scale = jnp.broadcast_to(jnp.float32(inverse_temperature), logits.shape[:-1])
    highest, log_total, mean, square = entropy_moments(logits.astype(jnp.float32), scale)
    return Entropy(
        log_normaliser=highest * scale + log_total,
        entropy=log_total - mean,
        varentropy=jnp.maximum(square - mean * mean, 0.0),
    )


def measure(logits: jax.Array) -> Entropy:
    """Exact entropy and varentropy of softmax(z), float32 `[...]` from logits `[..., vocabulary]`.

        H = ln Σ exp d − Σ p d,   V = Σ p d² − (Σ p d)²,   d = z − max z

    Nats and nats². One pass for the maximum, one for the sums. Masked tokens (−inf) count for nothing; where
    every token is masked, or one is +inf or NaN, there is no distribution and the entropy of that row alone
    is NaN. Gradients are finite, with masked tokens and one-hot distributions too. The rounding error of V is
    some 1e-7 · max(1, Σ p d²).

    >>> import math
    >>> belief = measure(jnp.zeros(8))
    >>> math.isclose(belief.entropy, math.log(8), rel_tol=1e-6), float(belief.varentropy)
    (True, 0.0)
    """
    return _measure(logits, 1.0)


def at_temperature(logits: jax.Array, temperature: jax.Array | float) -> Entropy:
    """Entropy H_T and varentropy V_T of softmax(z / T), with dH_T/d ln T = V_T.

    logits `[..., vocabulary]`, temperature ≥ 0, a number or `[...]`. Where T is 0 the distribution is greedy:
    entropy and varentropy are 0 (also where logits tie, as the first of them is taken), and log_normaliser,
    whose limit does not exist, is 0. Temperatures in (0, 1e-9) count as 1e-9. Otherwise as `measure`;
    differentiable in logits and temperature, at T = 0 with gradient 0.

    >>> logits = jnp.array([[0.0, 0.0], [0.0, 0.0]])
    >>> [round(x, 4) for x in at_temperature(logits, jnp.array([1.0, 0.0])).entropy.tolist()]
    [0.6931, 0.0]
    """
    temperature = jnp.asarray(temperature, jnp.float32)
    warm = temperature > 0
    divisor = jnp.maximum(jnp.where(warm, temperature, 1.0), LOWEST_TEMPERATURE)
    tempered = _measure(logits, 1 / divisor)
    return jax.tree.map(lambda value: jnp.where(warm | jnp.isnan(tempered.entropy), value, 0.0), tempered)


def surprisal(logits: jax.Array, token: jax.Array, log_normaliser: jax.Array) -> jax.Array:
    """−ln p(token) in nats, ≥ 0: ln Σ exp z − z[token].

    logits `[..., vocabulary]`, token int `[...]` in [0, V), log_normaliser `[...]` as `measure` returns it. A
    masked token (−inf) has surprisal +inf. Differentiable in logits and log_normaliser.

    >>> logits = jnp.log(jnp.array([0.25, 0.75]))
    >>> round(float(surprisal(logits, jnp.array(0), measure(logits).log_normaliser)), 4)
    1.3863
    """
    chosen = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return log_normaliser - chosen.astype(jnp.float32)


def surrogate(logits: jax.Array) -> jax.Array:
    """The log-sum-exp surrogate of the entropy, in nats: ln Σ exp z − max z = −ln max p.

    logits `[..., vocabulary]`. In [0, H]: it is the Rényi entropy of order ∞ (the min-entropy), so a lower
    bound of the exact entropy, reached by uniform and by one-hot distributions; it saves the weighted sum of
    the exact measure, not the pass over the logits. NaN where `measure` is NaN. Gradients are finite; where
    the largest logit is tied, the tied ones share its gradient.
    Source: Kiruluta 2026, arXiv 2603.03310. Differs from the paper: of what may be called so, this is the
    form that is certain to be a bound.

    >>> round(float(surrogate(jnp.log(jnp.array([0.5, 0.25, 0.25])))), 4)
    0.6931
    """
    logits = logits.astype(jnp.float32)
    return jnp.log(jnp.sum(jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), axis=-1))


class Head(NamedTuple):
    """What the k most probable tokens say, and the mass they leave to the others."""

    mass: jax.Array  # m, in (0, 1]
    tail: jax.Array  # m̄ = 1 − m, summed over the tail, without cancellation
    entropy: jax.Array  # H̃ in nats, of the head renormalised
    least: jax.Array  # p_k, the probability of the k-th token
    others: jax.Array  # V − k


def head(logits: jax.Array, k: int) -> Head:
    """The k most probable tokens of softmax(z), summarised; k is static.

    logits `[..., vocabulary]`. Ties at the k-th place are split as they come: no result depends on which.
    Differentiable wherever the k-th logit is not tied. Raises ValueError for k outside [1, V].

    >>> summary = head(jnp.log(jnp.array([0.5, 0.3, 0.1, 0.1])), 2)
    >>> round(float(summary.mass), 4), round(float(summary.least), 4), int(summary.others)
    (0.8, 0.3, 2)
    """
    vocabulary = logits.shape[-1]
    if not 1 <= k <= vocabulary:
        raise ValueError(f"k is {k}; accepted are 1 to {vocabulary}, the size of the vocabulary")
    logits = logits.astype(jnp.float32)
    largest = lax.top_k(logits, k)[0]
    # Not by slicing: where XLA's CPU backend sees a slice of top_k, it sorts the vocabulary instead.
    highest = lax.stop_gradient(jnp.max(largest, axis=-1, keepdims=True))
    last = lax.stop_gradient(jnp.min(largest, axis=-1, keepdims=True))
    ratios = jnp.exp(largest - highest)
    least = jnp.min(ratios, axis=-1)
    # Tokens tied with the k-th stand on both sides of the cut.
    tied = jnp.sum(logits == last, axis=-1) - jnp.sum(largest == last, axis=-1)
    # NaN may sort last, and not be of the head: it fails the comparison, and so reaches the sum.
    below = jnp.sum(jnp.where(logits >= last, 0.0, jnp.exp(logits - highest)), axis=-1)
    below += tied.astype(jnp.float32) * least
    above = jnp.sum(ratios, axis=-1)
    total = above + below
    others = jnp.full(total.shape, vocabulary - k, jnp.int32)
    entropy = jnp.where(jnp.isnan(total), jnp.nan, measure(largest).entropy)
    return Head(above / total, below / total, entropy, least / total, others)


def _information(probability: jax.Array) -> jax.Array:
    # −x ln x, with 0 and a finite gradient at 0.
    positive = probability > 0
    return jnp.where(positive, -probability * jnp.log(jnp.where(positive, probability, 1.0)), 0.0)


def _split(head: Head) -> jax.Array:
    return _information(head.mass) + _information(head.tail)


def _flattest_tail(head: Head) -> jax.Array:
    return head.tail * jnp.log(jnp.maximum(head.others, 1).astype(jnp.float32))


def truncated(head: Head) -> jax.Array:
    """Entropy of the k most probable tokens renormalised, H̃, in nats: a lower bound of the exact entropy.

    A lower bound because the renormalised head majorises p. Equal to the exact entropy at k = V.

    >>> round(float(truncated(head(jnp.zeros(8), 2))), 4)
    0.6931
    """
    return head.entropy


def tail_corrected(head: Head) -> jax.Array:
    """The paper's tail-corrected estimate, as printed, in nats: H̃ + h(m̄) + m̄ ln(V − k).

    An upper bound of the exact entropy, looser than `upper_bound` by m̄ · H̃: it can exceed ln V, and does for
    Zipf's law with exponent 0.8, 128256 tokens and k = 50 (14.05 where ln V is 11.76 and the exact entropy
    10.20). As printed in Kiruluta 2026, arXiv 2603.03310; kept by name for comparison. `upper_bound` is the
    corrected form. Gradients are finite.

    >>> logits = jnp.zeros(8)
    >>> bool(tail_corrected(head(logits, 2)) > measure(logits).entropy + 0.5)
    True
    """
    return head.entropy + _split(head) + _flattest_tail(head)


def upper_bound(head: Head) -> jax.Array:
    """The tight upper bound of the entropy, in nats: h(m̄) + m H̃ + m̄ ln(V − k), at most ln V.

    Reached where the tail is uniform, by the chain rule H = h(m̄) + m H̃ + m̄ H_tail and H_tail ≤ ln(V − k).
    Differs from the paper (Kiruluta 2026, arXiv 2603.03310): H̃ is weighted by m, as the chain rule asks.

    >>> round(float(upper_bound(head(jnp.zeros(8), 2))), 4)
    2.0794
    """
    return _split(head) + head.mass * head.entropy + _flattest_tail(head)


def lower_bound(head: Head) -> jax.Array:
    """The tight lower bound of the entropy, in nats: h(m̄) + m H̃ + m̄ H_min(c), at least H̃.

        c = min(1, p_k / m̄),  H_min(c) = −n c ln c − r ln r,  n = ⌊1/c⌋,  r = 1 − n c

    No token of the tail is more probable than p_k, so the most concentrated tail has n tokens of conditional
    probability c and one of r: the bound is reached there. Differentiable almost everywhere, in the pieces of
    constant n.
    Differs from the paper (Kiruluta 2026, arXiv 2603.03310), which has no lower bound but H̃.

    >>> round(float(lower_bound(head(jnp.zeros(8), 2))), 4)
    2.0794
    """
    some = head.tail > 0
    cap = jnp.minimum(jnp.where(some, head.least, 1.0) / jnp.where(some, head.tail, 1.0), 1.0)
    # Where p_k and m̄ both round to nothing, c would be 0: it is at least that of a uniform tail.
    cap = jnp.maximum(cap, 1 / jnp.maximum(head.others, 1).astype(jnp.float32))
    count = jnp.floor(1 / cap)
    rest = jnp.clip(1 - count * cap, 0.0, 1.0)
    tail = count * _information(cap) + _information(rest)
    return _split(head) + head.mass * head.entropy + head.tail * tail


class Estimate(NamedTuple):
    """An entropy in nats, and the error it is certain not to exceed."""

    entropy: jax.Array
    error: jax.Array


def midpoint(head: Head) -> Estimate:
    """The middle of the tight bounds, with the certified error ε_H = (upper − lower) / 2, in nats.

    The exact entropy lies in [entropy − error, entropy + error], up to float32 rounding; the error is 0 at
    k = V. Differentiable as `lower_bound`.
    Differs from the paper (Kiruluta 2026, arXiv 2603.03310), whose estimate certifies no error.

    >>> estimate = midpoint(head(jnp.array([4.0, 1.0, 1.0, 0.0]), 2))
    >>> exact = measure(jnp.array([4.0, 1.0, 1.0, 0.0])).entropy
    >>> bool(abs(exact - estimate.entropy) <= estimate.error)
    True
    """
    upper, lower = upper_bound(head), lower_bound(head)
    return Estimate((upper + lower) / 2, jnp.maximum(upper - lower, 0.0) / 2)
