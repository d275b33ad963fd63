"""Activations of feed-forward blocks, by their names in `config.json`."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx


def gelu(x: jax.Array) -> jax.Array:
    """The Gaussian error linear unit x · Φ(x), exact (arXiv 1606.08415)."""
    return jax.nn.gelu(x, approximate=False)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """The approximation of `gelu` by a hyperbolic tangent."""
    return jax.nn.gelu(x, approximate=True)


def squared_relu(x: jax.Array) -> jax.Array:
    """The square of the rectified input, max(x, 0)² (Primer, arXiv 2109.08668)."""
    return jnp.square(jax.nn.relu(x))


FUNCTIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": jax.nn.relu,
    "relu2": squared_relu,
}


class XIELU(nnx.Module):
    """xIELU with its two learned slopes (arXiv 2411.13010).

    α_p x² + β x for x > 0, else α_n (e^min(x, ε) − 1 − x) + β x; α_p = softplus(`alpha_p`), α_n = β +
    softplus(`alpha_n`).
    """

    def __init__(self) -> None:
        self.alpha_p = nnx.Param(jnp.zeros(1))
        self.alpha_n = nnx.Param(jnp.zeros(1))
        self.beta = nnx.Param(jnp.zeros(()))
        self.eps = nnx.Param(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        beta, wide = self.beta[...].astype(jnp.float32), x.astype(jnp.float32)
        above = jax.nn.softplus(self.alpha_p[...].astype(jnp.float32))
        below = beta + jax.nn.softplus(self.alpha_n[...].astype(jnp.float32))
        negative = (jnp.expm1(jnp.minimum(wide, self.eps[...].astype(jnp.float32))) - wide) * below
        out = jnp.where(wide > 0, above * wide * wide, negative) + beta * wide
        return out.astype(x.dtype)


def clamped_swiglu(gate: jax.Array, up: jax.Array, alpha: float, limit: float) -> jax.Array:
    """The gated product (clip(up, ±limit) + 1) · g · sigmoid(α g), g = min(gate, limit), as in gpt-oss.

    Args:
        gate: `[..., inner]`.
        up: `[..., inner]`.
        alpha: α.
        limit: at which both are clamped.
    """
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)
