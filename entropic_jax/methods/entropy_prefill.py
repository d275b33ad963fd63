"""EntropyInfer's prefill: heads whose attention spreads out get more of the prompt to read."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .criticality import entropy, observation
from .method import Scene, Verdict


class Course(NamedTuple):
    """What a layer remembers of its heads; each `[rows, kv_heads]`."""

    entropy: jax.Array  # of the segment before
    budget: jax.Array  # tokens
    rigid: jax.Array  # bool: low entropy in every segment so far
    seen: jax.Array  # int32: segments with earlier pages


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class EntropyPrefill:
    """A budget for every (KV head, segment) that follows the entropy of the head's block attention.

        E_s = −Σ A ln A, over ln(number of earlier blocks) if `relative`
        rigid, while E < `rigid_below` in every segment:   B_s = B₀
        else r_s = clip((E_s − E_{s−1}) / E_{s−1}, 0, 1 + Δ),   B_s = clip(B_{s−1} + α B₀ (r_s − Δ), B₀, 3 B₀)

    with A from `criticality.observation`, B₀ = `base` tokens, α = `growth`, Δ = `tolerance`. The blocks of
    greatest A within the budget are read, and the segment itself. `matched` scales the budgets of a layer so
    that their mean over KV heads is `base` at every segment, for comparison at equal cost.

    Source: Xu et al. 2026 (arXiv 2606.09508) and its release. Differs from the release: a block is a page;
    products are divided by √head_dim, without which "rigid" depends on the scale of the keys; the entropy is
    relative to its greatest value, so that a threshold means the same at every length; budgets hold per KV
    head instead of the layer's greatest for all; a head counts as rigid until it is not, as the prompt is
    read segment by segment. `AS_RELEASED` undoes all but the first and the last.
    """

    base: int = 2048
    growth: float = 0.5
    tolerance: float = 0.4
    most: float = 3.0  # times `base`
    rigid_below: float = 0.84  # `heads.rigid_threshold` of the embedded model
    scaled: bool = True
    relative: bool = True
    per_head: bool = True
    matched: bool = False
    segment: int = 512
    dense_below: int = 4096
    dense_layers: int = 1
    page_size: int | None = 16

    def begin(self, rows: int, kv_heads: int, pages: int) -> Course:
        """See `Prefill`."""
        grid = (rows, kv_heads)
        budget = jnp.full(grid, self.base, jnp.float32)
        return Course(jnp.zeros(grid), budget, jnp.ones(grid, bool), jnp.zeros(grid, jnp.int32))

    def judge(self, scene: Scene, memory: Course, below: None) -> tuple[Verdict, Course, None]:
        """See `Prefill`."""
        share = observation(scene, self.scaled)
        blocks = scene.earlier.sum(1).astype(jnp.float32)[:, None]
        now = entropy(share)
        if self.relative:
            now = jnp.where(blocks > 1, now / jnp.log(jnp.maximum(blocks, 2.0)), 0.0)
        counts = (blocks > 0) & scene.asked.any(1)[:, None]
        after = self.advance(memory, now)
        after = jax.tree.map(lambda new, old: jnp.where(counts, new, old), after, memory)
        budget = after.budget
        if self.matched:
            budget = self.base * budget / budget.mean(1, keepdims=True)
        if not self.per_head:
            budget = jnp.broadcast_to(budget.max(1, keepdims=True), budget.shape)
        return Verdict(share, budget), after, None

    def advance(self, course: Course, now: jax.Array) -> Course:
        """One segment of the recurrence, with the entropies `[rows, kv_heads]` at hand."""
        rigid = course.rigid & (now < self.rigid_below)
        ratio = (now - course.entropy) / jnp.maximum(course.entropy, 1e-30)
        ratio = jnp.where(course.seen > 0, jnp.clip(ratio, 0.0, 1 + self.tolerance), 0.0)
        grown = course.budget + self.growth * self.base * (ratio - self.tolerance)
        grown = jnp.clip(grown, self.base, self.most * self.base)
        return Course(now, jnp.where(rigid, float(self.base), grown), rigid, course.seen + 1)


AS_RELEASED = EntropyPrefill(rigid_below=1e-5, scaled=False, relative=False, per_head=False)
