"""Uniform-budget prefill: the ablation of EntropyInfer's prefill, with one budget whatever the entropy."""

import dataclasses

import jax
import jax.numpy as jnp

from .criticality import expected_attention
from .policies import LayerQueries, PageScores


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class UniformBudget:
    """Selects the pages of highest expected attention, `base` tokens of them per segment and KV head.

    Args:
        base: budget in tokens.
        segment: queries of a segment, a power of two.
        dense_below: position before which segments read all pages.
        dense_layers: number of layers, from the lowest, that read all pages.
        page_size: page size to allocate the cache with; None for any.
    """

    base: int = 2048
    segment: int = 512
    dense_below: int = 4096
    dense_layers: int = 1
    page_size: int | None = 16

    def init(self, rows: int, kv_heads: int, pages: int) -> tuple[()]:
        """See `PrefillPolicy`."""
        return ()

    def score_pages(
        self, queries: LayerQueries, state: tuple[()], below: None
    ) -> tuple[PageScores, tuple[()], None]:
        """See `PrefillPolicy`."""
        scores = self.page_scores(queries)
        return PageScores(scores, jnp.full(scores.shape[:2], self.base, jnp.float32)), state, None

    def page_scores(self, queries: LayerQueries) -> jax.Array:
        """Scores by which the pages are ranked, `[rows, kv_heads, pages]`."""
        return expected_attention(queries)
