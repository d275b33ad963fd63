"""H2O (heavy-hitter oracle): keeps the entries that received the most attention, and the newest."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from ..state.cache import Cache, ModelShape
from . import window
from .oracle import attention_received
from .policies import LayerQueries


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class H2O:
    """Fills part of the budget by attention summed over all queries, the rest by recency.

    It computes the prompt's whole attention a second time in order to sum it.

    Args:
        budget: entries kept per KV head.
        heavy: fraction of the budget that is filled by attention, in [0, 1].
        delay: decode steps before the compression is applied.

    Source: Zhang et al. 2023 (arXiv 2306.14048): half and half. Differs from the paper: applied once, after
    the prompt, instead of one entry at every token; per group of query heads.
    """

    budget: int = 1024
    heavy: float = 0.5
    delay: int = 0
    ragged: ClassVar[bool] = False

    def init(self, shape: ModelShape, cache: Cache) -> jax.Array:
        """See `CompressionPolicy`: the attention that each position received."""
        rows, pages = cache.table.shape
        return jnp.zeros((rows, shape.kv_heads, pages * cache.page_size), jnp.float32)

    def observe(self, queries: LayerQueries, state: jax.Array) -> jax.Array:
        """See `CompressionPolicy`."""
        return state + attention_received(queries)

    def score_entries(self, state: jax.Array, keys: jax.Array, length: jax.Array) -> jax.Array:
        """See `CompressionPolicy`."""
        return window.keep_newest(state, self.budget - int(self.heavy * self.budget), length)

    def pages_per_head(self, scores: jax.Array, page_size: int) -> None:
        """See `CompressionPolicy`: every head keeps `budget` entries."""
