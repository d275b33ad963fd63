"""Rotary position embedding (RoPE) and its scalings for contexts beyond the one of training.

Pair i of a head rotates by the angle position · θ^(−2i/d). Pairs are (i, i + d/2), as in Hugging Face's
Llama, or (2i, 2i + 1) where a family interleaves them. d may be a part of a head; the rest is not rotated.

Source: Su et al., RoFormer (2021; arXiv 2104.09864). Scalings: position interpolation ("linear", Chen et al.
2023, arXiv 2306.15595), NTK-aware ("dynamic"), YaRN (Peng et al. 2023, arXiv 2309.00071), LongRoPE (Ding et
al. 2024, arXiv 2402.13753), and that of Llama 3.1 ("llama3").
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

FIELDS = {  # of each kind of scaling, in config.json: those that must be there, those that may
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        ("short_factor", "long_factor", "original_max_position_embeddings"),
        ("attention_factor", "factor"),
    ),
}


class RopeScaling(NamedTuple):
    """How frequencies are lowered for a longer context; field names as in config.json."""

    rope_type: str  # a key of FIELDS
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float | None = None  # multiplies queries and keys; None for that of the kind's paper
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The fields of this kind, as in config.json."""
        required, extra = FIELDS[self.rope_type]
        values = {name: getattr(self, name) for name in (*required, *extra)}
        listed = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v is not None}
        return {"rope_type": self.rope_type, **listed}

    @property
    def magnitude(self) -> float:
        """The factor by which rotated queries and keys are multiplied."""
        if self.rope_type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type == "longrope":
            original = math.log(self.original_max_position_embeddings)
            return math.sqrt(1 + math.log(self.factor) / original) if self.factor > 1 else 1.0
        if self.mscale and self.mscale_all_dim:
            return yarn_magnitude(self.factor, self.mscale) / yarn_magnitude(self.factor, self.mscale_all_dim)
        return yarn_magnitude(self.factor)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """0.1 · weight · ln(factor) + 1, or 1 for a factor of at most 1 (YaRN, equation 22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


class RopeSpec(NamedTuple):
    """The rotation of a layer's queries and keys."""

    dim: int  # numbers of a head that rotate: even, the first ones
    theta: float  # θ, the base
    scaling: RopeScaling | None = None
    interleaved: bool = False  # whether pairs are neighbours


def rope_problem(rope: RopeSpec) -> str | None:
    """The error message for a rotation that cannot be computed; None for one that can."""
    scaling = rope.scaling
    if scaling is None:
        return None
    kind, original, pairs = scaling.rope_type, scaling.original_max_position_embeddings, rope.dim // 2
    if kind == "longrope":
        for name, factors in (("short_factor", scaling.short_factor), ("long_factor", scaling.long_factor)):
            if len(factors) != pairs:
                return f"rope_scaling.{name} must have {pairs} numbers, one a pair; got {len(factors)}"
    if kind in ("yarn", "longrope") and original <= 1:
        name = "original_max_position_embeddings"
        return f"rope_scaling.{name} must be above 1 with {kind!r}; got {original}"
    if kind == "yarn" and rope.theta <= 1:
        return f"rope_theta must be above 1 with 'yarn'; got {rope.theta}"
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if kind == "llama3" and low > high:
        return f"rope_scaling.low_freq_factor must be at most high_freq_factor, {high}; got {low}"
    if kind == "dynamic" and pairs < 2:
        return f"head_dim must have more than one rotated pair with 'dynamic'; got {pairs}"
    return None


def context_key(rope: RopeSpec, length: int) -> tuple[int, ...]:
    """A key that is equal for texts whose common prefix is rotated alike when they are prefilled.

    Args:
        rope: a layer's rotary embedding.
        length: tokens of the text.

    Returns:
        () where the rotation of a token depends on its position alone.
    """
    scaling = rope.scaling
    if scaling is None or scaling.rope_type not in ("dynamic", "longrope"):
        return ()
    original = scaling.original_max_position_embeddings
    return (max(length, original) if scaling.rope_type == "dynamic" else int(length > original),)


