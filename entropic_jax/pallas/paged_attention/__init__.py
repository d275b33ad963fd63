"""Paged attention: attention of queries to the KV cache through a page table, and page selection.

The package has six operations, each with several back ends (see `dispatch`):

| operation | purpose |
|---|---|
| `decode` | attention of one query per row to all or to listed pages, with its log-sum-exp |
| `prefill` | causal attention of several queries per row (`prefill_partial`: with its log-sum-exp) |
| `verify` | the same for a few queries per row, each with the bits that `decode` gives |
| `select_pages` | the page lists to read: the fewest pages whose mass reaches 1 − ε |
| `write` | stores one key and value per row, and updates the page summaries |
| `uninitialised` | memory for pages and summaries, which may hold anything |

All back ends of an operation have the same contract. One that does not support a case raises
NotImplementedError with the reason. Gradients are those of the reference in plain JAX; page selection is a
step function and has none.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...mesh.devices import default_device
from ..derivatives import with_derivatives_of
from ..dispatch import Operation, for_platform, interpreted
from . import (
    cpu,
    cpu_select_pages,
    cpu_uninitialised,
    cpu_write,
    page_lists,
    prefill_cpu,
    prefill_reference,
    reference,
    write_reference,
)
from .partial import PREFILL_PARTIAL, prefill_partial
from .reference import PageChoice, PageSummary, PartialAttention, SelectionRules
from .split_kv import merge_partials

__all__ = [
    "ACCELERATOR_PAGE",
    "MAX_VERIFIED",
    "PREFILL_PARTIAL",
    "PageChoice",
    "PageSummary",
    "PartialAttention",
    "SelectionRules",
    "decode",
    "decode_by_page",
    "default_page_size",
    "prefill",
    "prefill_partial",
    "select_pages",
    "uninitialised",
    "verify",
    "write",
    "writes_in_order",
]

ACCELERATOR_PAGE = 128  # positions; kernels for TPUs and GPUs take such pages of every dtype and head_dim
MAX_VERIFIED = cpu.MAX_QUERIES  # queries of a row that `verify` is made for; `prefill` serves more

DECODE = Operation(
    "paged_attention.decode",
    {
        "tpu": for_platform("tpu", f"{__name__}.tpu", "decode"),
        "gpu": for_platform("gpu", f"{__name__}.gpu", "decode"),
        "cpu": cpu.decode,
        "xla": reference.decode,
        "interpret": interpreted(f"{__name__}.tpu", "decode"),
    },
)
PREFILL = Operation(
    "paged_attention.prefill",
    {
        "tpu": for_platform("tpu", f"{__name__}.prefill_tpu", "prefill"),
        "gpu": for_platform("gpu", f"{__name__}.prefill_gpu", "prefill"),
        "cpu": prefill_cpu.prefill,
        "xla": prefill_reference.prefill,
        "interpret": interpreted(f"{__name__}.prefill_tpu", "prefill"),
    },
)
VERIFY = Operation(
    "paged_attention.verify",
    {
        "tpu": for_platform("tpu", f"{__name__}.prefill_tpu", "prefill"),
        "gpu": for_platform("gpu", f"{__name__}.prefill_gpu", "prefill"),
        "cpu": cpu.verify,
        "xla": prefill_reference.verify,
        "interpret": interpreted(f"{__name__}.prefill_tpu", "prefill"),
    },
)
WRITE = Operation(
    "paged_attention.write",
    {
        "tpu": for_platform("tpu", f"{__name__}.write_tpu", "write"),
        "cpu": cpu_write.write,
        "xla": write_reference.write,
        "interpret": interpreted(f"{__name__}.write_tpu", "write"),
    },
)
SELECT_PAGES = Operation(
    "paged_attention.select_pages",
    {"cpu": cpu_select_pages.select_pages, "xla": reference.select_pages},
)
UNINITIALISED = Operation(
    "paged_attention.uninitialised", {"cpu": cpu_uninitialised.uninitialised, "xla": jnp.zeros}
)


def _differentiable(operation: Operation, gathered: Callable) -> Any:
    """The operation with the derivatives of its reference, in q, keys and values."""

    def call(settings, q, keys, values, *positions):
        backend, soft_cap = settings
        return operation(q, keys, values, *positions, backend=backend, soft_cap=soft_cap)

    return with_derivatives_of(lambda settings, *x: gathered(*x, soft_cap=settings[1]), call)


def _prefill_gathered(*operands: Any, soft_cap: float | None) -> jax.Array:
    return reference.prefill_gathered(*operands, soft_cap=soft_cap).out


_decode = _differentiable(DECODE, reference.decode_gathered)
_prefill = _differentiable(PREFILL, _prefill_gathered)
_verify = _differentiable(VERIFY, _prefill_gathered)


def default_page_size(platform: str | None = None) -> int:
    """64 positions on a CPU, 128 on an accelerator; None is the platform of the default device."""
    return 64 if (platform or default_device().platform) == "cpu" else ACCELERATOR_PAGE


def uninitialised(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array that may hold anything.

    Args:
        shape: the shape of the array.
        dtype: the dtype of its numbers.
    """
    return UNINITIALISED(shape, jnp.dtype(dtype))


