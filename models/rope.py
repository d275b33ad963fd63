"""Rotary position embedding, with the scalings that Llama checkpoints use.

Pair i of a head turns by the angle position · θ^(−2i/d). Pairs are (i, i + d/2), as in Hugging Face.
Su et al., RoFormer (2021; arXiv 2104.09864).
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
    cosine: jax.Array  # float32 [rows, positions, 1, head_dim / 2]
    sine: jax.Array


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Angle per position of each pair, in radians: float32 `[head_dim / 2]`.

    `linear` divides all by the factor. `llama3` divides those whose wavelength exceeds the original context
    over `low_freq_factor`, leaves those below it over `high_freq_factor`, and blends in between (Llama 3.1).
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = np.float32(1.0) / np.float32(theta) ** exponent
    if scaling is None:
        return plain
    if scaling.rope_type == "linear":
        return plain / np.float32(scaling.factor)
    turns = scaling.original_max_position_embeddings * plain / (2 * np.pi)  # over the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / max(high - low, 1e-9), 0.0, 1.0)
    return (kept * plain + (1.0 - kept) * plain / scaling.factor).astype(np.float32)


def rotation(positions: jax.Array, frequency: np.ndarray) -> Rotation:
    """Cosine and sine for int32 positions `[rows, n]`, shared by all layers and heads of a step."""
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequency
    return jax.lax.platform_dependent(angles, cpu=turn_once, default=turn)


def turn(angles: jax.Array) -> Rotation:
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def turn_once(angles: jax.Array) -> Rotation:
    """The same, out of a loop that runs once.

    XLA's CPU backend moves a cosine into whatever uses it, optimization_barrier or not, and computes it anew
    for every layer, head and half of a head: in prefill that can cost more than attention does. Out of a loop
    it cannot be moved, provided the compiler does not know how often the loop runs.
    """
    times = jnp.where(jnp.isnan(angles[0, 0, 0, 0]), 2, 1)
    empty = Rotation(jnp.zeros_like(angles), jnp.zeros_like(angles))
    return jax.lax.fori_loop(0, times, lambda _, __: turn(angles), empty)


def rotate(x: jax.Array, turn: Rotation) -> jax.Array:
    """Turn queries or keys `[rows, n, heads, head_dim]` to their positions; computed in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * turn.cosine - second * turn.sine, second * turn.cosine + first * turn.sine)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
