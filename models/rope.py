"""Rotary position embedding (RoPE), with the scalings that Llama checkpoints use.

Pair i of a head rotates by the angle position · θ^(−2i/d). Pairs are (i, i + d/2), as in Hugging Face.

Source: Su et al., RoFormer (2021; arXiv 2104.09864).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class RopeScaling(NamedTuple):
    """How frequencies are lowered for a longer context; field names as in config.json."""

    rope_type: str  # "linear" or "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def to_json(self) -> dict[str, Any]:
        return (
            {"rope_type": "linear", "factor": self.factor} if self.rope_type == "linear" else self._asdict()
        )


class Rotation(NamedTuple):
    """Cosines and sines of the rotation angles."""

    cosine: jax.Array  # float32 [rows, positions, 1, head_dim / 2]
    sine: jax.Array  # as `cosine`


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """The angle per position of each pair.

    Args:
        head_dim: d, even.
        theta: θ, the base.
        scaling: how frequencies are lowered for longer contexts. `linear` divides all by the factor. `llama3`
            divides those whose wavelength exceeds the original context over `low_freq_factor`, keeps those
            below it over `high_freq_factor`, and blends in between (Llama 3.1).

    Returns:
        Radians, float32 `[head_dim / 2]`.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    unscaled = np.float32(1.0) / np.float32(theta) ** exponent
    if scaling is None:
        return unscaled
    if scaling.rope_type == "linear":
        return unscaled / np.float32(scaling.factor)
    rotations = scaling.original_max_position_embeddings * unscaled / (2 * np.pi)  # over the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    weight = np.clip((rotations - low) / max(high - low, 1e-9), 0.0, 1.0)
    return (weight * unscaled + (1.0 - weight) * unscaled / scaling.factor).astype(np.float32)


def rope_rotation(positions: jax.Array, frequency: np.ndarray) -> Rotation:
    """The rotation of int32 positions `[rows, n]`, shared by all layers and heads of a step."""
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequency
    return jax.lax.platform_dependent(angles, cpu=cos_sin_in_loop, default=cos_sin)


def cos_sin(angles: jax.Array) -> Rotation:
    """Cosine and sine of the angles."""
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def cos_sin_in_loop(angles: jax.Array) -> Rotation:
    """`cos_sin`, computed by a loop that runs once.

    XLA's CPU backend moves a cosine into its consumers, optimization_barrier or not, and recomputes it for
    every layer, head and half of a head: in prefill that can cost more than attention. It cannot be moved out
    of a loop, provided that the compiler does not know how often the loop runs.
    """
    iterations = jnp.where(jnp.isnan(angles[0, 0, 0, 0]), 2, 1)
    empty = Rotation(jnp.zeros_like(angles), jnp.zeros_like(angles))
    return jax.lax.fori_loop(0, iterations, lambda _, __: cos_sin(angles), empty)


def apply_rope(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotates queries or keys `[rows, n, heads, head_dim]` to their positions; computed in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (
        first * rotation.cosine - second * rotation.sine,
        second * rotation.cosine + first * rotation.sine,
    )
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
