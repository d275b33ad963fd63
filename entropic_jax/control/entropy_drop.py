"""Entropy-drop predictor: how much the next token of a sequence is expected to lower the entropy.

The entropy H₁ of a sequence is modelled as a first-order autoregressive process, AR(1), whose parameters are
estimated online. The scheduler ranks sequences by the expected drop, see `scheduling.priority`.

Source: Kiruluta 2026, Entropic-Time Inference, arXiv 2603.03310, the expected irreversible entropy drop.
Differs from the paper, which does not say how the drop is predicted: AR(1) and the closed form are ours.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr

PRIOR_TOKENS = 8  # a sequence uses its own estimate after this many tokens; also the weight of the prior
LARGEST_ENTROPY = 100.0  # nats; no vocabulary reaches it, and its square is far from overflow
LARGEST_CORRELATION = 0.99
SMALLEST_SCALE = 1e-6  # nats; keeps the ratio d / σ and its gradient finite for constant series


class AR1(NamedTuple):
    """Parameters of H' = μ + ρ (H − μ) + σ ε with ε ~ N(0, 1); scalars, or one entry per row.

    H is the entropy of the last token and H' that of the next one, both in nats.
    """

    mean: jax.Array | float  # μ, nats
    scale: jax.Array | float  # σ of the innovations, nats, > 0
    correlation: jax.Array | float  # ρ, in [−0.99, 0.99]


PRIOR = AR1(mean=2.0, scale=1.5, correlation=0.2)  # typical text, used until tokens were observed


class EntropyPredictor(NamedTuple):
    """Running moments of H₁ and of consecutive pairs (H[t−1], H[t]); each `[rows]`, float32 except counts."""

    num_tokens: jax.Array  # int32, tokens observed
    last: jax.Array  # H₁ of the newest token
    mean_before: jax.Array  # mean of all tokens but the newest
    mean_after: jax.Array  # mean of all tokens but the first
    variance_before: jax.Array  # of the tokens behind `mean_before`, nats²
    variance_after: jax.Array
    covariance: jax.Array  # of consecutive tokens


def new_predictor(rows: int) -> EntropyPredictor:
    """The predictor before the first token."""
    zero = jnp.zeros(rows, jnp.float32)
    return EntropyPredictor(jnp.zeros(rows, jnp.int32), zero, zero, zero, zero, zero, zero)


def update_predictor(
    predictor: EntropyPredictor, entropy: jax.Array, emitting: jax.Array
) -> EntropyPredictor:
    """Add the entropy of the newest token of each emitting row.

    Moments are updated from residuals (Welford's method), so nothing cancels in long sequences.

    Args:
        predictor: the moments so far.
        entropy: H₁ of the newest token, nats, `[rows]`. Non-finite values are skipped; others are clipped to
            [0, 100].
        emitting: bool `[rows]`, the rows that emitted a token.

    Returns:
        The updated predictor; rows that emit nothing are unchanged.

    >>> after = update_predictor(new_predictor(2), jnp.array([3.0, 5.0]), jnp.array([True, False]))
    >>> after.num_tokens.tolist(), after.last.tolist()
    ([1, 0], [3.0, 0.0])
    """
    emitting = emitting & jnp.isfinite(entropy)
    newest = jnp.clip(jnp.where(emitting, entropy, 0.0), 0.0, LARGEST_ENTROPY)
    # There are `num_tokens` pairs with the new token; the second token overwrites what the first one left.
    rate = 1 / jnp.maximum(predictor.num_tokens, 1).astype(jnp.float32)
    before_residual, after_residual = predictor.last - predictor.mean_before, newest - predictor.mean_after
    before, after = (
        predictor.mean_before + rate * before_residual,
        predictor.mean_after + rate * after_residual,
    )

    def running(old: jax.Array, new: jax.Array) -> jax.Array:
        return old + rate * (new - old)

    updated = EntropyPredictor(
        num_tokens=predictor.num_tokens + 1,
        last=newest,
        mean_before=before,
        mean_after=after,
        variance_before=running(predictor.variance_before, before_residual * (predictor.last - before)),
        variance_after=running(predictor.variance_after, after_residual * (newest - after)),
        covariance=running(predictor.covariance, before_residual * (newest - after)),
    )
    return jax.tree.map(lambda new, old: jnp.where(emitting, new, old), updated, predictor)


def _ar1_from_moments(mean, variance_before, variance_after, covariance) -> AR1:
    geometric_mean = jnp.sqrt(jnp.maximum(variance_before * variance_after, SMALLEST_SCALE**4))
    correlation = jnp.clip(covariance / geometric_mean, -LARGEST_CORRELATION, LARGEST_CORRELATION)
    unexplained = variance_after * (1 - correlation**2)
    return AR1(mean, jnp.sqrt(jnp.maximum(unexplained, SMALLEST_SCALE**2)), correlation)


def _pooled_ar1(predictor: EntropyPredictor, pairs: jax.Array, prior: AR1) -> AR1:
    """AR(1) over the pairs of all sequences, within and between them; the prior counts as one sequence."""
    prior_variance = prior.scale**2 / (1 - prior.correlation**2)
    weight = jnp.append(pairs, float(PRIOR_TOKENS))

    def mean(x: jax.Array) -> jax.Array:
        return jnp.sum(weight * x) / jnp.sum(weight)

    def covariance(within, of_prior, x: jax.Array, y: jax.Array) -> jax.Array:
        return mean(jnp.append(within, of_prior) + (x - mean(x)) * (y - mean(y)))

    before = jnp.append(predictor.mean_before, prior.mean)
    after = jnp.append(predictor.mean_after, prior.mean)
    return _ar1_from_moments(
        (mean(before) + mean(after)) / 2,
        covariance(predictor.variance_before, prior_variance, before, before),
        covariance(predictor.variance_after, prior_variance, after, after),
        covariance(predictor.covariance, prior.correlation * prior_variance, before, after),
    )


def ar1_parameters(predictor: EntropyPredictor, prior: AR1) -> AR1:
    """AR(1) parameters of each row, `[rows]`; during its first 8 tokens those of all rows pooled.

        μ = mean H,   ρ = corr(H[t−1], H[t]),   σ² = Var H · (1 − ρ²)

    ρ lies in [−0.99, 0.99] and σ is at least 1e-6 nats, so both are finite for constant series too. In the
    pool, the prior has the weight of 8 tokens. Differentiable in the entropies and the prior.

    >>> first = ar1_parameters(new_predictor(1), AR1(2.0, 1.0, 0.5))
    >>> [round(float(x[0]), 3) for x in first]
    [2.0, 1.0, 0.5]
    """
    pairs = jnp.maximum(predictor.num_tokens - 1, 0).astype(jnp.float32)
    per_row = _ar1_from_moments(
        (predictor.mean_before * pairs + predictor.last) / (pairs + 1),
        predictor.variance_before,
        predictor.variance_after,
        predictor.covariance,
    )
    pooled = _pooled_ar1(predictor, pairs, prior)
    return jax.tree.map(lambda x, y: jnp.where(predictor.num_tokens > PRIOR_TOKENS, x, y), per_row, pooled)


def expected_drop(entropy: jax.Array, process: AR1) -> jax.Array:
    """E[ΔH⁺]: the expected fall of the entropy at the next token, rises counted as 0; nats, ≥ 0.

        E[max(0, H − H')] = d Φ(d/σ) + σ φ(d/σ),   d = (1 − ρ)(H − μ)

    with Φ and φ the standard normal distribution and density; H' may be negative under this model.
    Differentiable: the slope in d is Φ(d/σ), in σ it is φ(d/σ). A σ below 1e-6 counts as 1e-6.

    >>> round(float(expected_drop(jnp.float32(2.0), AR1(2.0, 1.0, 0.0))), 4)  # 1 / √(2π)
    0.3989
    """
    scale = jnp.maximum(process.scale, SMALLEST_SCALE)
    mean = (1 - process.correlation) * (entropy - process.mean)
    ratio = mean / scale
    density = jnp.exp(-0.5 * ratio**2) / (2 * jnp.pi) ** 0.5
    return jnp.maximum(mean * ndtr(ratio) + scale * density, 0.0)


def predicted_drop(predictor: EntropyPredictor, prior: AR1) -> jax.Array:
    """E[ΔH⁺] of every row from its observed tokens, nats `[rows]`; before the first token with H = μ.

    >>> round(float(predicted_drop(new_predictor(1), AR1(2.0, 1.0, 0.0))[0]), 4)
    0.3989
    """
    process = ar1_parameters(predictor, prior)
    entropy = jnp.where(predictor.num_tokens > 0, predictor.last, process.mean)
    return expected_drop(entropy, process)
