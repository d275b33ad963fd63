"""How much a segment of queries may attend to each earlier page, from extreme queries and extreme keys.

The observation that CritiPrefill and EntropyInfer share.
"""

import jax
import jax.numpy as jnp

from .method import Scene


def observation(scene: Scene, scaled: bool = True) -> jax.Array:
    """The share of attention expected of every earlier page, float32 `[rows, kv_heads, pages]`.

        S_max = (Q_max·K_max + Q_min·K_max) / 2,   S_min = (Q_max·K_min + Q_min·K_min) / 2
        A = softmax over earlier pages of the mean over the group of max(S_max, S_min)

    Q_max, Q_min are element-wise over the real queries of the segment, K_max, K_min over a page, all of them
    rotated. Rows sum to 1, or to 0 where there is no earlier page. With `scaled`, products are divided by
    √head_dim, as attention does.

    Source: Xu et al. 2026 (arXiv 2606.09508), after Lv et al. 2024 (arXiv 2409.12490).
    """
    q = scene.q.astype(jnp.float32) * (1.0 if scaled else scene.q.shape[-1] ** 0.5)
    real = scene.asked[:, None, None, :, None]
    high, low = jnp.where(real, q, -jnp.inf).max(3), jnp.where(real, q, jnp.inf).min(3)
    middle = jnp.where(scene.asked.any(1)[:, None, None, None], (high + low) / 2, 0.0)
    among = scene.earlier[:, None]
    # Pages that the row does not have may hold anything.
    per_page = lambda x: jnp.where(among[..., None], x[scene.table].swapaxes(1, 2), 0.0)
    product = lambda x: jnp.einsum("rkgd,rkpd->rkgp", middle, per_page(x))
    score = jnp.maximum(product(scene.layer.key_max), product(scene.layer.key_min)).mean(2)
    share = jax.nn.softmax(jnp.where(among, score, -1e30), -1)
    return jnp.where(among, share, 0.0)


def entropy(share: jax.Array) -> jax.Array:
    """−Σ A ln A over the last axis, in nats; 0 ln 0 = 0."""
    return -jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1.0)), 0.0).sum(-1)