def decode(
    q: jax.Array,
    keys: Any,
    values: Any,
    page_table: jax.Array,
    page_list: jax.Array | None,
    num_pages: jax.Array | None,
    window_start: jax.Array,
    context_length: jax.Array,
    *,
    soft_cap: float | None = None,
    backend: str | None = None,
) -> PartialAttention:
    """Attention of one query per row.

    Args:
        q: queries `[rows, kv_heads, group, head_dim]`, already scaled by 1/√head_dim. `group` is the number
            of query heads that share a KV head.
        keys: page pool `[pool, kv_heads, page_size, head_dim]`, or a `Quantised` pool of that shape.
        values: page pool of the same shape and dtype.
        page_table: int32 `[rows, max_pages]`, the pages of a row in the pool, in order of position.
        page_list: int32 `[rows, kv_heads, max_listed]`, the pages to read as entries of the row's page table,
            ascending and distinct. None reads every page.
        num_pages: int32 `[rows, kv_heads]`, how many entries of the page list are valid. None with
            `page_list`.
        window_start: int32 `[rows]`, first position that is attended to, as far as its page is listed.
        context_length: int32 `[rows]`, end of the positions attended to; none where it is not above
            `window_start`.
        soft_cap: c: scores are c · tanh(score / c); None for the scores themselves. Static.
        backend: the name of the back end to use; None takes the first that supports the case.

    Returns:
        The output in the shape of q, and ln Σ exp(q · k) over the positions attended to, float32 `[rows,
        kv_heads, group]`; zeros and −inf where there are none. Pages that are not listed, or lie outside the
        window, are not read; what a page holds past the context length never reaches the result.

    Raises:
        ValueError: a page list is not ascending and distinct. It is checked only where its values are known:
            not under `jit`, where the result of such a list is undefined.
    """
    page_lists.check(page_table, page_list, num_pages)
    positions = (page_table, page_list, num_pages, window_start, context_length)
    return _decode((backend, soft_cap), q, keys, values, *positions)


