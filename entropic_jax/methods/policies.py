"""Interfaces of sparse prefill and of KV-cache compression, and the data that they exchange.

Files of this package implement one of the two protocols each; `method.Method` combines them.
"""

from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from ..state.cache import Cache, Layer, ModelShape


class LayerQueries(NamedTuple):
    """The queries of one layer, and the pages that hold every key up to them."""

    q: jax.Array  # [rows, kv_heads, group, n, head_dim], scaled by 1/√head_dim
    valid: jax.Array  # bool [rows, n]: the query is not padding
    start: jax.Array  # int32 [rows], position of the first query
    prior_pages: jax.Array  # bool [rows, pages]: the page ends before the first query
    layer: Layer
    table: jax.Array  # int32 [rows, pages], the page table


class PageScores(NamedTuple):
    """Which prior pages a segment should read."""

    scores: jax.Array  # [rows, kv_heads, pages]; the highest are read first
    budget: jax.Array  # float32 [rows, kv_heads], tokens


class PrefillPolicy(Protocol):
    """Selects the prior pages that each segment of a prompt reads. Static.

    Segments that start before `dense_below`, the last segment of a prompt, and the first `dense_layers`
    layers read all pages.
    """

    @property
    def segment(self) -> int:
        """Queries of a segment, a power of two."""

    @property
    def dense_below(self) -> int:
        """Position before which segments read all pages."""

    @property
    def dense_layers(self) -> int:
        """Number of layers, from the lowest, that read all pages."""

    def init(self, rows: int, kv_heads: int, pages: int) -> Any:
        """The initial state of one layer, a pytree with leaves `[rows, …]`.

        Args:
            rows: number of rows of the batch.
            kv_heads: number of KV heads of a layer.
            pages: largest number of pages of a row.
        """

    def score_pages(self, queries: LayerQueries, state: Any, below: Any) -> tuple[PageScores, Any, Any]:
        """Scores the prior pages for one segment and layer.

        Args:
            queries: the segment's queries in this layer.
            state: what this layer keeps from segment to segment.
            below: what the layer below passed on, None in the lowest layer.

        Returns:
            The scores, the new state, and what the layer above receives as `below`.
        """


@runtime_checkable
class ModelWidePolicy(Protocol):
    """A `PrefillPolicy` that shares a budget over the layers of a model."""

    def check_model(self, shape: ModelShape) -> None:
        """Raises ValueError for a model that the policy is not for."""

    def begin_segment(self, states: tuple[Any, ...]) -> Any:
        """The value of `below` for the lowest layer, from the states of all layers before the segment."""


class CompressionPolicy(Protocol):
    """Selects the entries that stay in the KV cache after prefill. Static."""

    ragged: ClassVar[bool]  # whether the KV heads of a layer may keep different numbers of pages

    @property
    def budget(self) -> int:
        """Entries kept per KV head; where heads differ, the mean over the heads of a layer."""

    @property
    def delay(self) -> int:
        """Decode steps before the compression is applied."""

    def init(self, shape: ModelShape, cache: Cache) -> Any:
        """The initial state of one layer, a pytree with leaves `[rows, …]`."""

    def observe(self, queries: LayerQueries, state: Any) -> Any:
        """The state after these queries."""

    def score_entries(self, state: Any, keys: jax.Array, length: jax.Array) -> jax.Array:
        """Scores every entry of a layer; the highest are kept.

        Args:
            state: what this layer observed.
            keys: `[rows, kv_heads, positions, head_dim]`; arbitrary at and after `length`.
            length: int32 `[rows]`, entries held. Later positions are never kept.

        Returns:
            `[rows, kv_heads, positions]`.
        """

    def pages_per_head(self, scores: jax.Array, page_size: int) -> jax.Array | None:
        """Pages kept per head, int32 `[rows, kv_heads]`; None keeps `budget` entries of every head."""


class PrefillCost(NamedTuple):
    """Cost of the prompts read so far, summed over layers; float32 `[rows]`."""

    products: jax.Array  # query–key products over all query heads, including those that score pages
    positions: jax.Array  # keys (or values) read over all KV heads, including page summaries


class MethodState(NamedTuple):
    """State of a method; every leaf has one entry per row. Each policy defines the structure of its part."""

    prefill: tuple[Any, ...]  # of the prefill policy, one per layer
    observed: tuple[Any, ...]  # of the compression policy, one per layer
    page_lists: Any  # of the decode policy
    held_pages: tuple[jax.Array, ...]  # per layer, int32 [rows, kv_heads]; −1 for all
    kept_pages: jax.Array  # int32 [rows]: pages that the row had after compression
    pending: jax.Array  # bool [rows]: compression has not been applied yet
    prefill_cost: PrefillCost


def page_list(kept: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Indices of the flagged entries of `[…, pages]` in ascending order, and how many there are."""
    return jnp.argsort(~kept, axis=-1, stable=True).astype(jnp.int32), kept.sum(-1, dtype=jnp.int32)


def top_mask(scores: jax.Array, eligible: jax.Array, num_kept: jax.Array) -> jax.Array:
    """Flags the highest scores.

    Args:
        scores: `[…, n]`.
        eligible: bool `[…, n]`, the entries that may be flagged.
        num_kept: int32 `[…]`, how many to flag; of equal scores the first are taken.

    Returns:
        bool `[…, n]`.
    """
    scores = jnp.where(eligible, scores, -jnp.inf)
    descending = -jnp.sort(-scores, axis=-1)
    last = jnp.clip(num_kept - 1, 0, scores.shape[-1] - 1)[..., None]
    threshold = jnp.take_along_axis(descending, last, -1)
    above, tied = scores > threshold, (scores == threshold) & eligible
    num_tied = (num_kept - above.sum(-1))[..., None]
    return (above | (tied & (jnp.cumsum(tied, -1) <= num_tied))) & (num_kept > 0)[..., None]
