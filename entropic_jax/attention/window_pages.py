"""Window pages: the first and the newest pages of each row, and every page in the last layers.

The cheapest way to read a part of the cache: nothing is estimated, and one list serves all layers. It is good
enough to draft tokens from, see `speculation.pruned`.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from ..pallas import paged_attention
from ..pallas.paged_attention import PartialAttention
from ..state.cache import Cache, Layer
from .divided_pages import merged, own_listed, own_pages
from .page_reader import LayerAttention, ReadStats, dense_layer_stats, over_layers


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class WindowPages:
    """Which pages a step reads; static: other numbers are another program.

    Source: StreamingLLM (Xiao et al. 2023, arXiv 2309.17453), sink and newest tokens. Differs from the paper:
    whole pages, in proportion to the context, and last layers that read everything.
    """

    recent_fraction: float = 0.125  # of a row's pages, the newest ones, that are read
    sink_pages: int = 1  # at the start of the row, read as well
    recent_pages: int = 2  # the newest pages that are read at least
    dense_layers: int = 1  # the last ones, which read every page

    def __post_init__(self) -> None:
        if not 0 <= self.recent_fraction <= 1:
            raise ValueError(f"recent_fraction must be between 0 and 1; got {self.recent_fraction}")
        for name, low in dict(sink_pages=0, recent_pages=1, dense_layers=0).items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}; got {getattr(self, name)}")

    def kept(self, layers: int) -> float:
        """The fraction of a long context that a model of `layers` layers reads."""
        dense = min(self.dense_layers, layers)
        return (dense + (layers - dense) * self.recent_fraction) / layers

    def reader(self, cache: Cache, length: jax.Array) -> "WindowReader":
        """The reader of one step.

        Args:
            cache: the KV cache of the rows of the step.
            length: int32 `[rows]`, positions held, that of the step's token included; 0 for idle rows.
        """
        return WindowReader(self, cache, length)


class WindowReader(LayerAttention):
    """Attention to the window pages of one step; it lives while a step is traced.

    Args:
        pages: the window pages of each layer.
        cache: the KV cache of the rows of the step.
        length: int32 `[rows]`, positions held.
    """

    def __init__(self, pages: WindowPages, cache: Cache, length: jax.Array) -> None:
        self.cache = cache
        self.num_listed = max(0, len(cache.layers) - pages.dense_layers)
        self.layer_stats: list[ReadStats] = []
        kv_heads, max_pages = cache.layers[0].keys.shape[1], cache.table.shape[1]
        row_pages = jax.lax.div(length + (cache.page_size - 1), jnp.int32(cache.page_size))
        recent = jnp.ceil(row_pages.astype(jnp.float32) * pages.recent_fraction).astype(jnp.int32)
        number = jnp.minimum(row_pages, pages.sink_pages + jnp.maximum(recent, pages.recent_pages))
        most_recent = max(pages.recent_pages, math.ceil(max_pages * pages.recent_fraction))
        listed = min(max_pages, pages.sink_pages + most_recent)
        entry = jnp.arange(listed, dtype=jnp.int32)
        page_index = jnp.where(entry < pages.sink_pages, entry, (row_pages - number)[:, None] + entry)
        page_index = jnp.where(entry < number[:, None], page_index, 0).astype(jnp.int32)
        rows = length.shape[0]
        self.page_list = jnp.broadcast_to(page_index[:, None], (rows, kv_heads, listed))
        self.num_pages = jnp.broadcast_to(number[:, None], (rows, kv_heads)).astype(jnp.int32)
        unused = row_pages * cache.page_size - length
        positions = (jnp.maximum(number * cache.page_size - unused, 0) * kv_heads).astype(jnp.float32)
        zero = jnp.zeros_like(positions)
        self.stats = ReadStats(positions, (length * kv_heads).astype(jnp.float32), zero, zero)

    def read_partial(
        self, layer: Layer, q: jax.Array, first: jax.Array, last: jax.Array, soft_cap: float | None = None
    ) -> PartialAttention:
        """Attention of one query per row to the pages of the next layer, with its log-sum-exp.

        Args:
            layer: its keys and values.
            q: scaled queries, `[rows, kv_heads, group, head_dim]`.
            first: int32 `[rows]`, first position that the query sees.
            last: int32 `[rows]`, end of the positions held.
            soft_cap: the soft cap of the scores.
        """
        is_listed, table = len(self.layer_stats) < self.num_listed, self.cache.table
        if is_listed:
            lists = own_listed(layer, table, self.page_list, self.num_pages)
        else:
            lists = own_pages(layer, table, last)
        self.layer_stats.append(self.stats if is_listed else dense_layer_stats(layer, first, last))
        operands = (layer.keys, layer.values, layer.pages_of(table), *lists, first, last)
        return merged(layer, paged_attention.decode(q, *operands, soft_cap=soft_cap))

    def layer_kind(self, number: int) -> bool:
        """See `layer_loop.LayerRecorder`: whether the layer reads the listed pages only."""
        return number < self.num_listed

    def total(self) -> ReadStats:
        """Read statistics of the step, over all layers; the mass left unread is not estimated."""
        return over_layers(self.layer_stats)
