"""Split-KV: the work lists of the accelerator kernels, and the merge of partial attention results.

As in FlashDecoding, the pages of a row are divided among independent workers, each of which keeps an online
softmax. Their partial results are merged by their log-sum-exps.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .reference import NEGATIVE, PartialAttention


class WorkLists(NamedTuple):
    """The pages to read, one list per row and KV head, or one per row for all of its heads.

    The positions attended to are contiguous within a list, whatever pages it leaves out: every page between
    the first and the last one is attended to from end to end.
    """

    pages: jax.Array  # int32 [rows, lists, max_listed], places in the pool
    begin: jax.Array  # int32 [rows, lists], the first entry to read
    stop: jax.Array  # int32 [rows, lists], one past the last entry; at most `begin` where nothing is read
    low: jax.Array  # int32 [rows, lists], the first slot attended to in the first page
    high: jax.Array  # int32 [rows, lists], one past the last slot attended to in the last page


@dataclass(frozen=True, kw_only=True)
class PrefillShape:
    """The static parameters that the prefill kernels share."""

    kv_heads: int
    listed: bool
    per_row: int  # pages of a row
    max_listed: int  # entries of a list
    group: int
    queries: int  # of a block
    blocks: int  # of queries
    page: int  # positions
    head_dim: int
    soft_cap: float | None


def work_lists(
    page_table: jax.Array,
    page_list: jax.Array | None,
    num_pages: Any,
    window_start: jax.Array,
    context_length: jax.Array,
    size: int,
) -> WorkLists:
    """The work lists of `decode`: the listed pages that overlap the window.

    Args:
        page_table, page_list, num_pages, window_start, context_length: as for `decode`.
        size: positions in a page.
    """
    window_start, context_length = window_start[:, None], context_length[:, None]
    if page_list is None:
        pages, begin, stop = page_table[:, None], window_start // size, -(-context_length // size)
        first_page, last_page = begin, stop - 1
    else:
        listed = jnp.arange(page_list.shape[2]) < num_pages[..., None]
        start = page_list * size  # of each page
        begin = (listed & (start + size <= window_start[..., None])).sum(-1, dtype=jnp.int32)
        stop = (listed & (start < context_length[..., None])).sum(-1, dtype=jnp.int32)
        pages = jnp.take_along_axis(page_table[:, None], page_list, 2, mode="clip")

        def entry(i):
            return jnp.take_along_axis(page_list, i[..., None], 2, mode="clip")[..., 0]

        first_page, last_page = entry(begin), entry(stop - 1)
    low = jnp.maximum(window_start - first_page * size, 0)
    high = jnp.minimum(context_length - last_page * size, size)
    stop = jnp.where(context_length > window_start, stop, 0)
    return WorkLists(pages, begin, stop, low, high)


def entry_ranges(
    shape: PrefillShape,
    page_list: jax.Array | None,
    num_pages: Any,
    window_start: jax.Array,
    query_start: jax.Array,
    context_length: jax.Array,
) -> Any:
    """For each block of queries of a prefill, the first entry of the page list to read and one past the last.

    Args:
        shape: the static parameters of the kernel.
        page_list, num_pages, query_start, context_length: as for `prefill`.
        window_start: int32 `[rows, blocks · queries]`, padded.

    Returns:
        int32 `[rows, kv_heads, blocks]` twice.
    """
    rows = context_length.shape[0]
    block_end = query_start[:, None] + (jnp.arange(shape.blocks) + 1) * shape.queries
    until = jnp.minimum(block_end, context_length[:, None])[:, None]  # [rows, 1, blocks]
    since = window_start.reshape(rows, shape.blocks, shape.queries).min(-1)[:, None]
    if page_list is None:
        begin, stop = since // shape.page, -(-until // shape.page)
        begin, stop = (jnp.broadcast_to(x, (rows, shape.kv_heads, shape.blocks)) for x in (begin, stop))
    else:
        listed = (jnp.arange(shape.max_listed) < num_pages[..., None])[:, :, None]
        start = (page_list * shape.page)[:, :, None]
        begin = (listed & (start + shape.page <= since[..., None])).sum(-1, dtype=jnp.int32)
        stop = (listed & (start < until[..., None])).sum(-1, dtype=jnp.int32)
    return begin, jnp.where(until > since, stop, 0)


def merge_partials(out: Any, log_sum_exp: Any, written: Any) -> PartialAttention:
    """Merge partial attention results by their log-sum-exps.

    Args:
        out: float32 `[..., parts, group, head_dim]`.
        log_sum_exp: float32 `[..., parts, group]`.
        written: bool `[..., parts]`; a part that was not written may hold anything.

    Returns:
        The attention to all positions of the parts, `[..., group, head_dim]` and `[..., group]`.
    """
    log_sum_exp = jnp.where(written[..., None], log_sum_exp, -jnp.inf)
    top = jnp.maximum(log_sum_exp.max(-2, keepdims=True), NEGATIVE)
    weight = jnp.exp(log_sum_exp - top)
    total = weight.sum(-2)
    not_empty = total != 0  # true for NaN, which must reach the result
    out = jnp.where(written[..., None, None], out, 0.0)
    out = (out * (weight / jnp.where(not_empty, total, 1.0)[..., None, :])[..., None]).sum(-3)
    log_total = top[..., 0, :] + jnp.log(jnp.where(not_empty, total, 1.0))
    return PartialAttention(out, jnp.where(not_empty, log_total, -jnp.inf))
