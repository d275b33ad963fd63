"""The router of a mixture: it chooses the experts of each token, and their weights.

A token has the same bits whatever shares its pass, as verification of drafts needs. Sums and exponentials of
XLA's CPU backend do not: how they are vectorised depends on the shape of the array. So sums are taken by
halves here, and exponentials by a polynomial.
"""

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from .block_spec import RouterSpec
from .layers import Linear

# exp(r) = 1 + r + r² · polynomial(r) for |r| ≤ ln(2) / 2.
COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
LOG2_E, LN2_HIGH, LN2_LOW = 1.44269504, 0.693359375, -2.12194440e-4
SMALLEST, LARGEST = -87.0, 88.0  # arguments whose exponentials are normal numbers


class ExpertReader(Protocol):
    """Decides how many of the experts that a router chooses are read, layer after layer."""

    def __call__(self, probability: jax.Array, most: int, /) -> jax.Array:
        """The number that each token reads, int32 `[tokens]`, from 1 to `most`.

        Args:
            probability: the probabilities of the router, over all experts, float32 `[tokens, experts]`.
            most: the number that the router chooses.
        """


class Router(Linear):
    """Chooses the experts of each token, and their weights.

    Args:
        hidden: width of the input.
        experts: how many.
        per_token: the number of experts that each token is routed to.
        spec: how they are scored.
    """

    def __init__(self, hidden: int, experts: int, per_token: int, spec: RouterSpec) -> None:
        super().__init__(hidden, experts, spec.bias)
        self.e_score_correction_bias = nnx.Param(jnp.zeros(experts)) if spec.correction else None
        self.per_token, self.spec = per_token, spec

    def __call__(self, x: jax.Array, reader: ExpertReader | None = None) -> tuple[jax.Array, jax.Array]:
        """Weights and numbers of the experts of tokens `[tokens, hidden]`; each `[tokens, per_token]`.

        An expert that the reader leaves out has weight 0 and a number past the last. Where the weights of a
        token's experts sum to one, those of the experts that are read do.
        """
        spec, logits = self.spec, super().__call__(x).astype(jnp.float32)
        score = sigmoid if spec.scores == "sigmoid" else softmax
        if spec.by_logit:
            chosen, expert_ids = jax.lax.top_k(logits, self.per_token)
            if reader is not None:
                chosen, expert_ids = self.read_by(reader, logits, chosen, expert_ids, -jnp.inf)
            return score(chosen), expert_ids
        scores = score(logits)
        if self.e_score_correction_bias is None and spec.groups == 1:
            weights, expert_ids = jax.lax.top_k(scores, self.per_token)
        else:
            _, expert_ids = jax.lax.top_k(self.eligible(scores), self.per_token)
            weights = jnp.take_along_axis(scores, expert_ids, axis=-1)
        if reader is not None:
            weights, expert_ids = self.read_by(reader, logits, weights, expert_ids, 0.0)
        if spec.normalise:
            weights = weights / total(weights)
        return (weights if spec.scale == 1.0 else weights * spec.scale), expert_ids

    def read_by(
        self, reader: ExpertReader, logits: jax.Array, chosen: jax.Array, expert_ids: jax.Array, unread: float
    ) -> tuple[jax.Array, jax.Array]:
        """Scores and numbers of a token's experts, the best first, without those that are not read.

        Args:
            reader: decides how many are read.
            logits: `[tokens, experts]`.
            chosen: the scores of those that are chosen, `[tokens, per_token]`.
            expert_ids: their numbers.
            unread: the score of an expert that is not read.
        """
        experts = logits.shape[-1]
        if self.spec.scores == "sigmoid":
            scores = sigmoid(logits)
            probability = scores / total(scores)
        else:
            probability = softmax(logits)
        read = jnp.arange(self.per_token) < reader(probability, self.per_token)[:, None]
        return jnp.where(read, chosen, unread), jnp.where(read, expert_ids, experts)

    def eligible(self, scores: jax.Array) -> jax.Array:
        """Scores by which experts are chosen: corrected, and −inf outside a token's best groups."""
        spec = self.spec
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias[...].astype(jnp.float32)
        if spec.groups == 1:
            return scores
        by_group = scores.reshape(scores.shape[0], spec.groups, -1)
        best = total(jax.lax.top_k(by_group, min(spec.group_score, by_group.shape[-1]))[0])[..., 0]
        _, groups = jax.lax.top_k(best, spec.groups_per_token)
        kept = jax.nn.one_hot(groups, spec.groups, dtype=bool).any(1)
        return jnp.where(kept[:, :, None], by_group, -jnp.inf).reshape(scores.shape)


def exponential(x: jax.Array) -> jax.Array:
    """exp(x) of float32 to 1e-7 of itself, for x from −87 to 88; others count as the nearest of these.

    Source: Moshier, Methods and Programs for Mathematical Functions (1989), `expf` of the Cephes library.

    >>> [f"{y:.6}" for y in exponential(jnp.array([0.0, 1.0, -100.0])).tolist()]
    ['1.0', '2.71828', '1.64581e-38']
    """
    x = jnp.clip(x, SMALLEST, LARGEST)
    power = jnp.round(x * LOG2_E)
    rest = x - power * LN2_HIGH - power * LN2_LOW
    polynomial = jnp.full_like(rest, COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        polynomial = polynomial * rest + coefficient
    two_to_power = jax.lax.bitcast_convert_type((power.astype(jnp.int32) + 127) << 23, jnp.float32)
    return (polynomial * rest * rest + rest + 1) * two_to_power


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(−x)); a row has the same bits whatever the number of rows."""
    return 1 / (1 + exponential(-x))


def softmax(logits: jax.Array) -> jax.Array:
    """The softmax over the last axis; a row has the same bits whatever the number of rows."""
    weights = exponential(logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True)))
    return weights / total(weights)


def total(x: jax.Array) -> jax.Array:
    """The sum over the last axis, which remains with one element, by halves.

    The order of XLA's sums depends on the number of rows.

    >>> total(jnp.arange(7.0)).tolist()
    [21.0]
    """
    while (half := x.shape[-1] // 2) > 0:
        pairs = x[..., :half] + x[..., half : 2 * half]
        x = jnp.concatenate([pairs, x[..., 2 * half :]], axis=-1) if x.shape[-1] % 2 else pairs
    return x
