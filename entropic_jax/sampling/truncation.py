"""Truncation: top-k, top-nσ, top-p, min-p and typical-p, by exact thresholds.

Nothing is sorted: on a CPU, XLA takes far longer to sort a vocabulary than to bisect for a threshold.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..state import Sampling

_bits = partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
_floats = partial(lax.bitcast_convert_type, new_dtype=jnp.float32)
_UNIT, _INFINITY = 0x3F800000, 0x7F800000  # the bits of 1.0 and of inf
SMALLEST = np.finfo(np.float32).tiny


def _bisect(enough: Callable, low: jax.Array, high: jax.Array, passes: int) -> jax.Array:
    """The smallest key in (low, high] that is `enough`, per row, where all above are; `high` is taken to be.

    Keys int32 `[rows]`, in the order of the floats whose bits they are: `passes` ≥ log₂(high − low) is exact.
    """

    def halve(_, bracket):
        low, high = bracket
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        right = enough(middle)
        return jnp.where(right, low, middle), jnp.where(right, middle, high)

    return lax.fori_loop(0, passes, halve, (low, high))[1]


def _top_k_floor(logits: jax.Array, top_k: jax.Array) -> jax.Array:
    """The k-th largest logit of each row."""
    bits = _bits(jnp.where(logits == 0, 0.0, logits))  # −0 ties with +0
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    limits = jnp.iinfo(jnp.int32)
    low, high = (jnp.full(top_k.shape, limit, jnp.int32) for limit in (limits.min, limits.max))
    key = _bisect(lambda key: jnp.sum(keys > key[:, None], axis=-1, dtype=jnp.int32) < top_k, low, high, 32)
    return _floats(key ^ ((key >> 31) & 0x7FFFFFFF))


def _nucleus_floor(logits: jax.Array, sampling: Sampling, floor: jax.Array) -> jax.Array:
    """The smallest logit that both top-p and min-p keep, among those not below `floor`."""
    highest = jnp.max(logits, axis=-1)
    # Probabilities relative to the largest one.
    ratio = jnp.where(logits < floor[:, None], 0.0, jnp.exp(logits - highest[:, None]))

    def threshold(ratio):
        # Ratios lie in [0, 1], where the bits of a float are in its order.
        def above(bits):
            return jnp.sum(jnp.where(ratio > _floats(bits)[:, None], ratio, 0.0), axis=-1)

        none = jnp.full(floor.shape, -1, jnp.int32)
        mass = jnp.maximum(sampling.top_p * jnp.sum(ratio, axis=-1), SMALLEST)
        return _floats(_bisect(lambda bits: above(bits) < mass, none, jnp.full_like(none, _UNIT), 31))

    least = lax.cond(jnp.any(sampling.top_p < 1), threshold, lambda ratio: jnp.zeros_like(floor), ratio)
    least = jnp.maximum(jnp.where(sampling.top_p < 1, least, 0.0), sampling.min_p)
    kept = jnp.min(jnp.where(ratio < least[:, None], jnp.inf, logits), axis=-1)
    return jnp.maximum(floor, jnp.minimum(kept, highest))


def _sigma_floor(logits: jax.Array, n: jax.Array, floor: jax.Array) -> jax.Array:
    """The largest logit less n standard deviations of those that are not masked, if that is above `floor`."""
    masked = logits == -jnp.inf
    count = jnp.maximum(jnp.sum(~masked, axis=-1, keepdims=True), 1).astype(jnp.float32)
    mean = jnp.sum(jnp.where(masked, 0.0, logits), axis=-1, keepdims=True) / count
    square = jnp.sum(jnp.where(masked, 0.0, jnp.square(logits - mean)) / count, axis=-1)
    least = jnp.max(logits, axis=-1) - n * jnp.sqrt(square)
    return jnp.where(n > 0, jnp.maximum(floor, least), floor)


def _typical_range(logits: jax.Array, typical_p: jax.Array, floor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The smallest and the largest logit that typical-p keeps, among those not below `floor`."""
    highest = jnp.max(logits, axis=-1)
    shifted = logits - highest[:, None]
    ratio = jnp.where(logits < floor[:, None], 0.0, jnp.exp(shifted))
    total = jnp.sum(ratio, axis=-1)
    mean = jnp.sum(ratio * jnp.where(ratio > 0, shifted, 0.0), axis=-1) / total
    # |−ln p − H|: the normaliser cancels between surprisal and entropy.
    distance = jnp.where(ratio > 0, jnp.abs(shifted - mean[:, None]), jnp.inf)
    mass = jnp.maximum(typical_p * total, SMALLEST)

    def closer(bits):  # closeness is minus the bits of a distance
        return jnp.sum(jnp.where(distance < _floats(-bits)[:, None], ratio, 0.0), axis=-1)

    far = jnp.full(floor.shape, -_INFINITY - 1, jnp.int32)
    furthest = _floats(-_bisect(lambda bits: closer(bits) < mass, far, jnp.zeros_like(far), 31))
    outside = distance > furthest[:, None]
    return (
        jnp.maximum(floor, jnp.min(jnp.where(outside, jnp.inf, logits), axis=-1)),
        jnp.max(jnp.where(outside, -jnp.inf, logits), axis=-1),
    )


