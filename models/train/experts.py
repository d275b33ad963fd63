"""Routing of a mixture of experts in training, after Mixtral (arXiv 2401.04088).

Each token is trained with a number of experts of its own in every layer, drawn evenly from 1 to the most, so
that the model can be read with any number (as widths in arXiv 2205.13147). Otherwise a number that was not
trained costs quality of its own, and rules that change the number could not be compared.
"""

import jax
import jax.numpy as jnp

from .shape import Shape

BALANCE = 0.01  # weight of the load-balancing loss (Fedus et al., arXiv 2101.03961)


def drawn_counts(tokens: jax.Array, shape: Shape) -> jax.Array | None:
    """The number of experts of each token in each layer, int32 `[layers, tokens]`; None without experts.

    The draw depends on the tokens alone, so that a run that was interrupted goes on as it would have.

    Args:
        tokens: int32 `[batch, time]`.
        shape: the model's shape.
    """
    if not shape.num_local_experts:
        return None
    key = jax.random.fold_in(jax.random.key(0), tokens.sum())
    sizes = (shape.num_hidden_layers, tokens.size)
    return jax.random.randint(key, sizes, 1, shape.num_experts_per_tok + 1)


def gates(
    probability: jax.Array, per_token: int, counts: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The weight of every expert for every token, `[tokens, experts]`, and the load-balancing loss.

        loss = E · Σ_e f_e P_e

    f_e is the share of the pairs of a token and an expert that it reads, P_e the mean probability of the
    expert, E the number of experts. It is 1 where both are even.

    Args:
        probability: the probabilities of the router, float32 `[tokens, experts]`.
        per_token: the most experts of a token.
        counts: experts of each token, int32 `[tokens]`, from 1 to `per_token`; None for `per_token`.
    """
    experts = probability.shape[-1]
    top, ids = jax.lax.top_k(probability, per_token)
    if counts is not None:
        top = jnp.where(jnp.arange(per_token) < counts[:, None], top, 0.0)
    chosen = jax.nn.one_hot(ids, experts)
    weight = (chosen * (top / top.sum(-1, keepdims=True))[:, :, None]).sum(1)
    pairs = jnp.where(top[:, :, None] > 0, chosen, 0.0).sum((0, 1))
    return weight, experts * (pairs / pairs.sum() * probability.mean(0)).sum()
