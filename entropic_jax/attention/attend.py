"""Paged attention of a layer: writes keys and values into pages, then attends to the pages of each row.

Each row costs in proportion to its own pages, and a page that is not listed is never read.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..pallas import paged_attention
from ..pallas.paged_attention import PartialAttention, partial
from ..pallas.paged_attention.quantised import put_pages, stored
from ..pallas.paged_attention.write_reference import update_summary
from ..state.cache import Cache, Layer
from .divided_pages import merged, own_pages
from .layer_loop import LoopedAttention
from .statistics import Observer


class TokenSpan(NamedTuple):
    """The positions of the tokens of a pass: `num_tokens[row]` of them, from position `start[row]` on."""

    start: jax.Array  # int32 [rows]
    num_tokens: jax.Array  # int32 [rows], 0 for a row that must not write


def last_positions(span: TokenSpan) -> jax.Array:
    """The end of the positions that each row holds after a pass, int32 `[rows]`; 0 without tokens."""
    return jnp.where(span.num_tokens > 0, span.start + span.num_tokens, 0)


Attend = Callable[..., tuple[jax.Array, Layer]]


def attend_to(cache: Cache, span: TokenSpan, reader: Any = None, observer: Observer | None = None) -> Attend:
    """The function that a model calls in each layer: writes keys and values, then attends to the pages.

    `attend(q, k, v, layer, window=None, soft_cap=None, sink=None, chunk=None)` takes q `[rows, n, heads,
    head_dim]` and rotated k, v `[rows, n, kv_heads, head_dim]`, and returns the attention output in the shape
    of q, and the layer as written. The others are those of `read`.

    Args:
        cache: the paged KV cache.
        span: where the tokens stand.
        reader: from a `page_selection.PagePolicy`: queries attend to the pages that it selects. None: to all.
        observer: takes statistics of the attention of a single query per row.

    Raises:
        ValueError: attention is observed, and the pages of a KV head are on several devices.
    """
    table = cache.table
    if observer is not None and cache.is_divided:
        raise ValueError("controller must not observe attention where devices divide a KV head's pages")

    # Outside of a loop over layers, which share them.
    lists = {layer.page_shards: own_pages(layer, table, last_positions(span)) for layer in cache.layers}

    def attend(q, k, v, layer, window=None, soft_cap=None, sink=None, chunk=None):
        layer, listed = write(layer, table, span, k, v), lists[layer.page_shards]
        return read(layer, table, span, q, window, reader, observer, soft_cap, sink, chunk, listed), layer

    return LoopedAttention(attend, [x for x in (reader, observer) if x is not None])


def write(layer: Layer, table: jax.Array, span: TokenSpan, k: jax.Array, v: jax.Array) -> Layer:
    """Stores keys and values at their positions and updates the page summaries.

    Args:
        layer: its keys, values and page summaries.
        table: int32 `[rows, pages of a row]`, the page table.
        span: where the tokens of each row stand; those past its `num_tokens` go to the scratch page, which is
            never read.
        k: keys `[rows, n, kv_heads, head_dim]`.
        v: values of the same shape.
    """
    n, table = k.shape[1], layer.pages_of(table)
    summaries = (layer.key_min, layer.key_max, layer.key_sum, layer.value_norm)
    in_order = n == 1 or paged_attention.writes_in_order((layer.keys, layer.values), summaries, k, v)
    written = (_write_in_order if in_order else _write_many)(layer, table, span, k, v)
    return written._replace(first_page=layer.first_page, page_shards=layer.page_shards)


def _write_in_order(layer: Layer, table: jax.Array, span: TokenSpan, k: jax.Array, v: jax.Array) -> Layer:
    """One token after the other, so that a chunk leaves the bits that single tokens leave."""
    n, size, bin_page = k.shape[1], jnp.int32(layer.keys.shape[2]), layer.keys.shape[0] - 1
    position = span.start[:, None] + jnp.arange(n)
    index = jnp.minimum(jax.lax.div(position, size), table.shape[1] - 1)
    written = jnp.arange(n) < span.num_tokens[:, None]
    page = jnp.where(written, jnp.take_along_axis(table, index, 1), bin_page)
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    return _store(layer, flat(k), flat(v), flat(page), flat(jax.lax.rem(position, size)))


def _store(layer: Layer, k: jax.Array, v: jax.Array, page: jax.Array, slot: jax.Array) -> Layer:
    """Keys and values `[tokens, kv_heads, head_dim]`, each into a slot of a page, which slot 0 starts."""
    summaries = (layer.key_min, layer.key_max, layer.key_sum, layer.value_norm)
    pools = (layer.keys, layer.values)
    tiles, summaries = paged_attention.write(pools, summaries, k, v, page, slot)
    moments: dict[str, Any] = {}
    if layer.value_sum is not None:
        value = stored(v, layer.values)
        moments["value_sum"] = update_summary(layer.value_sum, value, page, slot, jnp.add)
        moments["value_square"] = update_summary(layer.value_square, value * value, page, slot, jnp.add)
    return Layer(*tiles, *summaries, **moments)


def _write_many(layer: Layer, table: jax.Array, span: TokenSpan, k: jax.Array, v: jax.Array) -> Layer:
    rows, n, kv_heads, head_dim = k.shape
    size, bin_page = layer.keys.shape[2], layer.keys.shape[0] - 1
    touched = min(-(-(n - 1) // size) + 1, table.shape[1])  # pages that n positions can reach into
    first = span.start // size
    index = jnp.minimum(first[:, None] + jnp.arange(touched), table.shape[1] - 1)
    page = jnp.take_along_axis(table, index, 1)  # [rows, touched]
    # Position of every slot of the touched pages, and the token that belongs there, if any.
    position = (first[:, None] + jnp.arange(touched))[:, :, None] * size + jnp.arange(size)
    token = position - span.start[:, None, None]
    new = (token >= 0) & (token < span.num_tokens[:, None, None])
    held = (position < span.start[:, None, None]) | new
    page = jnp.where(new.any(2), page, bin_page)
    source = jnp.clip(token, 0, n - 1).reshape(rows, -1)

    def merge(pool, x):
        fresh = jnp.take_along_axis(x, source[:, :, None, None], 1)
        fresh = fresh.reshape(rows, touched, size, kv_heads, head_dim).swapaxes(2, 3)
        return put_pages(pool, page, fresh, new)

    keys, key = merge(layer.keys, k)
    values, value = merge(layer.values, v)
    seen = held[:, :, None, :, None]
    value = jnp.where(seen, value, 0.0)
    norm = jnp.sqrt(jnp.square(value).sum(-1)).max(-1)
    moments: dict[str, Any] = {}
    if layer.value_sum is not None and layer.value_square is not None:
        moments["value_sum"] = layer.value_sum.at[page].set(value.sum(3))
        moments["value_square"] = layer.value_square.at[page].set(jnp.square(value).sum(3))
    return Layer(
        keys,
        values,
        layer.key_min.at[page].set(jnp.where(seen, key, jnp.inf).min(3)),
        layer.key_max.at[page].set(jnp.where(seen, key, -jnp.inf).max(3)),
        layer.key_sum.at[page].set(jnp.where(seen, key, 0.0).sum(3)),
        layer.value_norm.at[page].set(norm),
        **moments,
    )


def read(
    layer: Layer,
    table: jax.Array,
    span: TokenSpan,
    q: jax.Array,
    window: int | None = None,
    reader: Any = None,
    observer: Observer | None = None,
    soft_cap: float | None = None,
    sink: jax.Array | None = None,
    chunk: int | None = None,
    lists: tuple[Any, Any] | None = None,
) -> jax.Array:
    """Causal attention of q `[rows, n, heads, head_dim]` to the pages of each row; q's shape and dtype.

    The query at `start + i` sees positions up to its own. Each row costs in proportion to its own pages; a
    row without tokens reads nothing and yields zeros. Where devices divide the pages of a KV head, the output
    is that of this device's heads alone. Up to `paged_attention.MAX_VERIFIED` queries per row
    have, on a CPU, the bits that single queries have.

    Args:
        layer: its keys, values and page summaries.
        table: int32 `[rows, pages of a row]`, the page table that layers share.
        span: where the queries of each row stand.
        q: queries `[rows, n, heads, head_dim]`, unscaled; of all devices that divide the pages of a KV head.
        window: positions that a query sees at most, its own included; None for all.
        reader: from a `page_selection.PagePolicy`: reads the pages that it chooses. None reads all.
        observer: takes statistics of the attention of single tokens, without soft cap and sink.
        soft_cap: c: scores are c · tanh(score / c); None for the scores themselves.
        sink: `[heads]`, the logit by which each head attends to nothing; None for none.
        chunk: positions are cut into chunks of so many, and a query sees its own chunk only; None: no chunks.
        lists: the result of `own_pages`, if it is known.

    Raises:
        ValueError: a reader of prompts would have to read with a soft cap or sinks.
    """
    rows, n, _, head_dim = q.shape
    q = (q.astype(jnp.float32) * head_dim**-0.5).astype(q.dtype)
    q = q.reshape(rows, n, layer.keys.shape[1], -1, head_dim).transpose(0, 2, 3, 1, 4)
    last = last_positions(span)
    lists = own_pages(layer, table, last) if lists is None else lists
    table = layer.pages_of(table)
    positions = span.start[:, None] + jnp.arange(n)
    first = jnp.zeros_like(positions) if window is None else jnp.maximum(positions - window + 1, 0)
    if chunk is not None:
        first = jnp.maximum(first, positions - positions % chunk)
    if n == 1 and observer is not None:
        observer.see(layer, q[:, :, :, 0], first[:, 0], last)
    if soft_cap is not None or sink is not None or layer.page_shards is not None:
        ends = (first, span.start, last)
        part = _read_partial(layer, table, lists, q, ends, reader, soft_cap)
        out = part.out if sink is None else _with_sink(part, sink)
    elif n > 1 and reader is not None:
        out = reader.read_prompt(layer, q, first, span.start, last)
    elif n > 1:
        attention = paged_attention.verify if n <= paged_attention.MAX_VERIFIED else paged_attention.prefill
        out = attention(q, layer.keys, layer.values, table, None, None, first, span.start, last)
    elif reader is not None:
        out = reader.read(layer, q[:, :, :, 0], first[:, 0], last)[:, :, :, None]
    else:
        part = paged_attention.decode(
            q[:, :, :, 0], layer.keys, layer.values, table, None, None, first[:, 0], last
        )
        out = part.out[:, :, :, None]
    return out.transpose(0, 3, 1, 2, 4).reshape(rows, n, -1, head_dim)


def _read_partial(
    layer: Layer, table: jax.Array, lists: Any, q: jax.Array, ends: Any, reader: Any, soft_cap: float | None
) -> PartialAttention:
    """Attention of `[rows, kv_heads, group, n, head_dim]` with its log-sum-exp.

    Args:
        layer: its keys, values and page summaries.
        table: int32 `[rows, pages of a row]`, the layer's pages.
        lists: a page list, with the number of its pages, where no reader chooses pages; None twice: all.
        q: scaled queries.
        ends: the ends of the positions seen: the first one of each query, the first query's own, and the last
            one.
        reader: as for `read`.
        soft_cap: as for `read`.
    """
    first, query, last = ends
    rows, n = q.shape[0], q.shape[3]
    if reader is not None and (n > 1 or not hasattr(reader, "read_partial")):
        raise ValueError(
            "method must be None for a model whose attention has a soft cap or sinks, or whose KV heads "
            "are divided over devices"
        )
    if n == 1 and reader is not None:
        part = reader.read_partial(layer, q[:, :, :, 0], first[:, 0], last, soft_cap)
        return jax.tree.map(lambda x: x[:, :, :, None], part)
    pools, positions = (layer.keys, layer.values), (table, *lists, first, query, last)
    if n > paged_attention.MAX_VERIFIED or (n > 1 and partial.has_kernel(q, *pools, *positions)):
        return merged(layer, paged_attention.prefill_partial(q, *pools, *positions, soft_cap=soft_cap))
    queries, positions = partial.as_rows(q, *positions)
    part = merged(layer, paged_attention.decode(queries, *pools, *positions, soft_cap=soft_cap))
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(rows, n, *x.shape[1:]), 1, 3), part)


def _with_sink(part: PartialAttention, sink: jax.Array) -> jax.Array:
    """The output if each head also attends to nothing, by a logit `[heads]`: out · sigmoid(lse − sink)."""
    logit = sink.astype(jnp.float32).reshape(part.log_sum_exp.shape[1:3])[:, :, None]
    share = jax.nn.sigmoid(part.log_sum_exp - logit)
    return (part.out.astype(jnp.float32) * share[..., None]).astype(part.out.dtype)