class Rotation(NamedTuple):
    """Cosines and sines of the rotation angles."""

    cosine: jax.Array  # float32 [rows, positions, 1, dim / 2]
    sine: jax.Array  # as `cosine`


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """The angle per position of each pair, in a context within the original one.

    Args:
        head_dim: d, even.
        theta: θ, the base.
        scaling: how frequencies are lowered for longer contexts. `linear` divides all by the factor. `llama3`
            divides those whose wavelength exceeds the original context over `low_freq_factor`, keeps those
            below it over `high_freq_factor`, and blends in between (Llama 3.1). `yarn` does the same between
            the pairs that turn `beta_slow` and `beta_fast` times in the original context. `longrope` divides
            each pair by its own short factor. `dynamic` changes nothing here.

    Returns:
        Radians, float32 `[head_dim / 2]`.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    unscaled = np.float32(1.0) / np.float32(theta) ** exponent
    if scaling is None or scaling.rope_type == "dynamic":
        return unscaled
    if scaling.rope_type == "linear":
        return unscaled / np.float32(scaling.factor)
    if scaling.rope_type == "longrope":
        return unscaled / np.asarray(scaling.short_factor, np.float32)
    if scaling.rope_type == "yarn":
        weight = yarn_weight(head_dim, theta, scaling)
    else:
        rotations = scaling.original_max_position_embeddings * unscaled / (2 * np.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        weight = np.clip((rotations - low) / max(high - low, 1e-9), 0.0, 1.0)
    return (weight * unscaled + (1.0 - weight) * unscaled / scaling.factor).astype(np.float32)


def yarn_weight(dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """The share of its original frequency that YaRN leaves to each pair, float32 `[dim / 2]`.

    Args:
        dim: d, even.
        theta: θ, the base.
        scaling: the scaling; its kind is "yarn".
    """

    def pair_of(rotations: float) -> float:
        """The pair that turns so often in the original context."""
        context = scaling.original_max_position_embeddings
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    return 1 - np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)


def long_frequencies(rope: RopeSpec, length: jax.Array) -> jax.Array:
    """The frequencies of tokens in texts beyond the original context, for "dynamic" and "longrope".

    Args:
        rope: the rotary embedding, of one of these kinds.
        length: int32 `[rows, n]`, tokens of the text when the token was read.

    Returns:
        Radians per position, float32 `[rows, n, 1, dim / 2]`.
    """
    scaling, dim = rope.scaling, rope.dim
    assert scaling is not None
    original = scaling.original_max_position_embeddings
    near = rope_frequencies(dim, rope.theta, scaling)
    length = length[:, :, None, None]
    if scaling.rope_type == "longrope":
        far = rope_frequencies(dim, rope.theta) / np.asarray(scaling.long_factor, np.float32)
        return jnp.where(length > original, far, near)
    growth = jnp.maximum(length, original).astype(jnp.float32) * (scaling.factor / original)
    stretch = (growth - (scaling.factor - 1)) ** (dim / (dim - 2))
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return 1.0 / (np.float32(rope.theta) * stretch) ** exponent


def rope_rotation(positions: jax.Array, frequency: np.ndarray | jax.Array) -> Rotation:
    """The rotation of int32 positions `[rows, n]`, shared by all layers and heads of a step."""
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequency
    return jax.lax.platform_dependent(angles, cpu=cos_sin_in_loop, default=cos_sin)


def rotation_of(rope: RopeSpec, positions: jax.Array, lengths: jax.Array | None = None) -> Rotation:
    """The rotation of a layer's queries and keys.

    Args:
        rope: kind and sizes.
        positions: int32 `[rows, n]`.
        lengths: int32 `[rows, n]`, tokens of the text that a token is read with, on which the kinds "dynamic"
            and "longrope" depend. None for its position and one: the text ends with it.
    """
    scaling = rope.scaling
    if scaling is not None and scaling.rope_type in ("dynamic", "longrope"):
        frequency = long_frequencies(rope, positions + 1 if lengths is None else lengths)
    else:
        frequency = rope_frequencies(rope.dim, rope.theta, scaling)
    rotation = rope_rotation(positions, frequency)
    if scaling is None or scaling.magnitude == 1.0:
        return rotation
    return Rotation(rotation.cosine * scaling.magnitude, rotation.sine * scaling.magnitude)


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


def apply_rope(x: jax.Array, rotation: Rotation, interleaved: bool = False) -> jax.Array:
    """Rotates queries or keys to their positions; computed in float32.

    Args:
        x: `[rows, n, heads, head_dim]`; the numbers of a head past the rotation's width stay as they are.
        rotation: the rotation of the positions.
        interleaved: whether pairs are neighbours rather than half of the rotated width apart.
    """
    width = 2 * rotation.cosine.shape[-1]
    if width < x.shape[-1]:
        rotated = apply_rope(x[..., :width], rotation, interleaved)
        return jnp.concatenate((rotated, x[..., width:]), axis=-1)
    wide = x.astype(jnp.float32)
    if interleaved:
        first, second = wide[..., ::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    rotated = (
        first * rotation.cosine - second * rotation.sine,
        second * rotation.cosine + first * rotation.sine,
    )
    if interleaved:
        return jnp.stack(rotated, axis=-1).reshape(x.shape).astype(x.dtype)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
