"""Criticality: the expected attention of a segment to each prior page, from extreme queries and extreme keys.

CritiPrefill and EntropyInfer share this estimate.
"""

import jax
import jax.numpy as jnp

from .policies import LayerQueries


def expected_attention(queries: LayerQueries, scaled: bool = True) -> jax.Array:
    """The expected share of attention of every prior page, float32 `[rows, kv_heads, pages]`.

        S_max = (Q_max·K_max + Q_min·K_max) / 2,   S_min = (Q_max·K_min + Q_min·K_min) / 2
        A = softmax over prior pages of the mean over the group of max(S_max, S_min)

    Q_max and Q_min are element-wise over the valid queries of the segment, K_max and K_min over a page, all
    of them rotated. A sums to 1 over pages, or to 0 where there is no prior page.

    Args:
        queries: the segment's queries.
        scaled: divide products by √head_dim, as attention does.

    Source: Xu et al. 2026 (arXiv 2606.09508), after Lv et al. 2024 (arXiv 2409.12490).
    """
    q = queries.q.astype(jnp.float32) * (1.0 if scaled else queries.q.shape[-1] ** 0.5)
    valid = queries.valid[:, None, None, :, None]
    q_max, q_min = jnp.where(valid, q, -jnp.inf).max(3), jnp.where(valid, q, jnp.inf).min(3)
    middle = jnp.where(queries.valid.any(1)[:, None, None, None], (q_max + q_min) / 2, 0.0)
    prior = queries.prior_pages[:, None]

    def product(summary: jax.Array) -> jax.Array:
        # Pages that the row does not hold may contain NaN.
        per_page = jnp.where(prior[..., None], summary[queries.table].swapaxes(1, 2), 0.0)
        return jnp.einsum("rkgd,rkpd->rkgp", middle, per_page)

    layer = queries.layer
    logits = jnp.maximum(product(layer.key_max), product(layer.key_min)).mean(2)
    attention = jax.nn.softmax(jnp.where(prior, logits, -1e30), -1)
    return jnp.where(prior, attention, 0.0)


def attention_entropy(attention: jax.Array) -> jax.Array:
    """−Σ A ln A over the last axis, in nats; 0 ln 0 = 0."""
    positive = attention > 0
    return -jnp.where(positive, attention * jnp.log(jnp.where(positive, attention, 1.0)), 0.0).sum(-1)