def decode_by_page(
    q: jax.Array,
    keys: Any,
    values: Any,
    page_table: jax.Array,
    page_list: Any,
    num_pages: Any,
    window_start: jax.Array,
    context_length: jax.Array,
    *,
    backend: str | None = None,
) -> tuple[PartialAttention, jax.Array]:
    """Attention of one query per row, and the attention mass of each page.

    `decode` treats every page as a row of its own, whatever back end computes it, so that each listed page is
    read once; the partial results are merged (split-KV).

    Args:
        q, keys, values, page_table, page_list, num_pages, window_start, context_length: as for `decode`.
        backend: the name of the back end to use; None takes the first that supports the case.

    Returns:
        The result of `decode`, and the masses, float32 `[rows, kv_heads, group, max_pages]`. They sum to 1
        where any position is attended to, and are 0 for a page that is not listed.
    """
    page_lists.check(page_table, page_list, num_pages)
    rows, kv_heads, _, _ = q.shape
    size, max_pages = keys.shape[2], page_table.shape[1]
    start = jnp.arange(max_pages, dtype=jnp.int32) * size

    def within_pages(position):
        return jnp.clip(position[:, None] - start, 0, size).reshape(-1)

    single_page: tuple[Any, Any] = (None, None)
    if page_list is not None:
        listed = jnp.arange(page_list.shape[2]) < num_pages[..., None]
        row, head = jnp.arange(rows)[:, None, None], jnp.arange(kv_heads)[:, None]
        entry = jnp.where(listed, page_list, max_pages)
        kept = jnp.zeros((rows, kv_heads, max_pages), jnp.int32).at[row, head, entry].set(1, mode="drop")
        kept = kept.swapaxes(1, 2).reshape(rows * max_pages, kv_heads)
        single_page = (jnp.zeros((*kept.shape, 1), jnp.int32), kept)
    bounds = (within_pages(window_start), within_pages(context_length))
    pages_as_rows = (jnp.repeat(q, max_pages, 0), keys, values, page_table.reshape(-1, 1))
    partials = decode(*pages_as_rows, *single_page, *bounds, backend=backend)

    def split_pages(x):  # [rows, kv_heads, pages, …]
        return jnp.moveaxis(x.reshape(rows, max_pages, *x.shape[1:]), 1, 2)

    log_sum_exp = split_pages(partials.log_sum_exp)
    written = jnp.ones(log_sum_exp.shape[:3], bool)
    merged = merge_partials(split_pages(partials.out).astype(jnp.float32), log_sum_exp, written)
    total = jnp.where(merged.log_sum_exp > -jnp.inf, merged.log_sum_exp, 0.0)
    mass = jnp.exp(log_sum_exp - total[:, :, None])
    return PartialAttention(merged.out.astype(q.dtype), merged.log_sum_exp), mass.swapaxes(2, 3)


