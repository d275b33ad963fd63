"""SnapKV: keeps the entries that the end of the prompt attends to."""

import dataclasses
from typing import ClassVar, Literal

import jax

from ..pallas.paged_attention.quantised import reads_as
from ..state.cache import Cache, ModelShape
from .policies import LayerQueries
from .window import Window, empty_window, keep_newest, pool_scores, update_window, window_attention


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SnapKV:
    """Keeps the newest entries, and of the others those that the newest queries attend to most.

    Attention is summed over the window's queries, pooled over neighbours, and ranked per KV head.

    Args:
        budget: entries kept per KV head.
        window: newest queries whose attention counts; as many newest entries are kept in any case.
        pool: positions over which scores are pooled, odd.
        pooling: "mean" or "max".
        delay: decode steps before the compression is applied.

    Source: Li et al. 2024 (arXiv 2404.14469) and its release: window 32, pool 5 (mean) or 7 (max). Differs
    from the release: ranked per group of query heads, which share their keys and values, instead of per query
    head, which multiplies the cache; the last token of a prompt belongs to the first step and is not in the
    window.
    """

    budget: int = 1024
    window: int = 32
    pool: int = 7
    pooling: Literal["mean", "max"] = "max"
    delay: int = 0
    ragged: ClassVar[bool] = False

    def init(self, shape: ModelShape, cache: Cache) -> Window:
        """See `CompressionPolicy`."""
        return empty_window(shape, cache.table.shape[0], self.window, reads_as(cache.layers[0].keys))

    def observe(self, queries: LayerQueries, state: Window) -> Window:
        """See `CompressionPolicy`."""
        return update_window(state, queries)

    def score_entries(self, state: Window, keys: jax.Array, length: jax.Array) -> jax.Array:
        """See `CompressionPolicy`."""
        scores = window_attention(state, keys, length)
        return keep_newest(pool_scores(scores, self.pool, self.pooling, length), self.window, length)

    def pages_per_head(self, scores: jax.Array, page_size: int) -> jax.Array | None:
        """See `CompressionPolicy`: every head keeps `budget` entries."""
        return None
