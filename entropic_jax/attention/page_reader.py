"""Page reader: attends to the pages chosen for each layer of a step, and counts what was read.

`page_selection` decides which pages those are.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ..pallas import paged_attention
from ..pallas.paged_attention import PartialAttention
from ..pallas.paged_attention.quantised import bytes_per_number
from ..pallas.paged_attention.reference import decode_gathered
from ..state.cache import Cache, Layer, ModelShape
from .divided_pages import merged, over_group, own_heads, own_listed, own_pages

SUMMARY_BYTES = 3 * 4  # of a page's summary, per number of a key: the bounds and the sum, in float32


class ReadStats(NamedTuple):
    """Read statistics of a layer or a step; each float32 `[rows]`."""

    positions: jax.Array  # keys (or values) read, summed over KV heads
    held: jax.Array  # keys in the cache, summed over KV heads
    dropped_mass: jax.Array  # attention mass left unread, estimated, mean over heads
    certificate: jax.Array  # bound of the change of any head's output, ‖Δ‖₂ ≤ 2δ·max‖v‖
    summaries: jax.Array | float = 0.0  # what was read to choose, in positions that cost as much


class LayerPages(NamedTuple):
    """The pages that a layer reads."""

    page_list: jax.Array  # int32 [rows, kv_heads, most pages of a row], entries of the page table
    num_pages: jax.Array  # int32 [rows, kv_heads]
    dropped_mass: jax.Array  # float32 [rows, kv_heads]: estimated attention mass of the other pages
    is_new: jax.Array  # bool [rows]: chosen for this very query
    summaries_read: jax.Array  # bool [rows]: to choose them, the summary of every page was read
    log_bound: jax.Array | None  # float32 [rows, kv_heads, group], of the log-sum-exp of the other pages


class PageGates(NamedTuple):
    """The factor by which a layer multiplies the attention to each page."""

    gate: jax.Array  # float32 [rows, kv_heads, pages], in [0, 1]
    dropped_mass: jax.Array  # float32 [rows, kv_heads]: estimated attention mass that the gates take away
    in_use: jax.Array  # bool [rows, 1, pages]: the page holds tokens


class PageChooser(Protocol):
    """Chooses the pages of one step, layer after layer; see `page_selection.StepSelection`."""

    def choose(self, number: int, layer: Layer, q: jax.Array, last: jax.Array) -> Any:
        """The `LayerPages` or the `PageGates` of a layer; None reads every page.

        Args:
            number: number of the layer, from 0.
            layer: its keys, values and page summaries.
            q: scaled queries, `[rows, kv_heads, group, head_dim]`.
            last: int32 `[rows]`, end of the positions held.
        """

    def memory(self) -> Any:
        """The part of the choice that the next step needs: a pytree with one entry per row."""

    def layer_kind(self, number: int) -> Hashable | None:
        """How a layer's pages are chosen; see `layer_loop.LayerRecorder`."""


