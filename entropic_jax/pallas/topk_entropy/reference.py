"""The most probable tokens and the entropies in plain JAX: the kernels' reference and fallback."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Temperatures are clipped to these, so that neither a square nor a gradient overflows.
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-9, 1e9


class Moments(NamedTuple):
    """The first two moments of −ln p under p = softmax(z / T); the fields of `entropy.Entropy`."""

    log_normaliser: jax.Array  # ln Σ exp(z / T)
    entropy: jax.Array  # nats
    varentropy: jax.Array  # nats²


class Head(NamedTuple):
    """Summary of the k most probable tokens; the fields are those of `entropy.TopKSummary`."""

    head_mass: jax.Array  # m
    tail_mass: jax.Array  # m̄ = 1 − m, summed over the tail
    head_entropy: jax.Array  # H̃ in nats, of the renormalised head
    kth_probability: jax.Array  # p_k
    tail_size: jax.Array  # int32, V − k


class TopkEntropy(NamedTuple):
    """The k largest logits of each row, and the moments at two temperatures."""

    values: jax.Array  # float32 [rows, k], descending
    indices: jax.Array  # int32 [rows, k]
    calibrated: Moments  # [rows], at the calibration temperature
    tempered: Moments  # [rows], at the temperature of each row
    head: Head  # [rows], at the calibration temperature


def inverse(temperature: jax.Array) -> jax.Array:
    """1 / T, or 1 where T is not above 0; `where_warm` replaces the results there."""
    warm = jnp.where(temperature > 0, temperature, 1.0)
    return 1 / jnp.clip(warm, LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE)


def where_warm(temperature: jax.Array, tempered: Moments) -> Moments:
    """Zeros where T is 0, which is greedy. A row that is not a distribution stays NaN."""
    keep = (temperature > 0) | jnp.isnan(tempered.entropy)
    return jax.tree.map(lambda value: jnp.where(keep, value, 0.0), tempered)


def topk_entropy(logits: jax.Array, k: int, temperature: jax.Array, calibration: jax.Array) -> TopkEntropy:
    """See the package; any k up to the vocabulary. Differentiable wherever the k-th logit is not tied."""
    logits = logits.astype(jnp.float32)
    values, indices = _largest(logits, k)
    calibrated = _moments(logits, inverse(calibration))
    tempered = where_warm(temperature, _moments(logits, inverse(temperature)))
    head = _head(logits, values, indices, inverse(calibration))
    none = jnp.isnan(calibrated.entropy)
    head = jax.tree.map(
        lambda value: jnp.where(none, jnp.nan, value), head._replace(tail_size=head.head_mass)
    )
    tail_size = jnp.full(none.shape, logits.shape[-1] - k, jnp.int32)
    return TopkEntropy(values, indices, calibrated, tempered, head._replace(tail_size=tail_size))


def project(
    hidden: jax.Array, weight: jax.Array, k: int, temperature: jax.Array, calibration: jax.Array
) -> TopkEntropy:
    """`topk_entropy` of the logits `hidden @ weight`, summed in float32."""
    logits = jnp.matmul(hidden, weight, precision=exactly(hidden.dtype), preferred_element_type=jnp.float32)
    return topk_entropy(logits, k, temperature, calibration)


def exactly(dtype: jnp.dtype) -> lax.Precision | None:
    """The precision of a product in float32, which a TPU would otherwise round to bfloat16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _largest(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    # NaN is excluded, and −0 ties with 0. Values are taken from the logits again, for the gradient.
    candidates = jnp.where(jnp.isnan(logits), -jnp.inf, jnp.where(logits == 0, 0.0, logits))
    largest, indices = lax.top_k(lax.stop_gradient(candidates), k)
    real = largest > -jnp.inf
    values = jnp.where(real, jnp.take_along_axis(logits, indices, axis=-1), -jnp.inf)
    return values, jnp.where(real, indices, logits.shape[-1])


def _moments(logits: jax.Array, inverse_temperature: jax.Array) -> Moments:
    highest = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    # Masked tokens are replaced before and after the exponential: 0 · ln 0 = 0, in gradients too.
    masked = logits == -jnp.inf
    scaled = jnp.where(masked, 0.0, logits - highest) * inverse_temperature[..., None]
    ratio = jnp.where(masked, 0.0, jnp.exp(scaled))
    scaled = jnp.where(ratio > 0, scaled, 0.0)
    total = jnp.sum(ratio, axis=-1)
    mean = jnp.sum(ratio * scaled, axis=-1) / total
    square = jnp.sum(ratio * scaled * scaled, axis=-1) / total
    log_total = jnp.log(total)
    return Moments(
        log_normaliser=highest[..., 0] * inverse_temperature + log_total,
        entropy=log_total - mean,
        varentropy=jnp.maximum(square - mean * mean, 0.0),
    )


def _head(logits: jax.Array, values: jax.Array, indices: jax.Array, inverse_temperature: jax.Array) -> Head:
    scale = inverse_temperature[..., None]
    highest = lax.stop_gradient(values[..., :1])
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    ratio = jnp.exp((values - highest) * scale)
    last, place = lax.stop_gradient(values[..., -1:]), indices[..., -1:]
    index = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    # NaN fails both comparisons, and so reaches the sum.
    inside = (logits > last) | ((logits == last) & (index <= place))
    below = jnp.sum(jnp.where(inside, 0.0, jnp.exp((logits - highest) * scale)), axis=-1)
    above = jnp.sum(ratio, axis=-1)
    total = above + below
    entropy = _moments(values, inverse_temperature).entropy
    return Head(above / total, below / total, entropy, ratio[..., -1] / total, above)
