"""Attention where the devices that share a KV head divide its pages (`mesh.page_shards`).

Each device attends with the queries of the whole group to the pages that it has. The parts of a query head
are merged, by their log-sum-exps, on the device whose output projection reads that head.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..pallas.paged_attention import PartialAttention
from ..pallas.paged_attention.split_kv import merge_partials
from ..state.cache import Layer


def own_pages(layer: Layer, table: jax.Array, last: jax.Array) -> tuple[Any, Any]:
    """The page list of a dense read, and how many pages it has; None twice where pages are not divided.

    Args:
        layer: its page shards.
        table: int32 `[rows, pages of a row]`, the page table that layers share.
        last: int32 `[rows]`, end of the positions held.
    """
    if layer.page_shards is None:
        return None, None
    size = layer.keys.shape[2]
    entry = jnp.arange(table.shape[1], dtype=jnp.int32)
    kept = layer.page_shards.holds(table) & (entry * size < last[:, None])
    return _listed(jnp.broadcast_to(entry, table.shape), kept)


def own_listed(
    layer: Layer, table: jax.Array, page_list: jax.Array, num_pages: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The pages of a list that this device has, and how many; the list itself where pages are not divided.

    Args:
        layer: its page shards.
        table: int32 `[rows, pages of a row]`, the page table that layers share.
        page_list: int32 `[rows, 1, most pages of a row]`, ascending entries of the page table.
        num_pages: int32 `[rows, 1]`, how many of them are valid.
    """
    if layer.page_shards is None:
        return page_list, num_pages
    entries = page_list[:, 0]
    valid = jnp.arange(entries.shape[1]) < num_pages
    return _listed(entries, valid & layer.page_shards.holds(jnp.take_along_axis(table, entries, 1)))


def _listed(entries: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The kept of ascending entries `[rows, n]`, as a list `[rows, 1, n]` and its length `[rows, 1]`."""
    none = jnp.iinfo(jnp.int32).max
    ordered = jnp.sort(jnp.where(kept, entries, none), 1)
    return jnp.where(ordered == none, 0, ordered)[:, None], kept.sum(1, keepdims=True, dtype=jnp.int32)


def merged(layer: Layer, part: PartialAttention) -> PartialAttention:
    """The attention of this device's query heads to the pages of all devices of its group.

    Args:
        layer: its page shards; what is not divided stays as it is.
        part: the attention of all query heads of the group to the pages of this device, `[rows, 1, heads of
            the group, …]`.
    """
    shards = layer.page_shards
    if shards is None:
        return part
    rows, _, heads, *queries = part.log_sum_exp.shape
    # One collective for both costs less than two.
    together = jnp.concatenate([part.out.astype(jnp.float32), part.log_sum_exp[..., None]], -1)
    together = shards.exchange(together.reshape(rows, 1, shards.size, -1, together.shape[-1]), 2)
    out, log_sum_exp = together[..., :-1], together[..., -1]
    full = merge_partials(out, log_sum_exp, jnp.ones(log_sum_exp.shape[:3], bool))
    shape = (rows, 1, heads // shards.size, *queries)
    out = full.out.reshape(*shape, -1).astype(part.out.dtype)
    return PartialAttention(out, full.log_sum_exp.reshape(shape))


def own_heads(layer: Layer, x: jax.Array) -> jax.Array:
    """Selects the query heads of this device from `[rows, 1, heads of the group]`."""
    if layer.page_shards is None:
        return x
    heads = x.shape[2] // layer.page_shards.size
    return jax.lax.dynamic_slice_in_dim(x, layer.page_shards.number * heads, heads, 2)


def over_group(layer: Layer, table: jax.Array, x: jax.Array) -> jax.Array:
    """Gathers results per page from the devices of a group that hold them, `[rows, …, pages of a row]`.

    Args:
        layer: its page shards; what is not divided stays as it is.
        table: int32 `[rows, pages of a row]`, the page table that layers share.
        x: what this device has; of the pages of others it may be anything.
    """
    shards = layer.page_shards
    if shards is None:
        return x
    owned = shards.holds(table).reshape(len(table), *(1,) * (x.ndim - 2), -1)
    return shards.sum(jnp.where(owned, x, jnp.zeros_like(x)))
