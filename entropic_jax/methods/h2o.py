"""H2O: keep the entries that have been attended to most, and the newest."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..cache import Cache, ModelShape
from . import window
from .method import Scene
from .oracle import received


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class H2O:
    """Keep the `heavy` share of the budget by attention summed over all queries, the rest by recency.

    It computes the prompt's whole attention once more, to sum it.

    Source: Zhang et al. 2023 (arXiv 2306.14048): half and half. Differs from the paper: once, after the
    prompt, instead of an entry at every token; per group of query heads.
    """

    budget: int = 1024
    heavy: float = 0.5
    after: int = 0

    def begin(self, shape: ModelShape, cache: Cache) -> jax.Array:
        """See `Compression`: the attention that each position has got."""
        rows, pages = cache.table.shape
        return jnp.zeros((rows, shape.kv_heads, pages * cache.page_size), jnp.float32)

    def observe(self, scene: Scene, memory: jax.Array) -> jax.Array:
        """See `Compression`."""
        return memory + received(scene)

    def rank(self, memory: jax.Array, keys: jax.Array, length: jax.Array) -> jax.Array:
        """See `Compression`."""
        return window.newest(memory, self.budget - int(self.heavy * self.budget), length)

    def share(self, rank: jax.Array, size: int) -> Any:
        """See `Compression`: every head keeps as many."""
        return None
