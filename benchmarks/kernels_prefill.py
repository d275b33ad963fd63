"""Causal attention of many queries to paged keys: dense, by lists, and beside contiguous attention."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from entropic_jax.pallas import paged_attention

from . import kernels_attention
from .kernels_timing import on_cpu, seconds

FRACTIONS = (1.0, 0.25)  # of the pages before the queries


class Shape(NamedTuple):
    """Of a row; its queries are the last of its positions."""

    queries: int
    kv_heads: int
    group: int
    head_dim: int
    context: int
    page: int
    dtype: str


def shapes(quick: bool) -> list[Shape]:
    """Those of the default device."""
    if on_cpu():
        small, large = (64, 2, 1, 64, 512, 64, "float32"), (512, 4, 2, 64, 8192, 64, "float32")
    else:
        small, large = (512, 2, 4, 128, 1024, 128, "bfloat16"), (2048, 8, 4, 128, 32768, 128, "bfloat16")
    return [Shape(*(small if quick else large))]


def measure(quick: bool, repeat: int) -> Iterator[dict[str, Any]]:
    """One entry for each shape, back end and share of the pages, and for attention to contiguous keys."""
    for shape in shapes(quick):
        batch = kernels_attention.Shape(1, *shape[1:])
        _, keys, values, table = kernels_attention.arrays(batch)
        size = (1, shape.kv_heads, shape.group, shape.queries, shape.head_dim)
        q = jax.random.normal(jax.random.key(3), size, shape.dtype) * shape.head_dim**-0.5
        q, start = q.astype(shape.dtype), shape.context - shape.queries
        first = jnp.zeros((1, shape.queries), jnp.int32)
        where = (first, jnp.full(1, start, jnp.int32), jnp.full(1, shape.context, jnp.int32))
        programs, entries = {}, {}
        verdicts = paged_attention.PREFILL.verdicts(q, keys, values, table, None, None, *where)
        served = [name for name, reason in verdicts.items() if reason is None]
        for back_end in served if on_cpu() else served[:1]:
            prefill = jax.jit(partial(paged_attention.prefill, back_end=back_end))
            for fraction in FRACTIONS:
                lists, kept = listed(batch, start, fraction)
                name = f"{back_end} {fraction:g}"
                programs[name] = partial(prefill, q, keys, values, table, *lists, *where)
                entries[name] = {"engine": back_end, "kept": kept}
        tile = (1, shape.context, shape.kv_heads, shape.head_dim)
        k, v = (jax.random.normal(jax.random.key(i), tile, shape.dtype) for i in range(2))
        flat = q.reshape(1, -1, shape.queries, shape.head_dim).swapaxes(1, 2)
        mask = jnp.arange(shape.context) <= start + jnp.arange(shape.queries)[:, None]
        whole = jax.jit(partial(jax.nn.dot_product_attention, scale=1.0, mask=mask[None, None]))
        programs["contiguous"] = partial(whole, flat, k, v)
        entries["contiguous"] = {"engine": "jax.nn.dot_product_attention, contiguous", "kept": 1.0}
        measured = seconds(programs, repeat)
        for name, entry in entries.items():
            read = {"bytes": batch.bytes * entry["kept"]}
            yield {"shape": shape._asdict(), **read, **entry, "seconds": measured[name]}


def listed(batch: kernels_attention.Shape, start: int, fraction: float) -> tuple[tuple[Any, Any], float]:
    """Lists of every page of the queries and of random ones before; and the share of the pages they have."""
    if fraction == 1:
        return (None, None), 1.0
    index, count = kernels_attention.listed(batch._replace(context=start), fraction)
    here = jnp.arange(start // batch.page, batch.pages, dtype=jnp.int32)
    kept = int(count[0, 0])
    rows = (*index.shape[:2], here.size)
    index = jnp.concatenate([index[..., :kept], jnp.broadcast_to(here, rows)], -1)
    index = jnp.pad(index, ((0, 0), (0, 0), (0, batch.pages - index.shape[-1])))
    return (index, count + here.size), (kept + here.size) / batch.pages
