"""CritiPrefill: sparse prefill with the same budget for every head and criticality smoothed over layers."""

import dataclasses

import jax
import jax.numpy as jnp

from .criticality import expected_attention
from .policies import LayerQueries, PageScores


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class CritiPrefill:
    """Selects the blocks of highest criticality, `base` tokens of them per segment and KV head.

        C_l = ¼ C_{l−1} + ¾ A_l,   C_0 = A_0 and C_1 = A_1

    with A from `criticality.expected_attention`.

    Args:
        base: budget in tokens.
        passed_on: weight of the layer below, ¼ in the formula.
        scaled: divide products by √head_dim.
        segment: queries of a segment, a power of two.
        dense_below: position before which segments read all pages.
        dense_layers: number of layers, from the lowest, that read all pages.
        page_size: page size to allocate the cache with; None for any.

    Source: Lv et al. 2024 (arXiv 2409.12490) and its release, which reads all pages in the
    lowest layer too. Differs from the release: products are divided
    by √head_dim (`scaled`); a block is a page, of 32 tokens where the cache is allocated for it.
    """

    base: int = 2048
    passed_on: float = 0.25
    scaled: bool = True
    segment: int = 512
    dense_below: int = 4096
    dense_layers: int = 1
    page_size: int | None = 32

    def init(self, rows: int, kv_heads: int, pages: int) -> tuple[()]:
        """See `PrefillPolicy`."""
        return ()

    def score_pages(
        self, queries: LayerQueries, state: tuple[()], below: tuple[int, jax.Array] | None
    ) -> tuple[PageScores, tuple[()], tuple[int, jax.Array]]:
        """See `PrefillPolicy`; `below` is the number of the layer below, and its criticality."""
        criticality = expected_attention(queries, self.scaled)
        number = 0 if below is None else below[0] + 1
        if below is not None and number > 1:
            criticality = self.passed_on * below[1] + (1 - self.passed_on) * criticality
        budget = jnp.full(criticality.shape[:2], self.base, jnp.float32)
        return PageScores(criticality, budget), state, (number, criticality)
