"""EntropyInfer's prefill: KV heads whose attention spreads out read more of the prompt."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .criticality import attention_entropy, expected_attention
from .policies import LayerQueries, PageScores


class HeadBudgets(NamedTuple):
    """State of one layer; each `[rows, kv_heads]`."""

    entropy: jax.Array  # of the previous segment
    budget: jax.Array  # tokens
    rigid: jax.Array  # bool: low entropy in every segment so far
    num_segments: jax.Array  # int32: segments with prior pages


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class EntropyPrefill:
    """A budget per KV head and segment that follows the entropy of the head's block attention.

        E_s = −Σ A ln A, divided by ln(number of prior blocks) if `relative`
        rigid, while E < `rigid_below` in every segment:   B_s = B₀
        else r_s = clip((E_s − E_{s−1}) / E_{s−1}, 0, 1 + Δ),   B_s = clip(B_{s−1} + α B₀ (r_s − Δ), B₀, 3 B₀)

    with A from `criticality.expected_attention`. The blocks of highest A within the budget are read, and the
    segment itself.

    Args:
        base: B₀, tokens. growth: α ≥ 0. tolerance: Δ ≥ 0, relative growth of the entropy that leaves the
        budget unchanged. most: largest budget, as a multiple of `base`. rigid_below: entropy below which a
        head is rigid; the default is `heads.rigid_threshold` of the embedded
            model.
        scaled: divide products by √head_dim.
        relative: divide the entropy by its largest possible value.
        per_head: a budget per KV head instead of the layer's largest for all.
        matched: scale the budgets of a layer so that their mean over KV heads is `base` at every segment, for
            comparisons at equal cost.
        segment: queries of a segment, a power of two.
        dense_below: position before which segments read all pages.
        dense_layers: number of layers, from the lowest, that read all pages.
        page_size: page size to allocate the cache with; None for any.

    On the embedded model the entropy, once divided by its largest value, grows by at most 0.374 from a
    segment to the next, which is less than Δ = 0.4: no budget ever leaves `base`, and the method reads what
    `UniformBudget` reads. So these defaults say nothing of what entropy is worth here.

    Source: Xu et al. 2026 (arXiv 2606.09508) and its release. Differs from the release: a block is a page;
    products are divided by √head_dim, without which "rigid" depends on the scale of the keys; the entropy is
    relative to its largest value, so that a threshold means the same at every length; budgets hold per KV
    head; a head counts as rigid until it is not, since the prompt is prefilled segment by segment.
    `AS_RELEASED` undoes all but the first and the last.
    """

    base: int = 2048
    growth: float = 0.5
    tolerance: float = 0.4
    most: float = 3.0
    rigid_below: float = 0.84
    scaled: bool = True
    relative: bool = True
    per_head: bool = True
    matched: bool = False
    segment: int = 512
    dense_below: int = 4096
    dense_layers: int = 1
    page_size: int | None = 16

    def init(self, rows: int, kv_heads: int, pages: int) -> HeadBudgets:
        """See `PrefillPolicy`."""
        shape = (rows, kv_heads)
        budget = jnp.full(shape, self.base, jnp.float32)
        return HeadBudgets(jnp.zeros(shape), budget, jnp.ones(shape, bool), jnp.zeros(shape, jnp.int32))

    def score_pages(
        self, queries: LayerQueries, state: HeadBudgets, below: None
    ) -> tuple[PageScores, HeadBudgets, None]:
        """See `PrefillPolicy`."""
        attention = expected_attention(queries, self.scaled)
        blocks = queries.prior_pages.sum(1).astype(jnp.float32)[:, None]
        entropy = attention_entropy(attention)
        if self.relative:
            entropy = jnp.where(blocks > 1, entropy / jnp.log(jnp.maximum(blocks, 2.0)), 0.0)
        counts = (blocks > 0) & queries.valid.any(1)[:, None]
        after = self.update_budgets(state, entropy)
        after = jax.tree.map(lambda new, old: jnp.where(counts, new, old), after, state)
        budget = after.budget
        if self.matched:
            budget = self.base * budget / budget.mean(1, keepdims=True)
        if not self.per_head:
            budget = jnp.broadcast_to(budget.max(1, keepdims=True), budget.shape)
        return PageScores(attention, budget), after, None

    def update_budgets(self, state: HeadBudgets, entropy: jax.Array) -> HeadBudgets:
        """One segment of the recurrence, with the segment's entropies `[rows, kv_heads]`."""
        rigid = state.rigid & (entropy < self.rigid_below)
        ratio = (entropy - state.entropy) / jnp.maximum(state.entropy, 1e-30)
        ratio = jnp.where(state.num_segments > 0, jnp.clip(ratio, 0.0, 1 + self.tolerance), 0.0)
        budget = state.budget + self.growth * self.base * (ratio - self.tolerance)
        budget = jnp.clip(budget, self.base, self.most * self.base)
        return HeadBudgets(entropy, jnp.where(rigid, float(self.base), budget), rigid, state.num_segments + 1)


AS_RELEASED = EntropyPrefill(rigid_below=1e-5, scaled=False, relative=False, per_head=False)
