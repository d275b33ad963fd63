"""Budgeted prefill: one budget per segment for all layers and KV heads, shared in proportion to need."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..state.cache import ModelShape
from .criticality import attention_entropy, expected_attention
from .head_needs import HeadNeeds
from .policies import LayerQueries, PageScores

ROUNDING = 1e-3  # pages, below which a part of a page is a rounding error of float32


class SegmentBudget(NamedTuple):
    """State that layers pass on during a segment."""

    layer: int  # number of the layer that receives it
    entropy: jax.Array | None  # [rows, layers, kv_heads], of the segment before; 0 where there was none
    pages: jax.Array | None  # int32 [rows, layers, kv_heads] of this segment; computed by the lowest layer


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class BudgetedPrefill:
    """A budget per layer and KV head that follows the head's need, and is `base` on average.

        w = need × exp(E) if `entropy`, else need
        B = min(P, m + λ w),   m = `least_share` × base,   Σ B = (number of heads) × min(base, P)

    with the heads of all layers above the dense ones, P the tokens of the prior pages, λ such that the sum
    holds, and E the entropy of the head's expected attention to pages in the segment before, in nats (0 where
    there was none). Budgets are whole pages, by largest remainders. The pages of highest expected attention
    within the budget are read, and the segment itself; the others are not on the head's page list.

    Args:
        needs: the table of needs of the model.
        base: mean budget in tokens; each head of each layer counts once.
        entropy: weigh needs by exp(E).
        least_share: least budget of a head, as a part of `base`.
        segment: queries of a segment, a power of two.
        dense_below: position before which segments read all pages.
        dense_layers: number of layers, from the lowest, that read all pages.
        page_size: page size to allocate the cache with; None for any.

    Source: the budgets by entropy of Xu et al. 2026 (arXiv 2606.09508). Differs from the paper: budgets are
    shared over all layers at an equal total, by a table measured on text. The entropy of the segment before
    is off by default: `benchmarks.long_context.head_budgets` measured that it adds nothing to the table.
    """

    needs: HeadNeeds
    base: int = 512
    entropy: bool = False
    least_share: float = 0.05
    segment: int = 512
    dense_below: int = 4096
    dense_layers: int = 1
    page_size: int | None = 16

    def check_model(self, shape: ModelShape) -> None:
        """See `ModelWidePolicy`: the table must be of a model of this shape."""
        self.needs.check_model(shape)

    def init(self, rows: int, kv_heads: int, pages: int) -> jax.Array:
        """See `PrefillPolicy`; the state of a layer is the entropy of its heads, 0 without `entropy`."""
        return jnp.zeros((rows, kv_heads))

    def begin_segment(self, states: tuple[jax.Array, ...]) -> SegmentBudget:
        """See `ModelWidePolicy`."""
        return SegmentBudget(0, jnp.stack(states, 1) if self.entropy else None, None)

    def score_pages(
        self, queries: LayerQueries, state: jax.Array, below: SegmentBudget
    ) -> tuple[PageScores, jax.Array, SegmentBudget]:
        """See `PrefillPolicy`."""
        scores = expected_attention(queries)
        page_size = queries.layer.keys.shape[2]
        pages = below.pages
        if pages is None:
            pages = self.pages_of_heads(queries.prior_pages.sum(1, dtype=jnp.int32), below.entropy, page_size)
        after = state
        if self.entropy:
            counts = queries.prior_pages.any(1) & queries.valid.any(1)
            after = jnp.where(counts[:, None], attention_entropy(scores), state)
        budget = (pages[:, below.layer] * page_size).astype(jnp.float32)
        return PageScores(scores, budget), after, SegmentBudget(below.layer + 1, below.entropy, pages)

    def pages_of_heads(self, prior: jax.Array, entropy: jax.Array | None, page_size: int) -> jax.Array:
        """Pages that each head reads, int32 `[rows, layers, kv_heads]`; 0 in the dense layers.

        Args:
            prior: int32 `[rows]`, pages before the segment.
            entropy: `[rows, layers, kv_heads]`, in nats; None for the table alone.
            page_size: positions of a page.
        """
        rows, dense = prior.shape[0], self.dense_layers
        table = jnp.asarray(self.needs.need, jnp.float32)[dense:]
        weights = jnp.broadcast_to(table / table.max(), (rows, *table.shape))
        if entropy is not None:
            relative = entropy[:, dense:] - entropy[:, dense:].max((1, 2), keepdims=True)
            weights = weights * jnp.exp(relative)
        flat = weights.reshape(rows, -1)
        pages = share_pages(flat, self.base // page_size, prior, self.least_share).reshape(weights.shape)
        return jnp.pad(pages, ((0, 0), (dense, 0), (0, 0)))


def share_pages(weights: jax.Array, mean_pages: int, prior: jax.Array, least_share: float) -> jax.Array:
    """Shares pages in proportion to weights; what a head cannot use goes to the others.

    Args:
        weights: float32 `[rows, heads]`, above 0.
        mean_pages: pages of a head on average.
        prior: int32 `[rows]`, pages that there are: the most of a head.
        least_share: least share of a head, as a part of `mean_pages`, in [0, 1].

    Returns:
        int32 `[rows, heads]`.

    >>> share_pages(jnp.array([[1.0, 3.0], [1.0, 3.0]]), 8, jnp.array([100, 10]), 0.0).tolist()
    [[4, 12], [6, 10]]
    """
    heads = weights.shape[1]
    total = jnp.minimum(mean_pages, prior) * heads
    most = prior.astype(jnp.float32)
    least = jnp.minimum(least_share * mean_pages, most)
    room = (most - least)[:, None]
    # If the k heads of largest weights get all pages, the others get m + λ w. The least k that fits is right.
    falling = -jnp.sort(-weights, -1)
    weight_left = jnp.cumsum(falling[:, ::-1], -1)[:, ::-1]
    capped = jnp.arange(heads, dtype=jnp.float32)
    left = total.astype(jnp.float32)[:, None] - heads * least[:, None] - capped * room
    slope = jnp.maximum(left, 0.0) / weight_left
    fits = slope * falling <= room
    first = jnp.argmax(fits, -1)[:, None]
    slope = jnp.where(fits.any(-1, keepdims=True), jnp.take_along_axis(slope, first, -1), jnp.inf)
    quota = jnp.minimum(most[:, None], least[:, None] + slope * weights)
    pages = jnp.floor(quota + ROUNDING).astype(jnp.int32)
    order = jnp.argsort(pages.astype(jnp.float32) - quota, -1, stable=True)
    rank = jnp.argsort(order, -1)
    pages += (rank < (total - pages.sum(-1, dtype=jnp.int32))[:, None]).astype(jnp.int32)
    return jnp.minimum(pages, prior[:, None])
