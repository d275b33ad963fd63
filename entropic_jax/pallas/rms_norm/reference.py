"""RMS normalisation in plain JAX; differentiable."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """The contract is in the package's docstring."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * scale).astype(x.dtype) * weight
