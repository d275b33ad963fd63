"""Truncation: the filters of `truncate`, by exact thresholds.

Nothing is sorted: on a CPU, XLA takes far longer to sort a vocabulary than to bisect for a threshold.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..state import Sampling
from .randomness import row_keys

_bits = partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
_floats = partial(lax.bitcast_convert_type, new_dtype=jnp.float32)
_UNIT, _INFINITY = 0x3F800000, 0x7F800000  # the bits of 1.0 and of inf
SMALLEST = np.finfo(np.float32).tiny
CHANCE = 1  # folded into a row's key for the number that XTC needs beside the Gumbel noise


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


class _Left(NamedTuple):
    """The tokens of each row that filters have kept."""

    highest: jax.Array  # float32 [rows], the largest logit
    ratio: jax.Array  # float32 [rows, vocabulary], probabilities relative to the largest one; 0 outside
    product: jax.Array  # float32 [rows, vocabulary], ratio · ln ratio

    @staticmethod
    def between(logits: jax.Array, floor: jax.Array, ceiling: jax.Array) -> "_Left":
        """The tokens whose logits are in an interval, ends included."""
        inside = (logits >= floor[:, None]) & (logits <= ceiling[:, None])
        highest = jnp.max(jnp.where(inside, logits, -jnp.inf), axis=-1)
        shifted = logits - highest[:, None]
        ratio = jnp.where(inside, jnp.exp(shifted), 0.0)
        return _Left(highest, ratio, jnp.where(ratio > 0, ratio * shifted, 0.0))

    def entropy(self, least: jax.Array) -> jax.Array:
        """The entropy of the softmax over the tokens whose ratio is at least `least`, nats `[rows]`."""
        kept = self.ratio >= least[:, None]
        total = jnp.sum(jnp.where(kept, self.ratio, 0.0), axis=-1)
        return jnp.log(total) - jnp.sum(jnp.where(kept, self.product, 0.0), axis=-1) / total

    def floor(self, logits: jax.Array, least: jax.Array) -> jax.Array:
        """The smallest logit of a ratio of at least `least`, or the largest logit."""
        outside = (self.ratio < least[:, None]) | (self.ratio == 0)
        return jnp.minimum(jnp.min(jnp.where(outside, jnp.inf, logits), axis=-1), self.highest)


def _entropy_floor(logits: jax.Array, sampling: Sampling, floor: jax.Array, ceiling: jax.Array) -> jax.Array:
    """The smallest logit that the ε-cutoff, the η-cutoff and top-H keep in an interval of logits."""
    left = _Left.between(logits, floor, ceiling)
    entropy, total = left.entropy(jnp.zeros_like(floor)), jnp.sum(left.ratio, axis=-1)
    eta = sampling.eta_cutoff
    eta = jnp.minimum(eta, jnp.sqrt(eta) * jnp.exp(-entropy))
    least = jnp.maximum(sampling.epsilon_cutoff, eta) * total

    def bounded() -> jax.Array:
        limit = sampling.top_h * entropy
        none = jnp.full(floor.shape, -1, jnp.int32)
        return _floats(
            _bisect(lambda bits: left.entropy(_floats(bits)) <= limit, none, jnp.full_like(none, _UNIT), 31)
        )

    on = sampling.top_h < 1
    smallest = lax.cond(jnp.any(on), bounded, lambda: jnp.zeros_like(floor))
    return left.floor(logits, jnp.maximum(least, jnp.where(on, smallest, 0.0)))


def _choice_ceiling(logits: jax.Array, sampling: Sampling, floor: jax.Array, ceiling: jax.Array) -> jax.Array:
    """The smallest logit in an interval whose probability reaches XTC's threshold, or the ceiling."""
    left = _Left.between(logits, floor, ceiling)
    least = sampling.xtc_threshold * jnp.sum(left.ratio, axis=-1)
    is_choice = (left.ratio >= least[:, None]) & (left.ratio > 0)
    return jnp.minimum(ceiling, jnp.min(jnp.where(is_choice, logits, jnp.inf), axis=-1))