def truncate(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits with −inf outside of top-k, top-nσ, top-p, min-p and typical-p, applied in this order.

    logits float32 `[rows, vocabulary]`, already divided by the temperature. With p the softmax over what the
    filters before have left,

        top-k:     fewer than k tokens are more probable
        top-nσ:    z ≥ max z − n σ(z), σ over all tokens that are not masked
        top-p:     the more probable tokens hold less than top_p
        min-p:     p ≥ min_p · max p
        typical-p: the tokens whose surprisal is closer to the entropy hold less than typical_p

    At least one token is always kept. Each filter keeps an interval of logits, whose ends are found by exact
    bisection over the bits of a float32, 31 or 32 passes over the row and no sort, skipped where no row asks
    for it. What is kept is differentiable with unit slope; the thresholds are not differentiated. NaN stays
    NaN, and subnormal logits tie with 0.
    Top-p: Holtzman et al. 2020, arXiv 1904.09751. Min-p: Nguyen et al. 2024, arXiv 2407.01082. Typical-p:
    Meister et al. 2023, arXiv 2202.00666. Top-nσ, which keeps the same tokens at every temperature: Tang et
    al. 2024, arXiv 2411.07641. Differs from transformers: all tokens tied with the threshold of
    top-p, that is of equal probability in float32, are kept, where transformers keeps as many as its sort
    happens to put first.

    >>> from entropic_jax.sampling import parameters
    >>> logits = jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.1]]))
    >>> jnp.isfinite(truncate(logits, parameters(1, top_p=0.7))).tolist()
    [[True, True, False, False]]
    """
    logits = logits.astype(jnp.float32)
    filters = asks_for_truncation(sampling, logits.shape[1])
    return lax.cond(jnp.any(filters), _filter, lambda z, _: z, logits, sampling)


def asks_for_truncation(sampling: Sampling, vocabulary: int) -> jax.Array:
    """Whether the parameters of each row leave out any token, bool `[rows]`."""
    filters = (sampling.top_k > 0) & (sampling.top_k < vocabulary)
    filters |= (sampling.top_n_sigma > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    return filters | (sampling.typical_p < 1)


def _filter(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """See `truncate`."""
    rows, vocabulary = logits.shape
    values = lax.stop_gradient(logits)
    unbounded = jnp.full((rows,), -jnp.inf, logits.dtype)

    k_on = (sampling.top_k > 0) & (sampling.top_k < vocabulary)
    floor = lax.cond(
        jnp.any(k_on),
        lambda: jnp.where(k_on, _top_k_floor(values, sampling.top_k), unbounded),
        lambda: unbounded,
    )
    sigmas = sampling.top_n_sigma
    floor = lax.cond(jnp.any(sigmas > 0), _sigma_floor, lambda z, n, least: least, values, sigmas, floor)
    nucleus_on = (sampling.top_p < 1) | (sampling.min_p > 0)
    floor = lax.cond(
        jnp.any(nucleus_on),
        lambda: jnp.where(nucleus_on, _nucleus_floor(values, sampling, floor), floor),
        lambda: floor,
    )
    typical_on = sampling.typical_p < 1

    def typical():
        lowest, highest = _typical_range(values, sampling.typical_p, floor)
        return jnp.where(typical_on, lowest, floor), jnp.where(typical_on, highest, jnp.inf)

    floor, ceiling = lax.cond(jnp.any(typical_on), typical, lambda: (floor, -unbounded))
    return jnp.where((logits < floor[:, None]) | (logits > ceiling[:, None]), -jnp.inf, logits)
