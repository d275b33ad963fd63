"""Prefill attention to paged keys: dense and by page lists, and attention to contiguous keys."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from entropic_jax.pallas import paged_attention

from .attention import Shape, arrays, random_page_lists
from .timing import interleaved_seconds, on_cpu

FRACTIONS = (1.0, 0.25)  # of the pages before the queries


def shapes(quick: bool) -> list[tuple[int, Shape]]:
    """Number of queries (the last positions of the row) and the row's shape, for the default device."""
    if on_cpu():
        small = (64, Shape(1, 2, 1, 64, 512, 64, "float32"))
        large = (512, Shape(1, 4, 2, 64, 8192, 64, "float32"))
    else:
        small = (512, Shape(1, 2, 4, 128, 1024, 128, "bfloat16"))
        large = (2048, Shape(1, 8, 4, 128, 32768, 128, "bfloat16"))
    return [small if quick else large]


def measure(quick: bool, repeat: int) -> Iterator[dict[str, Any]]:
    """One entry for each shape, back end and share of the pages, and for attention to contiguous keys."""
    for queries, shape in shapes(quick):
        _, keys, values, table = arrays(shape)
        size = (1, shape.kv_heads, shape.group, queries, shape.head_dim)
        q = jax.random.normal(jax.random.key(3), size, shape.dtype) * shape.head_dim**-0.5
        q, start = q.astype(shape.dtype), shape.context - queries
        first = jnp.zeros((1, queries), jnp.int32)
        bounds = (first, jnp.full(1, start, jnp.int32), jnp.full(1, shape.context, jnp.int32))
        programs, entries = {}, {}
        reasons = paged_attention.PREFILL.decline_reasons(q, keys, values, table, None, None, *bounds)
        backends = [name for name, reason in reasons.items() if reason is None]
        for backend in backends if on_cpu() else backends[:1]:
            prefill = jax.jit(partial(paged_attention.prefill, backend=backend))
            for fraction in FRACTIONS:
                lists, kept = prefill_page_lists(shape, start, fraction)
                name = f"{backend} {fraction:g}"
                programs[name] = partial(prefill, q, keys, values, table, *lists, *bounds)
                entries[name] = {"engine": backend, "kept": kept}
        tile = (1, shape.context, shape.kv_heads, shape.head_dim)
        k, v = (jax.random.normal(jax.random.key(i), tile, shape.dtype) for i in range(2))
        flat = q.reshape(1, -1, queries, shape.head_dim).swapaxes(1, 2)
        mask = jnp.arange(shape.context) <= start + jnp.arange(queries)[:, None]
        attend = jax.jit(partial(jax.nn.dot_product_attention, scale=1.0, mask=mask[None, None]))
        programs["contiguous"] = partial(attend, flat, k, v)
        entries["contiguous"] = {"engine": "jax.nn.dot_product_attention, contiguous", "kept": 1.0}
        measured = interleaved_seconds(programs, repeat)
        row = {name: x for name, x in shape._asdict().items() if name != "rows"}
        for name, entry in entries.items():
            read = {"bytes": shape.bytes * entry["kept"]}
            yield {"shape": {"queries": queries, **row}, **read, **entry, "seconds": measured[name]}


def prefill_page_lists(shape: Shape, start: int, fraction: float) -> tuple[tuple[Any, Any], float]:
    """Page lists with all pages of the queries and random earlier ones; and their share of all pages."""
    if fraction == 1:
        return (None, None), 1.0
    index, count = random_page_lists(shape._replace(context=start), fraction)
    query_pages = jnp.arange(start // shape.page, shape.pages, dtype=jnp.int32)
    kept = int(count[0, 0])
    rows = (*index.shape[:2], query_pages.size)
    index = jnp.concatenate([index[..., :kept], jnp.broadcast_to(query_pages, rows)], -1)
    index = jnp.pad(index, ((0, 0), (0, 0), (0, shape.pages - index.shape[-1])))
    return (index, count + query_pages.size), (kept + query_pages.size) / shape.pages
