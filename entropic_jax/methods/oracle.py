"""Oracle prefill: page selection by the true attention, an upper bound for methods that estimate it."""

import dataclasses

import jax
import jax.numpy as jnp

from ..pallas.paged_attention.quantised import gather
from .policies import LayerQueries
from .uniform_budget import UniformBudget


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Oracle(UniformBudget):
    """Selects the pages that receive most of a segment's attention, `base` tokens of them.

    It computes all of that attention first, so it saves nothing; this is not counted as read.
    """

    def page_scores(self, queries: LayerQueries) -> jax.Array:
        """See `UniformBudget`."""
        return page_attention(queries)


def page_attention(queries: LayerQueries) -> jax.Array:
    """The attention that each page receives, float32 `[rows, kv_heads, pages]`.

    Summed over queries, mean over the group; exact, and as expensive as dense attention.
    """
    received = attention_received(queries)
    return received.reshape(*queries.q.shape[:2], queries.table.shape[1], -1).sum(-1)


def attention_received(queries: LayerQueries) -> jax.Array:
    """The attention that each position receives, `[rows, kv_heads, positions]`.

    Summed over queries, mean over the group.
    """
    rows, kv_heads, group, n, head_dim = queries.q.shape
    positions = queries.table.shape[1] * queries.layer.keys.shape[2]

    def per_head(operands):
        q, table, head, start, valid = operands
        keys = gather(queries.layer.keys, (table, head), q.dtype).reshape(positions, head_dim)
        query_position = start + jnp.arange(n)
        visible = (jnp.arange(positions) <= query_position[:, None]) & valid[:, None]
        last = jnp.where(valid, query_position, -1).max()
        keys = jnp.where((jnp.arange(positions) <= last)[:, None], keys, 0)
        logits = jnp.einsum("gnd,sd->gns", q, keys, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(visible, logits, -1e30), -1)
        return jnp.where(visible, weights, 0.0).sum((0, 1)) / group

    def per_row_and_head(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, kv_heads, 0)

    operands = (
        queries.q.reshape(rows * kv_heads, group, n, head_dim),
        per_row_and_head(queries.table),
        jnp.tile(jnp.arange(kv_heads), rows),
        per_row_and_head(queries.start),
        per_row_and_head(queries.valid),
    )
    return jax.lax.map(per_head, operands).reshape(rows, kv_heads, positions)
