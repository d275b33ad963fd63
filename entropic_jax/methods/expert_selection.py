"""Expert policies: how many experts of a mixture a decode step reads, token by token and layer by layer.

Never fewer than one, and never more than the router chooses. The experts are the router's likeliest ones;
policies differ in how many of them they read. They are passed to `start` as `expert_policy`, and the ledger
counts what was read.

The entropy of the token to come is not known when its experts are chosen: a policy sees that of the token
before, and the router's probabilities of this token in this layer.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..state import Measured
from ..state.pytree import Gain, pytree


@pytree
class FixedExperts:
    """The same number of experts for every token.

    Args:
        count: the number, at least 1.

    Source: Shazeer et al. 2017 (arXiv 1701.06538), top-k gating.
    """

    count: Gain

    def num_experts(
        self, probability: jax.Array, layer: int, signal: Measured, length: jax.Array
    ) -> jax.Array:
        """See `phases.expert_reader.ExpertPolicy`."""
        return jnp.broadcast_to(jnp.asarray(self.count, jnp.int32), probability.shape[:1])


@pytree
class TopPExperts:
    """The smallest set of experts whose probability under the router reaches p.

    Args:
        mass: p, in [0, 1].

    Source: Huang et al. 2024 (arXiv 2403.07652), dynamic routing. Differs from the paper: the number is at
    most that of the model's configuration, and the model need not have been trained with the rule.

    >>> policy = TopPExperts(0.7)
    >>> policy.num_experts(jnp.array([[0.6, 0.3, 0.1], [0.8, 0.1, 0.1]]), 0, None, None).tolist()
    [2, 1]
    """

    mass: Gain

    def num_experts(
        self, probability: jax.Array, layer: int, signal: Measured, length: jax.Array
    ) -> jax.Array:
        """See `phases.expert_reader.ExpertPolicy`."""
        ranked = jnp.sort(probability, axis=-1, descending=True)
        missing = jnp.cumsum(ranked, axis=-1) < jnp.reshape(jnp.asarray(self.mass, jnp.float32), (-1, 1))
        return 1 + missing[:, :-1].sum(-1, dtype=jnp.int32)


def features(probability: jax.Array, previous_entropy: jax.Array, ranks: int) -> jax.Array:
    """Features from which the gain of the next expert is expected, float32 `[rows, ranks, 6]`.

    For each n from 1 to `ranks`: 1, q, H_r, H, q · H_r and q · H, where q = p_{n+1} / (p_1 + … + p_{n+1}) is
    the weight that the next expert would have, H_r the router's entropy and H that of the token before.

    Args:
        probability: the probabilities of the router, float32 `[rows, experts]`.
        previous_entropy: H, nats, `[rows]`.
        ranks: number of further experts, one less than the router chooses.
    """
    ranked = jnp.sort(probability, axis=-1, descending=True)
    share = ranked[:, 1 : ranks + 1] / jnp.cumsum(ranked, axis=-1)[:, 1 : ranks + 1]
    router = -jax.scipy.special.xlogy(probability, probability).sum(-1)
    of_row = jnp.broadcast_to(jnp.stack([router, previous_entropy], -1)[:, None], (*share.shape, 2))
    first = jnp.stack([jnp.ones_like(share), share], -1)
    return jnp.concatenate([first, of_row, share[..., None] * of_row], -1)


@pytree
class ExpectedReductionExperts:
    """One more expert while it is expected to lower the output's entropy by more than a price.

        n = 1 + the number of further experts, in order of rank, before the first with ĝ ≤ λ
        ĝ = w · (1, q, H_r, H, q H_r, q H), with weights w of its own for each layer and rank; see `features`

    The expected reduction ĝ is a linear regression on text of the reduction that an expert brings. H is the
    entropy of the token before: that of the token itself is not known before its experts are read.

    Args:
        weights: w, float32 `[layers, ranks, 6]`.
        price: λ, nats an expert.

    Source: ours.

    >>> weights = jnp.zeros((1, 2, 6)).at[:, :, 1].set(1.0)  # ĝ = q
    >>> policy = ExpectedReductionExperts(weights, 0.3)
    >>> before = Measured(*jnp.zeros((6, 2)))
    >>> policy.num_experts(jnp.array([[0.5, 0.4, 0.1], [0.8, 0.1, 0.1]]), 0, before, None).tolist()
    [2, 1]
    """

    weights: Any
    price: Gain

    def num_experts(
        self, probability: jax.Array, layer: int, signal: Measured, length: jax.Array
    ) -> jax.Array:
        """See `phases.expert_reader.ExpertPolicy`."""
        weights = jnp.asarray(self.weights, jnp.float32)[layer]
        gain = (features(probability, signal.entropy, weights.shape[0]) * weights).sum(-1)
        worth = gain > jnp.reshape(jnp.asarray(self.price, jnp.float32), (-1, 1))
        return 1 + jnp.cumprod(worth.astype(jnp.int32), -1).sum(-1, dtype=jnp.int32)
