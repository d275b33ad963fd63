"""Entropy moments in plain JAX; differentiable."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Moments(NamedTuple):
    """Moments of d = (z − max z) / T under softmax(d), each `[rows]`."""

    highest: jax.Array  # max z; 0 where it is not finite
    log_total: jax.Array  # ln Σ exp d
    mean: jax.Array  # Σ p d
    square: jax.Array  # Σ p d²


def entropy_moments(logits: jax.Array, inverse_temperature: jax.Array, active: jax.Array) -> Moments:
    """The contract is in the package's docstring."""
    highest = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    # Masked tokens are replaced before and after the exponential, so that 0 · ln 0 = 0 in gradients too.
    masked = logits == -jnp.inf
    scaled = jnp.where(masked, 0.0, logits - highest) * inverse_temperature[:, None]
    ratio = jnp.where(masked, 0.0, jnp.exp(scaled))
    scaled = jnp.where(ratio > 0, scaled, 0.0)
    total = jnp.sum(ratio, axis=-1)
    mean = jnp.sum(ratio * scaled, axis=-1) / total
    square = jnp.sum(ratio * scaled * scaled, axis=-1) / total
    moments = Moments(highest[:, 0], jnp.log(total), mean, square)
    return Moments(*(jnp.where(active, x, 0.0) for x in moments))