def truncate(logits: jax.Array, sampling: Sampling, chance: jax.Array | None = None) -> jax.Array:
    """Logits with −inf where a filter leaves a token out.

    The filters are applied in this order. With p the softmax over what the filters before have left,

        top-k:     fewer than k tokens are more probable
        top-nσ:    z ≥ max z − n σ(z), σ over all tokens that are not masked
        top-p:     the more probable tokens hold less than top_p
        min-p:     p ≥ min_p · max p
        typical-p: the tokens whose surprisal is closer to the entropy hold less than typical_p
        ε-cutoff:  p ≥ ε
        η-cutoff:  p ≥ min(η, √η · exp(−H(p)))
        top-H:     the tokens that are at least as probable have an entropy of at most top_h · H(p)
        XTC:       with probability xtc_probability, no token that is likelier than another one with
                   p ≥ xtc_threshold

    ε, η and top-H take the same p. At least one token is always kept. Each filter keeps an interval of
    logits, whose ends are found by exact bisection over the bits of a float32, 31 or 32 passes over the row
    and no sort, or without a search; it is skipped where no row asks for it. What is kept is differentiable
    with unit slope; the thresholds are not differentiated. NaN stays NaN, and subnormal logits tie with 0.
    Top-p: Holtzman et al. 2020, arXiv 1904.09751. Min-p: Nguyen et al. 2024, arXiv 2407.01082. Typical-p:
    Meister et al. 2023, arXiv 2202.00666. Top-nσ, which keeps the same tokens at every temperature: Tang et
    al. 2024, arXiv 2411.07641. ε and η: Hewitt et al. 2022, arXiv 2210.15191. Top-H: Potraghloo et al. 2025,
    arXiv 2509.02510. XTC is a sampler of the community, by p-e-w, 2024. Differs from transformers: all tokens
    tied with the threshold of top-p, that is of equal probability in float32, are kept, where transformers
    keeps as many as its sort happens to put first; the η-cutoff does not take what the ε-cutoff leaves; and
    top-H takes the entropy of the renormalised tokens, as in the paper, and not the terms of H(p) of the 100
    likeliest.

    Args:
        logits: float32 `[rows, vocabulary]`, already divided by the temperature.
        sampling: parameters of the rows.
        chance: float32 `[rows]` in [0, 1), uniform: XTC acts where it is below its probability. None: never.

    >>> from entropic_jax.sampling import parameters
    >>> logits = jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.1]]))
    >>> jnp.isfinite(truncate(logits, parameters(1, top_p=0.7))).tolist()
    [[True, True, False, False]]
    """
    logits = logits.astype(jnp.float32)
    filters = asks_for_truncation(sampling, logits.shape[1])
    chance = jnp.ones(len(logits), jnp.float32) if chance is None else chance
    return lax.cond(jnp.any(filters), _filter, lambda z, *_: z, logits, sampling, chance)


def asks_for_truncation(sampling: Sampling, vocabulary: int) -> jax.Array:
    """Whether the parameters of each row leave out any token, bool `[rows]`."""
    filters = (sampling.top_k > 0) & (sampling.top_k < vocabulary)
    filters |= (sampling.top_n_sigma > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    filters |= (sampling.epsilon_cutoff > 0) | (sampling.eta_cutoff > 0) | (sampling.top_h < 1)
    return filters | (sampling.typical_p < 1) | (sampling.xtc_probability > 0)


def choice_chance(sampling: Sampling, key: jax.Array, seed: jax.Array, position: jax.Array) -> jax.Array:
    """The uniform number of each row that XTC compares with its probability; 1 if no row requests XTC.

    Args:
        sampling: parameters of the rows.
        key: the run's random key.
        seed: int32 `[rows]`.
        position: int32 `[rows]`, of the token in its text.
    """

    def uniform() -> jax.Array:
        keys = jax.vmap(lambda k: jax.random.fold_in(k, CHANCE))(row_keys(key, seed, position))
        return jax.vmap(lambda k: jax.random.uniform(k, dtype=jnp.float32))(keys)

    requested = jnp.any(sampling.xtc_probability > 0)
    return lax.cond(requested, uniform, lambda: jnp.ones_like(sampling.xtc_probability))


def _filter(logits: jax.Array, sampling: Sampling, chance: jax.Array) -> jax.Array:
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
    entropy_on = (sampling.epsilon_cutoff > 0) | (sampling.eta_cutoff > 0) | (sampling.top_h < 1)
    floor = lax.cond(
        jnp.any(entropy_on),
        lambda: jnp.where(entropy_on, _entropy_floor(values, sampling, floor, ceiling), floor),
        lambda: floor,
    )
    choices_on = chance < sampling.xtc_probability
    ceiling = lax.cond(
        jnp.any(choices_on),
        lambda: jnp.where(choices_on, _choice_ceiling(values, sampling, floor, ceiling), ceiling),
        lambda: ceiling,
    )
    return jnp.where((logits < floor[:, None]) | (logits > ceiling[:, None]), -jnp.inf, logits)
