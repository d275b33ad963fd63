"""Page readers of a `Method`: attention over the selected pages during prefill and decode.

A reader lives while one chunk or step is traced and is called once per layer.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..attention.page_reader import ReadStats, dense_layer_stats, over_layers
from ..attention.page_selection import PagePolicy
from ..pallas import paged_attention
from ..state.cache import Cache, Layer
from .policies import (
    CompressionPolicy,
    LayerQueries,
    MethodState,
    ModelWidePolicy,
    PrefillCost,
    PrefillPolicy,
    page_list,
    top_mask,
)


class PrefillReader:
    """Attention of one chunk of the prompts, layer after layer.

    Args:
        policy: chooses the earlier pages that a chunk attends to; None reads all.
        compression: observes the queries; None for no compression.
        cache: the KV cache of the rows of the chunk.
        memory: state of the method before the chunk.
        span: where the tokens of the chunk stand (`attend.TokenSpan`).
        total: int32 `[rows]`, positions that each whole prompt takes.
    """

    def __init__(
        self,
        policy: PrefillPolicy | None,
        compression: CompressionPolicy | None,
        cache: Cache,
        memory: MethodState,
        span: Any,
        total: jax.Array,
    ) -> None:
        self.policy, self.compression = policy, compression
        self.cache, self.before, self.span = cache, memory, span
        self.last_segment = span.start + span.num_tokens >= total
        self.prefill: list[Any] = []
        self.observed: list[Any] = []
        self.below: Any = None
        if isinstance(policy, ModelWidePolicy):
            self.below = policy.begin_segment(memory.prefill)
        self.prefill_cost = memory.prefill_cost

    def memory(self) -> MethodState:
        """The state for the next chunk."""
        return self.before._replace(
            prefill=tuple(self.prefill), observed=tuple(self.observed), prefill_cost=self.prefill_cost
        )

    def read(self, layer: Layer, q: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
        """Attention of a chunk of one query, `[rows, kv_heads, group, head_dim]`."""
        return self.read_prompt(layer, q[:, :, :, None], first[:, None], self.span.start, last)[:, :, :, 0]

    def read_prompt(
        self, layer: Layer, q: jax.Array, first: jax.Array, query: jax.Array, last: jax.Array
    ) -> jax.Array:
        """Causal attention of a chunk to the pages that the method selects.

        Args:
            layer: keys, values and page summaries.
            q: scaled queries, `[rows, kv_heads, group, n, head_dim]`.
            first: int32 `[rows, n]`, first position that each query sees.
            query: int32 `[rows]`, position of the first query.
            last: int32 `[rows]`, end of the positions held.

        Returns:
            `[rows, kv_heads, group, n, head_dim]`.
        """
        table, size, n = layer.pages_of(self.cache.table), self.cache.page_size, q.shape[3]
        valid = jnp.arange(n) < self.span.num_tokens[:, None]
        page = jnp.arange(table.shape[1])
        prior_pages = (page + 1) * size <= query[:, None]
        queries = LayerQueries(q, valid, query, prior_pages, layer, table)
        number = max(len(self.prefill), len(self.observed))
        num_prior = prior_pages.sum(-1, dtype=jnp.int32)[:, None]  # [rows, 1]

        def dense() -> jax.Array:
            return paged_attention.prefill(q, layer.keys, layer.values, table, None, None, first, query, last)

        policy = self.policy
        if policy is None:
            out, num_read = dense(), num_prior
        else:
            page_scores, state, self.below = policy.score_pages(
                queries, self.before.prefill[number], self.below
            )
            self.prefill.append(state)
            read_all = (query < policy.dense_below) | self.last_segment | (self.span.num_tokens == 0)
            within_budget = jnp.minimum(page_scores.budget.astype(jnp.int32) // size, num_prior)
            num_read = jnp.where(read_all[:, None], num_prior, within_budget)
            segment_pages = (page * size < last[:, None]) & ~prior_pages

            def sparse() -> jax.Array:
                kept = top_mask(page_scores.scores, prior_pages[:, None], num_read) | segment_pages[:, None]
                index, count = page_list(kept)
                return paged_attention.prefill(
                    q, layer.keys, layer.values, table, index, count, first, query, last
                )

            if number < policy.dense_layers:
                out, num_read = dense(), num_prior
            else:
                out = jax.lax.cond(read_all.all(), dense, sparse)
        self._add_cost(queries, num_read)
        if self.compression is not None:
            self.observed.append(self.compression.observe(queries, self.before.observed[number]))
        return out

    def _add_cost(self, queries: LayerQueries, num_read: jax.Array) -> None:
        """Adds the cost of one layer, whose queries read `num_read` `[rows, kv_heads or 1]` prior pages."""
        kv_heads, group, size = queries.q.shape[1], queries.q.shape[2], self.cache.page_size
        n = self.span.num_tokens.astype(jnp.float32)
        num_prior = queries.prior_pages.sum(1)
        prior = jnp.broadcast_to(num_read, (num_read.shape[0], kv_heads)).sum(1).astype(jnp.float32) * size
        # Positions before the first query in the page where the segment starts, and pairs within the segment.
        lead = (queries.start - num_prior * size).astype(jnp.float32)
        segment_pairs = n * (lead + (n + 1) / 2)
        products = group * (prior * n + kv_heads * segment_pairs)
        positions = prior + kv_heads * (lead + n)
        if self.policy is not None:  # scoring a page costs a query head two products of d numbers each
            scored = jnp.where(n > 0, num_prior, 0).astype(jnp.float32) * kv_heads
            products, positions = products + group * scored, positions + scored
        self.prefill_cost = PrefillCost(
            self.prefill_cost.products + jnp.where(n > 0, products, 0.0),
            self.prefill_cost.positions + jnp.where(n > 0, positions, 0.0),
        )


class DecodeReader:
    """Attention of one decode step, layer after layer.

    Args:
        compression: observes the queries; None for no compression.
        policy: chooses the pages of a step; None reads those that the method holds.
        cache: the KV cache of the rows of the step.
        dropped_mass_limit: ε, float32 `[rows]`, in [0, 1).
        memory: state of the method before the step.
        tokens: int32 `[rows]`, how many tokens each row has emitted.
    """

    def __init__(
        self,
        compression: CompressionPolicy | None,
        policy: PagePolicy | None,
        cache: Cache,
        dropped_mass_limit: jax.Array,
        memory: MethodState,
        tokens: jax.Array,
    ) -> None:
        self.compression, self.cache, self.before = compression, cache, memory
        self.inner = (
            None if policy is None else policy.reader(cache, dropped_mass_limit, memory.page_lists, tokens)
        )
        self.layer_stats: list[ReadStats] = []
        self.observed: list[Any] = []

    def memory(self) -> MethodState:
        """The state for the next step."""
        page_lists = self.before.page_lists if self.inner is None else self.inner.memory()
        return self.before._replace(observed=tuple(self.observed), page_lists=page_lists)

    def read(self, layer: Layer, q: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
        """Attention of one query per row.

        Args:
            layer: keys, values and page summaries.
            q: scaled queries, `[rows, kv_heads, group, head_dim]`.
            first: int32 `[rows]`, first position that the query sees.
            last: int32 `[rows]`, end of the positions held.

        Returns:
            `[rows, kv_heads, group, head_dim]`.
        """
        table, number = layer.pages_of(self.cache.table), len(self.layer_stats)
        if self.compression is not None:
            start = jnp.maximum(last - 1, 0)
            prior_pages = (jnp.arange(table.shape[1]) + 1) * self.cache.page_size <= start[:, None]
            queries = LayerQueries(q[:, :, :, None], (last > 0)[:, None], start, prior_pages, layer, table)
            self.observed.append(self.compression.observe(queries, self.before.observed[number]))
        if self.inner is not None:
            out = self.inner.read(layer, q, first, last)
            self.layer_stats.append(self.inner.layer_stats[-1])
            return out
        index = count = None
        stats = dense_layer_stats(layer, first, last)
        if self.before.held_pages:
            index, count = self._page_lists(self.before.held_pages[number], last)
            unused = jnp.where(last > 0, -last % self.cache.page_size, 0)
            read = (count * self.cache.page_size - unused[:, None]).sum(1).astype(jnp.float32)
            stats = stats._replace(positions=read, held=read)
        self.layer_stats.append(stats)
        return paged_attention.decode(q, layer.keys, layer.values, table, index, count, first, last).out

    def _page_lists(self, held_pages: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The pages each head holds: the first `held_pages` of the compressed ones, and all newer pages."""
        page = jnp.arange(self.cache.table.shape[1])
        num_pages = -(-last // self.cache.page_size)[:, None, None]
        compressed = page < self.before.kept_pages[:, None, None]
        held = jnp.where(held_pages[..., None] < 0, True, page < held_pages[..., None])
        return page_list((~compressed | held) & (page < num_pages))

    def total(self) -> ReadStats:
        """Read statistics of the step, over all layers."""
        return over_layers(self.layer_stats)