def prefill(
    q: jax.Array,
    keys: Any,
    values: Any,
    page_table: jax.Array,
    page_list: jax.Array | None,
    num_pages: jax.Array | None,
    window_start: jax.Array,
    query_start: jax.Array,
    context_length: jax.Array,
    *,
    soft_cap: float | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Causal attention of several queries per row.

    Query i of a row is at position query_start[row] + i. It sees the positions from window_start[row, i] to
    its own, as far as their page is listed and they are below the context length.

    Args:
        q: scaled queries `[rows, kv_heads, group, n, head_dim]`.
        keys, values, page_table, page_list, num_pages, context_length, soft_cap: as for `decode`.
        window_start: int32 `[rows, n]`.
        query_start: int32 `[rows]`.
        backend: the name of the back end to use; None takes the first that supports the case.

    Returns:
        The output in the shape of q; zeros for a query that sees nothing.
    """
    page_lists.check(page_table, page_list, num_pages)
    positions = (page_table, page_list, num_pages, window_start, query_start, context_length)
    return _prefill((backend, soft_cap), q, keys, values, *positions)


def verify(
    q: jax.Array,
    keys: Any,
    values: Any,
    page_table: jax.Array,
    page_list: jax.Array | None,
    num_pages: jax.Array | None,
    window_start: jax.Array,
    query_start: jax.Array,
    context_length: jax.Array,
    *,
    soft_cap: float | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Causal attention of at most `MAX_VERIFIED` queries per row, as in the verification of drafted tokens.

    On a CPU, query i of a row has the bits that `decode` gives at its position, whatever n is; TPUs and GPUs
    use the kernels of `prefill`.

    Args:
        q, keys, values: as for `prefill`, like the others.
        page_table, page_list, num_pages: the pages that hold the text, and those that are read.
        window_start, query_start, context_length: positions.
        soft_cap: the soft cap of the scores.
        backend: the name of the back end to use; None takes the first that supports the case.

    Returns:
        The output in the shape of q. That of a query at or past the context length is not defined.
    """
    page_lists.check(page_table, page_list, num_pages)
    positions = (page_table, page_list, num_pages, window_start, query_start, context_length)
    return _verify((backend, soft_cap), q, keys, values, *positions)


def select_pages(
    q: jax.Array,
    summary: PageSummary,
    information: jax.Array,
    page_table: jax.Array,
    context_length: jax.Array,
    dropped_mass_limit: jax.Array,
    page_size: int,
    rules: SelectionRules,
    *,
    backend: str | None = None,
) -> PageChoice:
    """The pages to read for each row and KV head.

    Args:
        q: queries `[rows, kv_heads, group, head_dim]`, already scaled by 1/√head_dim.
        summary: the element-wise bounds and the sum of the keys of every page of the pool.
        information: float32 `[pool, kv_heads]`, ≥ 0: the weight by which a page's mass is multiplied.
        page_table: int32 `[rows, max_pages]`, the pages of a row in the pool, in order of position.
        context_length: int32 `[rows]`, positions that each row holds.
        dropped_mass_limit: ε, float32 `[rows]`: the share of the weighted attention mass that may stay
            unread. 0 keeps every page.
        page_size: positions in a page; static.
        rules: the pages that are always kept, and the rule that estimates mass; static.
        backend: the name of the back end to use; None takes the first that supports the case.
    """
    operands = (q, summary, information, page_table, context_length, dropped_mass_limit)
    return SELECT_PAGES(*operands, page_size, rules, backend=backend)


def writes_in_order(tiles: Any, summaries: Any, k: jax.Array, v: jax.Array) -> bool:
    """Whether `write` takes its rows one after the other, so that several may write to one page.

    Then a row's tokens can be written as rows, and pages and summaries get the bits of one write per token.
    It is so on CPUs. With many tokens only the kernel is fast; the reference is asked for up to
    `MAX_VERIFIED` tokens per row.

    Args:
        tiles, summaries: as for `write`.
        k, v: `[rows, n, kv_heads, head_dim]`.
    """
    if default_device().platform != "cpu":
        return False
    place = jnp.zeros(k.shape[0], jnp.int32)
    operands = (tuple(tiles), tuple(summaries), k[:, 0], v[:, 0], place, place)
    return k.shape[1] <= MAX_VERIFIED or WRITE.kernel_name(*operands) == "cpu"


def write(
    tiles: Any,
    summaries: Any,
    k: jax.Array,
    v: jax.Array,
    page: jax.Array,
    slot: jax.Array,
    *,
    backend: str | None = None,
) -> tuple[Any, Any]:
    """Store one key and one value per row in place, and update the summaries of their pages.

    Args:
        tiles: the page pools of keys and values.
        summaries: key_min, key_max, key_sum and value_norm of the layer, see `cache.Layer`.
        k: keys `[rows, kv_heads, head_dim]`.
        v: values of the same shape.
        page: int32 `[rows]`, the page in the pool. The last page of the pool is scratch space: what it holds
            afterwards is undefined.
        slot: int32 `[rows]`, the slot in the page; 0 begins a page and resets its summaries.
        backend: the name of the back end to use; None takes the first that supports the case.

    Returns:
        The new tiles and the new summaries.
    """
    return _write(backend, tuple(tiles), tuple(summaries), k, v, page, slot)


_write = with_derivatives_of(
    lambda _, *operands: write_reference.write(*operands),
    lambda backend, *operands: WRITE(*operands, backend=backend),
)
