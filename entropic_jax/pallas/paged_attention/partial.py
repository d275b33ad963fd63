"""Attention of several queries per row with its log-sum-exp, by which it is merged with other parts of it."""

from typing import Any

import jax
import jax.numpy as jnp

from ..derivatives import with_derivatives_of
from ..dispatch import REFERENCE, Operation, for_platform, interpreted
from . import page_lists, prefill_reference, reference
from .reference import PartialAttention

PREFILL_PARTIAL = Operation(
    "paged_attention.prefill_partial",
    {
        "tpu": for_platform("tpu", f"{__package__}.prefill_tpu", "prefill_partial"),
        "gpu": for_platform("gpu", f"{__package__}.prefill_gpu", "prefill_partial"),
        "xla": prefill_reference.prefill_partial,
        "interpret": interpreted(f"{__package__}.prefill_tpu", "prefill_partial"),
    },
)


def _call(settings, *operands):
    backend, soft_cap = settings
    return PREFILL_PARTIAL(*operands, backend=backend, soft_cap=soft_cap)


_prefill_partial = with_derivatives_of(
    lambda settings, *operands: reference.prefill_gathered(*operands, soft_cap=settings[1]), _call
)


def prefill_partial(
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
) -> PartialAttention:
    """`prefill` with its log-sum-exp.

    Args:
        q, keys, values, page_table, page_list, num_pages: as for `prefill`.
        window_start, query_start, context_length: as for `prefill`.
        soft_cap: as for `decode`.
        backend: the name of the back end to use; None takes the first that supports the case.

    Returns:
        The output of `prefill`, and ln Σ exp(q · k) over what each query sees, float32 `[rows, kv_heads,
        group, n]`; −inf for a query that sees nothing.
    """
    page_lists.check(page_table, page_list, num_pages)
    positions = (page_table, page_list, num_pages, window_start, query_start, context_length)
    return _prefill_partial((backend, soft_cap), q, keys, values, *positions)


def has_kernel(*operands: Any) -> bool:
    """Whether a kernel computes `prefill_partial` of these operands on the default device."""
    return PREFILL_PARTIAL.kernel_name(*operands) not in (None, REFERENCE)


def as_rows(
    q: jax.Array,
    page_table: jax.Array,
    page_list: jax.Array | None,
    num_pages: jax.Array | None,
    window_start: jax.Array,
    query_start: jax.Array,
    context_length: jax.Array,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Each query as a row of its own, with the bits that `decode` gives a single one.

    Args:
        q: scaled queries `[rows, kv_heads, group, n, head_dim]`.
        page_table, page_list, num_pages: as for `prefill`.
        window_start, query_start, context_length: as for `prefill`.

    Returns:
        The queries and the positions that `decode` takes, of rows · n rows.
    """
    rows, _, _, n, _ = q.shape
    end = query_start[:, None] + jnp.arange(1, n + 1, dtype=jnp.int32)
    end = jnp.where(end <= context_length[:, None], end, 0).reshape(-1)
    queries = jnp.moveaxis(q, 3, 1).reshape(rows * n, *q.shape[1:3], q.shape[4])
    pages = jax.tree.map(lambda x: jnp.repeat(x, n, 0), (page_table, page_list, num_pages))
    return queries, (*pages, window_start.reshape(-1), end)
