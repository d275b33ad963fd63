"""What a prefill could be that knew the true attention: an upper bound for those that estimate it."""

import dataclasses

import jax
import jax.numpy as jnp

from ..pallas.paged_attention.quantised import gather
from .method import Scene
from .uniform_budget import UniformBudget


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Oracle(UniformBudget):
    """Read the pages that get most of a segment's attention, `base` tokens of them.

    It computes all of that attention first, so it saves nothing; what it looks at is not counted as read.
    """

    def worth(self, scene: Scene) -> jax.Array:
        """See `UniformBudget`."""
        return attention_of_pages(scene)


def attention_of_pages(scene: Scene) -> jax.Array:
    """The attention of the queries to each page, float32 `[rows, kv_heads, pages]`: sums to their number.

    Mean over the group; exact, and as expensive as dense attention.
    """
    return received(scene).reshape(*scene.q.shape[:2], scene.table.shape[1], -1).sum(-1)


def received(scene: Scene) -> jax.Array:
    """The attention that each position gets, `[rows, kv_heads, positions]`, in units of one query.

    Summed over queries, mean over the group.
    """
    rows, kv_heads, group, n, head_dim = scene.q.shape
    positions = scene.table.shape[1] * scene.layer.keys.shape[2]

    def one(operands):
        q, table, head, start, asked = operands
        keys = gather(scene.layer.keys, (table, head), q.dtype).reshape(positions, head_dim)
        own = start + jnp.arange(n)
        seen = (jnp.arange(positions) <= own[:, None]) & asked[:, None]
        last = jnp.where(asked, own, -1).max()
        keys = jnp.where((jnp.arange(positions) <= last)[:, None], keys, 0)
        score = jnp.einsum("gnd,sd->gns", q, keys, preferred_element_type=jnp.float32)
        share = jax.nn.softmax(jnp.where(seen, score, -1e30), -1)
        return jnp.where(seen, share, 0.0).sum((0, 1)) / group

    spread = lambda x: jnp.repeat(x, kv_heads, 0)
    head = jnp.tile(jnp.arange(kv_heads), rows)
    flat = scene.q.reshape(rows * kv_heads, group, n, head_dim)
    out = jax.lax.map(one, (flat, spread(scene.table), head, spread(scene.start), spread(scene.asked)))
    return out.reshape(rows, kv_heads, positions)
