"""SnapKV: keep what the end of the prompt attends to."""

import dataclasses
from typing import Any, Literal

import jax

from ..cache import Cache, ModelShape
from ..pallas.paged_attention.quantised import reads_as
from .method import Scene
from .window import Window, attention, empty, newest, pooled, slide


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SnapKV:
    """Keep the `window` newest entries, and of the others those that the window's queries attend to most.

    Attention is summed over the window, pooled over `pool` neighbours, and ranked per KV head.

    Source: Li et al. 2024 (arXiv 2404.14469) and its release: window 32, pool 5 (mean) or 7 (max). Differs
    from the release: ranked per group of query heads, which share their keys and values, instead of per query
    head, which multiplies the cache; the last token of a prompt belongs to the first step and is not in the
    window.
    """

    budget: int = 1024
    window: int = 32
    pool: int = 7
    pooling: Literal["mean", "max"] = "max"
    after: int = 0

    def begin(self, shape: ModelShape, cache: Cache) -> Window:
        """See `Compression`."""
        return empty(shape, cache.table.shape[0], self.window, reads_as(cache.layers[0].keys))

    def observe(self, scene: Scene, memory: Window) -> Window:
        """See `Compression`."""
        return slide(memory, scene)

    def rank(self, memory: Window, keys: jax.Array, length: jax.Array) -> jax.Array:
        """See `Compression`."""
        score = attention(memory, keys, length)
        return newest(pooled(score, self.pool, self.pooling, length), self.window, length)

    def share(self, rank: jax.Array, size: int) -> Any:
        """See `Compression`: every head keeps as many."""
        return None
