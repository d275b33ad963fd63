"""Partial results of a row after a kernel's pass, and the arithmetic that completes them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .reference import Head, Moments, TopkEntropy, inverse, where_warm

LARGEST_K = 128  # the kernels keep no more tokens
# Distances from the largest logit are clipped to this: the exponential is 0 long before, at any temperature,
# and the square stays finite.
FARTHEST = -1e12


class RowPartials(NamedTuple):
    """Partial results of every row. Sums are over the tokens that are not among the k largest.

    The distance d = z − highest is at most 0 and is not divided by a temperature.
    """

    values: jax.Array  # float32 [rows, k], descending; −inf where there is no token
    indices: jax.Array  # int32 [rows, k]; anything where there is no token
    highest: jax.Array  # float32 [rows]
    rest: jax.Array  # float32 [2, 3, rows]: Σ (1, d, d²) exp(d / T), calibrated and tempered


def check(logits_or_weight: jax.Array, k: int) -> None:
    """Raise NotImplementedError for a case that no kernel supports."""
    if k > LARGEST_K:
        raise NotImplementedError(f"k must be at most {LARGEST_K} in a kernel; got {k}")
    if logits_or_weight.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(
            f"logits and weight must be of float32 or bfloat16 in a kernel; got {logits_or_weight.dtype}"
        )


def distance(values: jax.Array, highest: jax.Array) -> jax.Array:
    """Values − highest, bounded; NaN stays NaN, and a masked token is as far as it can be."""
    apart = values - jnp.where(highest == -jnp.inf, 0.0, highest)
    return jnp.where(apart < FARTHEST, FARTHEST, apart)


def weigh(apart: jax.Array, inverse_temperature: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(1, d, d²) exp(d / T)."""
    ratio = jnp.exp(apart * inverse_temperature)
    first = apart * ratio
    return ratio, first, apart * first


def shifted(sums: jax.Array, moved: jax.Array, inverse_temperature: jax.Array) -> jax.Array:
    """Sums of (1, d, d²) exp(d / T), on the last axis, after the largest logit has risen by −moved.

    Args:
        sums: `[..., 3]`.
        moved: the largest logit minus the new one, ≤ 0.
        inverse_temperature: 1 / T.
    """
    zeroth, once, twice = (sums[..., part] for part in range(3))
    shrink = jnp.exp(moved * inverse_temperature)
    parts = (zeroth, once + moved * zeroth, twice + moved * (2 * once + moved * zeroth))
    return jnp.stack([shrink * part for part in parts], axis=-1)


def finish(
    parts: RowPartials, temperature: jax.Array, calibration: jax.Array, vocabulary: int
) -> TopkEntropy:
    """Entropies and head from the parts: the sums of the rest plus those of the k largest.

    Args:
        parts: the parts of each row.
        temperature: float32 `[rows]`.
        calibration: float32 `[rows]`.
        vocabulary: number of logits of a row.
    """
    apart = distance(parts.values, parts.highest[:, None])
    two = []
    heads = []
    for rest, scale in zip(parts.rest, (inverse(calibration), inverse(temperature)), strict=True):
        head = [x.sum(-1) for x in weigh(apart, scale[:, None])]
        heads.append(head)
        two.append(_moments([a + b for a, b in zip(head, rest, strict=True)], parts.highest, scale))
    calibrated, tempered = two
    scale, above, below = inverse(calibration), heads[0][0], parts.rest[0, 0]
    total = above + below
    least = jnp.exp(apart[:, -1] * scale)
    none = jnp.isnan(calibrated.entropy)
    numbers = (above / total, below / total, _moments(heads[0], parts.highest, scale).entropy, least / total)
    mass, tail, entropy, least = (jnp.where(none, jnp.nan, x) for x in numbers)
    others = jnp.full(none.shape, vocabulary - parts.values.shape[1], jnp.int32)
    return TopkEntropy(
        values=parts.values,
        indices=jnp.where(parts.values > -jnp.inf, parts.indices, vocabulary),
        calibrated=calibrated,
        tempered=where_warm(temperature, tempered),
        head=Head(mass, tail, entropy, least, others),
    )


def _moments(sums: list[jax.Array], highest: jax.Array, scale: jax.Array) -> Moments:
    total, first, second = sums
    mean = first / total
    log_total = jnp.log(total)
    spread = jnp.maximum(second / total - mean * mean, 0.0)
    return Moments(
        # +inf and −inf are their own normalisers.
        log_normaliser=jnp.where(jnp.isinf(highest), highest, highest * scale + log_total),
        entropy=log_total - mean * scale,
        varentropy=spread * scale * scale,
    )
