"""Paged attention of one query per row: what it costs, dense and by lists, beside what others take."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax.pallas import paged_attention
from entropic_jax.pallas.paged_attention.quantised import Pool, Quantised, bytes_per_number, quantise

from .kernels_timing import on_cpu, seconds

FRACTIONS = (1.0, 0.5, 0.25, 0.0625)  # of the pages of a row


class Shape(NamedTuple):
    """Of a batch; every row has `context` positions."""

    rows: int
    kv_heads: int
    group: int
    head_dim: int
    context: int
    page: int
    dtype: str

    @property
    def pages(self) -> int:
        """Of a row."""
        return -(-self.context // self.page)

    @property
    def bytes(self) -> int:
        """Of keys and values, of all rows."""
        size = jnp.dtype(self.dtype).itemsize
        return 2 * self.rows * self.kv_heads * self.context * self.head_dim * size


def shapes(quick: bool) -> list[Shape]:
    """Those of the default device."""
    if on_cpu():
        return [Shape(2, 2, 1, 64, 512, 64, "float32") if quick else Shape(8, 8, 1, 64, 16384, 64, "float32")]
    if quick:
        return [Shape(2, 2, 4, 128, 1024, 128, "bfloat16")]
    return [
        Shape(64, 8, 4, 128, 8192, 128, "bfloat16"),
        Shape(4, 8, 4, 128, 131072, 128, "bfloat16"),
    ]


def measure(quick: bool, repeat: int) -> Iterator[dict[str, Any]]:
    """One entry for each shape, back end and share of the pages, and for each of the others."""
    for shape in shapes(quick):
        yield from of_shape(shape, repeat)


def of_shape(shape: Shape, repeat: int) -> Iterator[dict[str, Any]]:
    """The same of one shape; all take turns."""
    q, keys, values, table = arrays(shape)
    last = jnp.full(shape.rows, shape.context, jnp.int32)
    first = jnp.zeros_like(last)
    programs: dict[str, Callable[[], Any]] = {}
    entries: dict[str, dict[str, Any]] = {}
    for backend in accepted(q, keys, values, table, first, last):
        decode = jax.jit(partial(paged_attention.decode, backend=backend))
        for fraction in FRACTIONS:
            lists = listed(shape, fraction)
            kept = shape.pages if fraction == 1 else int(lists[1][0, 0])
            name = f"{backend} {fraction:g}"
            programs[name] = partial(decode, q, keys, values, table, *lists, first, last)
            entries[name] = {"engine": backend, "kept": kept / shape.pages}
        name = f"{backend} ragged"
        lengths = ragged(shape)
        programs[name] = partial(decode, q, keys, values, table, None, None, first, lengths)
        share = float(lengths.sum()) / (shape.rows * shape.context)
        entries[name] = {"engine": f"{backend}, ragged", "kept": share}
    for dtype in ("bfloat16", "int8") if on_cpu() else ("int8", "float8_e4m3fn"):
        pools = [narrowed(pool, dtype) for pool in (keys, values)]
        backend = accepted(q, *pools, table, first, last)[0]
        decode = jax.jit(partial(paged_attention.decode, backend=backend))
        name = f"{backend}, {dtype}"
        programs[name] = partial(decode, q, *pools, table, None, None, first, last)
        smaller = bytes_per_number(dtype, shape.head_dim) / jnp.dtype(shape.dtype).itemsize
        entries[name] = {"engine": name, "kept": 1.0, "bytes": shape.bytes * smaller}
    for name, other in others(shape, q, keys, values, table, last).items():
        entries[name] = {"engine": name, "kept": 1.0}
        try:
            jax.block_until_ready(other())
            programs[name] = other
        except Exception as error:  # an entry of the table: what others cannot do is no failure of ours
            entries[name]["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
    measured = seconds(programs, repeat)
    for name, entry in entries.items():
        read = {"bytes": shape.bytes * entry["kept"]}
        yield {"shape": shape._asdict(), **read, **entry, "seconds": measured.get(name, [])}


def accepted(q, keys, values, table, first, last) -> list[str]:
    """The back ends that serve these arguments; of a GPU or TPU, the reference is not of interest."""
    reasons = paged_attention.DECODE.decline_reasons(q, keys, values, table, None, None, first, last)
    found = [name for name, reason in reasons.items() if reason is None]
    return found if on_cpu() else found[:1]


def arrays(shape: Shape) -> tuple[jax.Array, ...]:
    """Queries, the pools of a full batch, and a page table in no order."""
    keys = jax.random.split(jax.random.key(0), 3)
    pool = (shape.rows * shape.pages + 1, shape.kv_heads, shape.page, shape.head_dim)
    normal = lambda key, sizes: jax.random.normal(key, sizes, shape.dtype)
    q = normal(keys[0], (shape.rows, shape.kv_heads, shape.group, shape.head_dim)) * shape.head_dim**-0.5
    order = np.random.default_rng(0).permutation(shape.rows * shape.pages).astype(np.int32)
    table = jnp.asarray(order.reshape(shape.rows, shape.pages))
    return q.astype(shape.dtype), normal(keys[1], pool), normal(keys[2], pool), table


@partial(jax.jit, static_argnames="dtype")
def narrowed(pool: jax.Array, dtype: str) -> Pool:
    """The same pool in fewer bits."""
    if dtype == "bfloat16":
        return pool.astype(dtype)
    tiles, scale = quantise(pool, dtype)
    return Quantised(tiles, scale[:, :, None])


def listed(shape: Shape, fraction: float) -> tuple[Any, Any]:
    """Lists of random pages of every row and head; none where every page is read."""
    if fraction == 1:
        return None, None
    rng = np.random.default_rng(1)
    kept = max(1, round(shape.pages * fraction))
    index = np.zeros((shape.rows, shape.kv_heads, shape.pages), np.int32)
    for row, head in np.ndindex(shape.rows, shape.kv_heads):
        index[row, head, :kept] = np.sort(rng.permutation(shape.pages)[:kept])
    return jnp.asarray(index), jnp.full(index.shape[:2], kept, jnp.int32)


def ragged(shape: Shape) -> jax.Array:
    """Lengths from an eighth of the context to all of it."""
    return jnp.asarray(np.linspace(shape.context / 8, shape.context, shape.rows), jnp.int32)


def others(shape: Shape, q, keys, values, table, last) -> dict[str, Callable[[], Any]]:
    """Attention to contiguous keys and values, and the paged attention that JAX brings along."""
    tile = (shape.rows, shape.kv_heads, shape.context, shape.head_dim)
    k, v = (jax.random.normal(jax.random.key(i), tile, shape.dtype) for i in range(2))
    found: dict[str, Callable[[], Any]] = {"contiguous einsum": partial(jax.jit(einsum), q, k, v)}
    if jax.default_backend() == "gpu":
        flat = q.reshape(shape.rows, 1, -1, shape.head_dim)
        cudnn = jax.jit(partial(jax.nn.dot_product_attention, implementation="cudnn"))
        found["cuDNN, contiguous"] = partial(cudnn, flat, k.swapaxes(1, 2), v.swapaxes(1, 2))
        pools = (keys.swapaxes(0, 1), values.swapaxes(0, 1))
        found["bundled Triton"] = partial(bundled, flat[:, 0], *pools, table, last)
    return found


def einsum(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Dense attention of one query, as one writes it down."""
    score = jnp.einsum("rkgd,rksd->rkgs", q, k, preferred_element_type=jnp.float32)
    weight = jax.nn.softmax(score, -1).astype(v.dtype)
    return jnp.einsum("rkgs,rksd->rkgd", weight, v, preferred_element_type=jnp.float32)


def bundled(*arguments: jax.Array) -> jax.Array:
    """The Triton kernel that JAX brings along, as long as it does."""
    from jax.experimental.pallas.ops.gpu import paged_attention as module

    return jax.jit(module.paged_attention)(*arguments)
