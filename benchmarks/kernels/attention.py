"""Decode attention to paged keys: dense and by page lists, and other implementations."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax.pallas import paged_attention
from entropic_jax.pallas.paged_attention.quantised import Pool, Quantised, bytes_per_number, quantise

from .timing import interleaved_seconds, on_cpu

FRACTIONS = (1.0, 0.5, 0.25, 0.0625)  # of the pages of a row


class Shape(NamedTuple):
    """Sizes of a batch; every row has `context` positions."""

    rows: int
    kv_heads: int
    group: int
    head_dim: int
    context: int
    page: int
    dtype: str

    @property
    def pages(self) -> int:
        """Pages of a row."""
        return -(-self.context // self.page)

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values of all rows."""
        size = jnp.dtype(self.dtype).itemsize
        return 2 * self.rows * self.kv_heads * self.context * self.head_dim * size


def shapes(quick: bool) -> list[Shape]:
    """The shapes that the default device is measured at."""
    if on_cpu():
        return [Shape(2, 2, 1, 64, 512, 64, "float32") if quick else Shape(8, 8, 1, 64, 16384, 64, "float32")]
    if quick:
        return [Shape(2, 2, 4, 128, 1024, 128, "bfloat16")]
    return [
        Shape(64, 8, 4, 128, 8192, 128, "bfloat16"),
        Shape(4, 8, 4, 128, 131072, 128, "bfloat16"),
    ]


def measure(quick: bool, repeat: int) -> Iterator[dict[str, Any]]:
    """One entry for each shape, back end and share of the pages, and for each alternative."""
    for shape in shapes(quick):
        yield from measure_shape(shape, repeat)


def measure_shape(shape: Shape, repeat: int) -> Iterator[dict[str, Any]]:
    """The entries of one shape; all programs take turns."""
    q, keys, values, table = arrays(shape)
    last = jnp.full(shape.rows, shape.context, jnp.int32)
    first = jnp.zeros_like(last)
    programs: dict[str, Callable[[], Any]] = {}
    entries: dict[str, dict[str, Any]] = {}
    for backend in accepting_backends(q, keys, values, table, first, last):
        decode = jax.jit(partial(paged_attention.decode, backend=backend))
        for fraction in FRACTIONS:
            lists = random_page_lists(shape, fraction)
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
        pools = (cast_pool(keys, dtype), cast_pool(values, dtype))
        backend = accepting_backends(q, *pools, table, first, last)[0]
        decode = jax.jit(partial(paged_attention.decode, backend=backend))
        name = f"{backend}, {dtype}"
        programs[name] = partial(decode, q, *pools, table, None, None, first, last)
        smaller = bytes_per_number(dtype, shape.head_dim) / jnp.dtype(shape.dtype).itemsize
        entries[name] = {"engine": name, "kept": 1.0, "bytes": shape.bytes * smaller}
    for name, other in alternatives(shape, q, keys, values, table, last).items():
        entries[name] = {"engine": name, "kept": 1.0}
        try:
            jax.block_until_ready(other())
            programs[name] = other
        except Exception as error:  # becomes an entry of the table: an alternative may not support the shape
            entries[name]["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
    measured = interleaved_seconds(programs, repeat)
    for name, entry in entries.items():
        read = {"bytes": shape.bytes * entry["kept"]}
        yield {"shape": shape._asdict(), **read, **entry, "seconds": measured.get(name, [])}


def accepting_backends(q, keys, values, table, first, last) -> list[str]:
    """The back ends that accept these arguments; on an accelerator only the first, not the reference."""
    reasons = paged_attention.DECODE.decline_reasons(q, keys, values, table, None, None, first, last)
    backends = [name for name, reason in reasons.items() if reason is None]
    return backends if on_cpu() else backends[:1]


def arrays(shape: Shape) -> tuple[jax.Array, ...]:
    """Queries, page pools of a full batch, and a page table in random order."""
    keys = jax.random.split(jax.random.key(0), 3)
    pool = (shape.rows * shape.pages + 1, shape.kv_heads, shape.page, shape.head_dim)

    def normal(key, sizes):
        return jax.random.normal(key, sizes, shape.dtype)

    q = normal(keys[0], (shape.rows, shape.kv_heads, shape.group, shape.head_dim)) * shape.head_dim**-0.5
    order = np.random.default_rng(0).permutation(shape.rows * shape.pages).astype(np.int32)
    table = jnp.asarray(order.reshape(shape.rows, shape.pages))
    return q.astype(shape.dtype), normal(keys[1], pool), normal(keys[2], pool), table


@partial(jax.jit, static_argnames="dtype")
def cast_pool(pool: jax.Array, dtype: str) -> Pool:
    """A page pool in a narrower dtype."""
    if dtype == "bfloat16":
        return pool.astype(dtype)
    tiles, scale = quantise(pool, dtype)
    return Quantised(tiles, scale[:, :, None])


def random_page_lists(shape: Shape, fraction: float) -> tuple[Any, Any]:
    """Lists of random pages for every row and KV head; None if every page is read."""
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


def alternatives(shape: Shape, q, keys, values, table, last) -> dict[str, Callable[[], Any]]:
    """Attention to contiguous keys and values, and the paged attention that comes with JAX."""
    tile = (shape.rows, shape.kv_heads, shape.context, shape.head_dim)
    k, v = (jax.random.normal(jax.random.key(i), tile, shape.dtype) for i in range(2))
    programs: dict[str, Callable[[], Any]] = {
        "contiguous einsum": partial(jax.jit(einsum_attention), q, k, v)
    }
    if jax.default_backend() == "gpu":
        flat = q.reshape(shape.rows, 1, -1, shape.head_dim)
        cudnn = jax.jit(partial(jax.nn.dot_product_attention, implementation="cudnn"))
        programs["cuDNN, contiguous"] = partial(cudnn, flat, k.swapaxes(1, 2), v.swapaxes(1, 2))
        pools = (keys.swapaxes(0, 1), values.swapaxes(0, 1))
        programs["bundled Triton"] = partial(bundled_triton, flat[:, 0], *pools, table, last)
    return programs


def einsum_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Dense attention of one query as two einsums."""
    score = jnp.einsum("rkgd,rksd->rkgs", q, k, preferred_element_type=jnp.float32)
    weight = jax.nn.softmax(score, -1).astype(v.dtype)
    return jnp.einsum("rkgs,rksd->rkgd", weight, v, preferred_element_type=jnp.float32)


def bundled_triton(*arguments: jax.Array) -> jax.Array:
    """The paged-attention kernel in Triton that comes with JAX."""
    from jax.experimental.pallas.ops.gpu import paged_attention as module

    return jax.jit(module.paged_attention)(*arguments)
