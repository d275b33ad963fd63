"""The kernels at the shapes of real models, as programs to compile, with limits on their memory.

for program in programs("tpu"):
    compiled = compile_for_tpu(program.function, *program.arguments, generation="v5e", **program.options)
    assert compiled.memory_analysis().temp_size_in_bytes <= program.limit
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from entropic_jax.pallas.paged_attention import (
    PageSummary,
    SelectionRules,
    prefill_gpu,
    prefill_tpu,
    reference,
    write_reference,
    write_tpu,
)
from entropic_jax.pallas.paged_attention import cases as paged_cases
from entropic_jax.pallas.paged_attention import gpu as paged_gpu
from entropic_jax.pallas.paged_attention import tpu as paged_tpu
from entropic_jax.pallas.paged_attention.quantised import LARGEST, Quantised
from entropic_jax.pallas.topk_entropy import cases as topk_cases
from entropic_jax.pallas.topk_entropy import gpu as topk_gpu
from entropic_jax.pallas.topk_entropy import tpu as topk_tpu

from .compilers import like

QUERIES = 512  # of a row that is prefilled
integers = partial(like, dtype=jnp.int32)
size = lambda x: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(x))

WRITES = (  # KV heads, head_dim, page, type, type of the pages
    (8, 128, 64, "bfloat16", "bfloat16"),
    (1, 128, 64, "bfloat16", "bfloat16"),
    (2, 128, 64, "float32", "float32"),
    (8, 128, 128, "bfloat16", "int8"),
    (8, 128, 128, "bfloat16", "float8_e4m3fn"),
    (8, 64, 128, "bfloat16", "bfloat16"),
    (8, 64, 128, "bfloat16", "int8"),
)
PROJECTIONS = (  # rows, hidden, vocabulary, k
    (64, 4096, 128256, 64),
    (1, 8192, 151936, 128),
    (12, 2048, 50257, 8),
    (200, 4096, 128256, 64),
    (8, 5120, 262144, 20),
)


class Program(NamedTuple):
    """A function and its abstract arguments."""

    operation: str
    case: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    limit: int  # bytes of temporary memory: far less than a copy of the pool, or of the logits
    options: dict[str, Any] = {}  # noqa: RUF012, of jit


def programs(platform: str) -> Iterator[Program]:
    """All programs for one kind of device, `tpu` or `gpu`."""
    on_tpu = platform == "tpu"
    for case in paged_cases.LARGE:
        yield decode(case, paged_tpu.decode if on_tpu else paged_gpu.decode)
    for case in paged_cases.LARGE:
        module = prefill_tpu if on_tpu else prefill_gpu
        yield prefill(case, module.prefill if case.kept is None else module.prefill_partial)
    for shape in WRITES:
        # What the kernel for TPU declines, and all on a GPU, plain JAX writes.
        yield write(*shape, write_tpu.write if on_tpu and shape[1] % 128 == 0 else write_reference.write)
    for case in paged_cases.LARGE:
        if case.kept is not None and case.pages is None:
            yield select_pages(case)
    for case in topk_cases.LARGE:
        yield topk_entropy(case, topk_tpu if on_tpu else topk_gpu)
    for shape in PROJECTIONS:
        yield project(*shape, topk_tpu if on_tpu else topk_gpu)


def _pool(case) -> Any:
    return pool_like(
        case.rows * case.max_pages + 1, case.kv_heads, case.page, case.head_dim, case.pages or case.dtype
    )


def pool_like(pages: int, kv_heads: int, page: int, head_dim: int, dtype: str) -> Any:
    """An abstract pool."""
    tiles = like(pages, kv_heads, page, head_dim, dtype=dtype)
    return Quantised(tiles, like(pages, kv_heads, 1, page)) if dtype in LARGEST else tiles


def _lists(case) -> tuple[Any, Any]:
    if case.kept is None:
        return None, None
    return integers(case.rows, case.kv_heads, case.max_pages), integers(case.rows, case.kv_heads)


def decode(case, function) -> Program:
    pool, table, row = _pool(case), integers(case.rows, case.max_pages), integers(case.rows)
    q = like(case.rows, case.kv_heads, case.group, case.head_dim, dtype=case.dtype)
    arguments = (q, pool, pool, table, *_lists(case), row, row)
    return Program("decode", case.name, function, arguments, size(pool) // 12)


def prefill(case, function) -> Program:
    pool, table, row = _pool(case), integers(case.rows, case.max_pages), integers(case.rows)
    q = like(case.rows, case.kv_heads, case.group, QUERIES, case.head_dim, dtype=case.dtype)
    first = integers(case.rows, QUERIES)
    arguments = (q, pool, pool, table, *_lists(case), first, row, row)
    lanes = -(-case.head_dim // 128) * 128 / case.head_dim  # to which a TPU pads queries
    limit = size(pool) // 12 + int(3 * size(q) * lanes) + 4 * first.size * 128
    return Program("prefill", case.name, function, arguments, limit)


def write(kv_heads: int, head_dim: int, page: int, dtype: str, stored: str, function) -> Program:
    rows, pages = 64, 2049
    pool = pool_like(pages, kv_heads, page, head_dim, stored)
    summary, norm = like(pages, kv_heads, head_dim), like(pages, kv_heads)
    new, row = like(rows, kv_heads, head_dim, dtype=dtype), integers(rows)
    arguments = ((pool, pool), (summary, summary, summary, norm), new, new, row, row)
    name = "-".join([f"{rows}x{kv_heads}x{head_dim}-page{page}x{pages}", *dict.fromkeys((dtype, stored))])
    return Program("write", name, function, arguments, size(pool) // 12, {"donate_argnums": (0, 1)})


def select_pages(case) -> Program:
    """Page selection in XLA, as used on every accelerator; K and V are not among its arguments."""
    pool = case.rows * case.max_pages + 1
    summary = like(pool, case.kv_heads, case.head_dim)
    q = like(case.rows, case.kv_heads, case.group, case.head_dim, dtype=case.dtype)
    arguments = (q, PageSummary(summary, summary, summary), like(pool, case.kv_heads))
    arguments += (integers(case.rows, case.max_pages), integers(case.rows), like(case.rows))
    function = lambda *x: reference.select_pages(*x, case.page, SelectionRules())
    # Of small pages the summaries are a good part of K and V; of 8192 of them a TPU stores what a GPU fuses.
    limit = max(size(_pool(case)) // 12, 6 * size(summary))
    return Program("select_pages", case.name, function, arguments, limit)


def topk_entropy(case, module) -> Program:
    logits = like(case.rows, case.vocabulary, dtype=jnp.dtype(case.dtype))
    function = lambda logits, *at: module.topk_entropy(logits, case.k, *at)
    arguments = (logits, like(case.rows), like(case.rows))
    return Program("topk_entropy", case.name, function, arguments, _state(size(logits)))


def project(rows: int, hidden: int, vocabulary: int, k: int, module) -> Program:
    bfloat16 = partial(like, dtype=jnp.bfloat16)
    function = lambda hidden, weight, *at: module.project(hidden, weight, k, *at)
    arguments = (bfloat16(rows, hidden), bfloat16(hidden, vocabulary), like(rows), like(rows))
    name = f"{rows}x{hidden}x{vocabulary}-k{k}-bfloat16"
    logits = rows * vocabulary * 4
    # A GPU holds the logits; neither copies the weights.
    limit = _state(logits) if module is topk_tpu else logits + _state(logits) + (64 << 20)
    return Program("project", name, function, arguments, limit)


def _state(read: int) -> int:
    # The state of the rows is a fraction of what is read, where that is much.
    return max(read // 4, 3 << 19)
