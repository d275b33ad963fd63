"""What the kernels of both accelerators share: lists of pages as they read them, and the merge of parts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .reference import NEGATIVE, Partial


class Lists(NamedTuple):
    """The pages to read, one list per row and KV head, or one per row for all of its heads.

    The positions attended to are contiguous within a list, whatever it leaves out: all of its pages but the
    first and the last are attended to from end to end.
    """

    pages: jax.Array  # int32 [rows, lists, most listed], places in the pool
    begin: jax.Array  # int32 [rows, lists], the first entry to read
    stop: jax.Array  # int32 [rows, lists], one past the last; not above `begin` where nothing is read
    low: jax.Array  # int32 [rows, lists], the first slot attended to in the first page
    high: jax.Array  # int32 [rows, lists], one past the last slot attended to in the last page


def lists_of(table, index, count, first, last, size: int) -> Lists:
    """The lists of the arguments of `decode`, without what lies outside of `first` and `last`."""
    first, last = first[:, None], last[:, None]
    if index is None:
        pages, begin, stop = table[:, None], first // size, -(-last // size)
        first_page, last_page = begin, stop - 1
    else:
        listed = jnp.arange(index.shape[2]) < count[..., None]
        start = index * size  # of each page
        begin = (listed & (start + size <= first[..., None])).sum(-1, dtype=jnp.int32)
        stop = (listed & (start < last[..., None])).sum(-1, dtype=jnp.int32)
        pages = jnp.take_along_axis(table[:, None], index, 2, mode="clip")
        entry = lambda i: jnp.take_along_axis(index, i[..., None], 2, mode="clip")[..., 0]
        first_page, last_page = entry(begin), entry(stop - 1)
    low = jnp.maximum(first - first_page * size, 0)
    high = jnp.minimum(last - last_page * size, size)
    stop = jnp.where(last > first, stop, 0)
    return Lists(pages, begin, stop, low, high)


def ends_of(shape: Any, index, count, first, query, last):
    """For each block of queries, the first entry of its list to read and one past the last.

    The shape says how many `queries` a block has and how many `blocks` there are, to which first
    `[rows, blocks · queries]` is padded. Returns int32 `[rows, kv_heads, blocks]` twice.
    """
    rows = last.shape[0]
    own = query[:, None] + (jnp.arange(shape.blocks) + 1) * shape.queries  # one past the last of a block
    until = jnp.minimum(own, last[:, None])[:, None]  # [rows, 1, blocks]
    since = first.reshape(rows, shape.blocks, shape.queries).min(-1)[:, None]
    if index is None:
        begin, stop = since // shape.page, -(-until // shape.page)
        begin, stop = (jnp.broadcast_to(x, (rows, shape.kv_heads, shape.blocks)) for x in (begin, stop))
    else:
        listed = (jnp.arange(shape.most) < count[..., None])[:, :, None]
        start = (index * shape.page)[:, :, None]
        begin = (listed & (start + shape.page <= since[..., None])).sum(-1, dtype=jnp.int32)
        stop = (listed & (start < until[..., None])).sum(-1, dtype=jnp.int32)
    return begin, jnp.where(until > since, stop, 0)


def merge(out, log_sum, held) -> Partial:
    """One result of parts: out `[..., parts, group, head_dim]`, log_sum `[..., parts, group]`, both float32.

    A part that is not held (bool `[..., parts]`) was not written: it may be anything.
    """
    log_sum = jnp.where(held[..., None], log_sum, -jnp.inf)
    top = jnp.maximum(log_sum.max(-2, keepdims=True), NEGATIVE)
    weight = jnp.exp(log_sum - top)
    total = weight.sum(-2)
    some = total != 0  # true for NaN: it must reach the result
    out = jnp.where(held[..., None, None], out, 0.0)
    out = (out * (weight / jnp.where(some, total, 1.0)[..., None, :])[..., None]).sum(-3)
    return Partial(out, jnp.where(some, top[..., 0, :] + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf))