class LayerAttention:
    """Attention of one step to the KV cache, layer after layer; its subclasses say which pages it covers."""

    def read(self, layer: Layer, q: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
        """The output of `read_partial`, `[rows, kv_heads, group, head_dim]`.

        Args:
            layer: as for `read_partial`, like the others.
            q: scaled queries.
            first: first position that the query sees.
            last: end of the positions held.
        """
        return self.read_partial(layer, q, first, last).out

    def read_partial(
        self, layer: Layer, q: jax.Array, first: jax.Array, last: jax.Array, soft_cap: float | None = None
    ) -> PartialAttention:
        """The attention of the next layer with its log-sum-exp; arguments as in `PageReader`."""
        raise NotImplementedError

    def layer_kind(self, number: int) -> Hashable | None:
        """See `layer_loop.LayerRecorder`. None: each layer is traced for itself."""
        return None


class PageReader(LayerAttention):
    """Attention to the chosen pages of one step; it lives while a step is traced.

    Args:
        chooser: says which pages each layer reads.
        cache: the KV cache of the rows of the step.
    """

    def __init__(self, chooser: PageChooser, cache: Cache) -> None:
        self.chooser, self.cache = chooser, cache
        self.layer_stats: list[ReadStats] = []

    def read_partial(
        self, layer: Layer, q: jax.Array, first: jax.Array, last: jax.Array, soft_cap: float | None = None
    ) -> PartialAttention:
        """Attention of one query per row to the chosen pages of the next layer, with its log-sum-exp.

        Args:
            layer: its keys, values and page summaries.
            q: scaled queries, `[rows, kv_heads, group, head_dim]`.
            first: int32 `[rows]`, first position that the query sees.
            last: int32 `[rows]`, end of the positions held.
            soft_cap: the soft cap of the scores; pages are chosen without it.
        """
        table, decode = layer.pages_of(self.cache.table), self._decode
        pages, ends = self.chooser.choose(len(self.layer_stats), layer, q, last), (first, last)
        if pages is None:
            self.layer_stats.append(dense_layer_stats(layer, first, last))
            return decode(layer, q, own_pages(layer, self.cache.table, last), ends, soft_cap)
        if isinstance(pages, PageGates):
            self.layer_stats.append(self._gated_stats(layer, pages, last))
            operands = (q, layer.keys, layer.values, table, None, None, *ends)
            return decode_gathered(*operands, pages.gate, soft_cap)
        lists = own_listed(layer, self.cache.table, pages.page_list, pages.num_pages)
        part = decode(layer, q, lists, ends, soft_cap)
        self.layer_stats.append(self._stats(layer, pages, part, last))
        return part

    def _decode(
        self, layer: Layer, q: jax.Array, lists: Any, ends: Any, soft_cap: float | None
    ) -> PartialAttention:
        """Attention to the pages of a list, None twice for all, of every device that has some of them."""
        operands = (q, layer.keys, layer.values, layer.pages_of(self.cache.table), *lists, *ends)
        return merged(layer, paged_attention.decode(*operands, soft_cap=soft_cap))

    def _gated_stats(self, layer: Layer, pages: PageGates, last: jax.Array) -> ReadStats:
        gate, size, table = pages.gate, self.cache.page_size, layer.pages_of(self.cache.table)
        filled = jnp.clip(last[:, None] - jnp.arange(table.shape[1]) * size, 0, size)[:, None].astype(
            jnp.float32
        )
        held = (last * gate.shape[1]).astype(jnp.float32)
        norm = jnp.where(pages.in_use, layer.value_norm[table].swapaxes(1, 2), 0.0).max((1, 2))
        return ReadStats((gate * filled).sum((1, 2)), held, pages.dropped_mass.mean(-1), 2 * norm)

    def _stats(self, layer: Layer, pages: LayerPages, part: PartialAttention, last: jax.Array) -> ReadStats:
        size, kv_heads = self.cache.page_size, pages.num_pages.shape[1]
        row_pages = -(-last // size)[:, None]
        # All listed pages are full but the newest, which is always listed.
        unused = jnp.where(row_pages > 0, row_pages * size - last[:, None], 0)
        positions = jnp.maximum(pages.num_pages * size - unused, 0).sum(1).astype(jnp.float32)
        held = (last * kv_heads).astype(jnp.float32)
        summary_cost = (
            SUMMARY_BYTES / (2 * bytes_per_number(layer.keys.dtype, layer.keys.shape[-1])) * kv_heads
        )
        summaries = jnp.where(pages.summaries_read, summary_cost * row_pages[:, 0].astype(jnp.float32), 0.0)
        certificate = self._certificate(layer, pages, part, row_pages)
        return ReadStats(positions, held, pages.dropped_mass.mean(1), certificate, summaries)

    def _certificate(
        self, layer: Layer, pages: LayerPages, part: PartialAttention, row_pages: jax.Array
    ) -> jax.Array:
        """2δ·max‖v‖ of each row, where δ bounds the attention mass of the pages that are not listed."""
        page = jnp.arange(self.cache.table.shape[1])
        norm = layer.value_norm[layer.pages_of(self.cache.table)]
        norm = jnp.where((page < row_pages)[..., None], norm, 0.0).swapaxes(1, 2)
        norm = over_group(layer, self.cache.table, norm).max(2)
        if pages.log_bound is None:
            dropped = jnp.ones_like(part.log_sum_exp)
        else:
            bounded = pages.is_new[:, None, None]
            log_bound = own_heads(layer, pages.log_bound)
            dropped = jnp.where(bounded, jax.nn.sigmoid(log_bound - part.log_sum_exp), 1.0)
        left_out = (pages.num_pages < row_pages)[..., None]
        dropped = jnp.where(left_out & (part.log_sum_exp > -jnp.inf), dropped, 0.0)
        return (2 * dropped.max(2) * norm).max(1)

    def memory(self) -> Any:
        """The part of the choice that the next step needs."""
        return self.chooser.memory()

    def layer_kind(self, number: int) -> Hashable | None:
        """See `layer_loop.LayerRecorder`."""
        return self.chooser.layer_kind(number)

    def total(self) -> ReadStats:
        """Read statistics of the step, over all layers."""
        return over_layers(self.layer_stats)


def over_layers(layer_stats: list[ReadStats]) -> ReadStats:
    """The layers of a step together: positions summed, dropped mass averaged, the largest certificate."""
    full = (x._replace(summaries=x.summaries + jnp.zeros_like(x.positions)) for x in layer_stats)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *full)
    return ReadStats(
        stacked.positions.sum(0),
        stacked.held.sum(0),
        stacked.dropped_mass.mean(0),
        stacked.certificate.max(0),
        stacked.summaries.sum(0),
    )


def dense_layer_stats(layer: Layer, first: jax.Array, last: jax.Array) -> ReadStats:
    """Read statistics of a dense layer: every page of every active row is read.

    Args:
        layer: its keys, values and page summaries.
        first: int32 `[rows]`, first position that the query sees.
        last: int32 `[rows]`, end of the positions held.
    """
    positions = (jnp.maximum(last - first, 0) * layer.keys.shape[1]).astype(jnp.float32)
    zero = jnp.zeros_like(positions)
    return ReadStats(positions, positions, dropped_mass=zero, certificate=zero)


def dense_step_stats(shape: ModelShape, span: Any) -> ReadStats:
    """Read statistics of a dense step: every page of every active row is read.

    `span` (`attend.TokenSpan`) says where the tokens stand, before they are written.
    """
    positions = (
        jnp.where(span.num_tokens > 0, span.start + span.num_tokens, 0) * shape.kv_heads * shape.layers
    )
    positions = positions.astype(jnp.float32)
    zero = jnp.zeros_like(positions)
    return ReadStats(positions, positions, dropped_mass=zero, certificate=zero)
