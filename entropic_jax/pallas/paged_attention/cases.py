"""Test cases of paged attention for every back end, with the exact result in float64.

Memory on which no result may depend is NaN: pages that no row owns, pages that are not listed, and the slots
of a page outside of the window. int8 has no NaN, so the scales of int8 pages are NaN instead.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .quantised import LARGEST, Quantised


class Case(NamedTuple):
    """The shape of a case, and which of its pages are listed."""

    rows: int
    kv_heads: int
    group: int
    head_dim: int
    page: int
    max_pages: int  # of a row
    kept: float | None = None  # the listed share of the pages; None: no page list
    window: bool = False  # whether half of the rows see only their newest positions
    dtype: str = "float32"
    soft_cap: float | None = None
    pages: str | None = None  # the dtype of quantised pages

    @property
    def name(self) -> str:
        """The name of the case, for pytest."""
        listed = "all" if self.kept is None else f"kept{self.kept:g}"
        parts = [
            f"{self.rows}x{self.kv_heads}x{self.group}x{self.head_dim}",
            f"page{self.page}x{self.max_pages}",
        ]
        parts += [listed, self.dtype]
        parts += [self.pages] if self.pages else []
        parts += ["window"] * self.window + ["cap"] * (self.soft_cap is not None)
        return "-".join(parts)


class Arguments(NamedTuple):
    """The arguments of `decode` as NumPy arrays."""

    q: np.ndarray
    keys: Any  # an array or Quantised
    values: Any
    page_table: np.ndarray
    page_list: np.ndarray | None
    num_pages: Any
    window_start: np.ndarray
    context_length: np.ndarray


# Small enough for an interpreter. Every row of a case has another length, and one is empty.
SMALL = (
    Case(3, 2, 4, 128, 16, 5),
    Case(3, 2, 4, 128, 16, 6, kept=0.5),
    Case(2, 1, 1, 128, 32, 4, kept=1.0, window=True),
    Case(2, 2, 16, 128, 16, 4, kept=0.5, window=True, dtype="bfloat16"),
    Case(2, 2, 7, 256, 16, 3, dtype="bfloat16", window=True),
    Case(3, 2, 2, 64, 16, 4, kept=0.5, dtype="bfloat16"),
    Case(2, 2, 2, 128, 16, 4, kept=0.6, soft_cap=2.0),
    Case(2, 1, 3, 128, 256, 3, kept=0.7, dtype="bfloat16"),
    Case(3, 2, 2, 128, 128, 3, kept=0.7, dtype="bfloat16", pages="int8"),
    Case(2, 1, 4, 128, 128, 4, window=True, dtype="bfloat16", pages="float8_e4m3fn"),
    Case(2, 2, 1, 128, 128, 3, kept=0.7, dtype="float32", pages="int8"),
    Case(2, 2, 4, 64, 128, 4, kept=0.6, window=True),
    Case(2, 1, 2, 96, 128, 3, dtype="bfloat16", pages="float8_e4m3fn"),
)

# The shapes of models, for compilers and hardware; too large for an interpreter.
LARGE = tuple(
    Case(rows, kv_heads, group, head_dim, page, context // page, kept, dtype=dtype, pages=(*pages, None)[0])
    for rows, kv_heads, group, head_dim, page, context, kept, dtype, *pages in (
        (64, 8, 4, 128, 128, 8192, None, "bfloat16"),
        (64, 8, 4, 128, 128, 8192, 0.25, "bfloat16"),
        (4, 8, 4, 128, 128, 131072, 0.25, "bfloat16"),
        (1, 8, 16, 128, 64, 131072, None, "bfloat16"),
        (8, 4, 1, 128, 16, 16384, 0.25, "bfloat16"),
        (2, 8, 4, 128, 16, 131072, 0.25, "bfloat16"),
        (8, 2, 8, 256, 256, 32768, 0.25, "bfloat16"),
        (8, 8, 4, 64, 64, 8192, 0.25, "bfloat16"),
        (8, 4, 2, 128, 64, 16384, 0.25, "float32"),
        (64, 8, 4, 128, 128, 8192, None, "bfloat16", "int8"),
        (4, 8, 4, 128, 128, 131072, 0.25, "bfloat16", "float8_e4m3fn"),
        (8, 8, 4, 64, 128, 65536, 0.25, "bfloat16"),
    )
)


def build(case: Case, seed: int = 0) -> Arguments:
    """The arguments of one case."""
    rng = np.random.default_rng(seed)
    rows, kv_heads, size, max_pages = case.rows, case.kv_heads, case.page, case.max_pages
    pool = rows * max_pages + 1
    shape = (pool, kv_heads, size, case.head_dim)
    keys, values = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((rows, kv_heads, case.group, case.head_dim)) * case.head_dim**-0.5
    page_table = rng.permutation(pool - 1).reshape(rows, max_pages).astype(np.int32)
    context_length = rng.integers(1, max_pages * size + 1, rows)
    context_length[0] = max_pages * size - rng.integers(0, size)
    if rows > 1:
        context_length[-1] = 0
    window_start = np.zeros(rows, np.int64)
    if case.window:
        window_start = np.where(
            np.arange(rows) % 2 == 0, np.maximum(context_length - 2 * size + size // 3, 0), 0
        )
    page_list = num_pages = None
    if case.kept is not None:
        page_list = np.zeros((rows, kv_heads, max_pages), np.int32)
        num_pages = np.zeros((rows, kv_heads), np.int32)
        for row in range(rows):
            pages = -(-context_length[row] // size)
            for head in range(kv_heads):
                kept = np.flatnonzero(rng.random(pages) < case.kept)
                num_pages[row, head] = kept.size
                page_list[row, head] = np.pad(kept, (0, max_pages - kept.size))
    read = seen(case, page_table, page_list, num_pages, window_start, context_length)
    keys, values = (poisoned(case.pages or case.dtype, x, read) for x in (keys, values))
    q = q.astype(jnp.dtype(case.dtype))
    return Arguments(
        q,
        keys,
        values,
        page_table,
        page_list,
        num_pages,
        window_start.astype(np.int32),
        context_length.astype(np.int32),
    )


def poisoned(dtype: str, x: np.ndarray, read: np.ndarray) -> Any:
    """A pool of x in a dtype, NaN where it is not attended to.

    Args:
        dtype: the dtype of the pool.
        x: `[pool, kv_heads, page, head_dim]`.
        read: bool `[pool, kv_heads, page]`, the slots that are attended to.
    """
    if dtype not in LARGEST:
        return np.where(read[..., None], x, np.nan).astype(jnp.dtype(dtype))
    scale = np.abs(x).max(-1) / LARGEST[dtype]
    tiles = x / scale[..., None]
    tiles = np.rint(tiles) if dtype == "int8" else np.where(read[..., None], tiles, np.nan)
    scale = np.where(read, scale, np.nan).astype(np.float32)
    return Quantised(tiles.astype(jnp.dtype(dtype)), scale[:, :, None])


def floats(pool: Any) -> np.ndarray:
    """The content of a pool, float64."""
    if isinstance(pool, Quantised):
        return pool.tiles.astype(np.float64) * np.swapaxes(pool.scale, 2, 3)
    return pool.astype(np.float64)


def seen(
    case: Case,
    page_table: np.ndarray,
    page_list: np.ndarray | None,
    num_pages: Any,
    window_start: np.ndarray,
    context_length: np.ndarray,
) -> np.ndarray:
    """Which slots of the pool are attended to: bool `[pool, kv_heads, page]`.

    Args:
        case: sizes.
        page_table, page_list, num_pages, window_start, context_length: as for `decode`.
    """
    pool = case.rows * case.max_pages + 1
    read = np.zeros((pool, case.kv_heads, case.page), bool)
    position = np.arange(case.page)
    for row in range(case.rows):
        for head in range(case.kv_heads):
            entries = (
                range(case.max_pages) if page_list is None else page_list[row, head, : num_pages[row, head]]
            )
            for entry in entries:
                at = entry * case.page + position
                read[page_table[row, entry], head] |= (at >= window_start[row]) & (at < context_length[row])
    return read


def exact(case: Case, arguments: Arguments) -> tuple[np.ndarray, np.ndarray]:
    """The output and the log-sum-exp in float64, by definition."""
    q, keys, values, page_table, page_list, num_pages, window_start, context_length = arguments
    keys, values = floats(keys), floats(values)
    out = np.zeros(q.shape)
    log_sum_exp = np.full(q.shape[:3], -np.inf)
    read = seen(case, page_table, page_list, num_pages, window_start, context_length)
    for row in range(case.rows):
        for head in range(case.kv_heads):
            mask = read[page_table[row], head]  # of one row's own pages: no two rows share one here
            if not mask.any():
                continue
            k, v = (x[page_table[row], head][mask] for x in (keys, values))
            score = q[row, head].astype(np.float64) @ k.T
            if case.soft_cap is not None:
                score = case.soft_cap * np.tanh(score / case.soft_cap)
            top = score.max(-1, keepdims=True)
            weight = np.exp(score - top)
            total = weight.sum(-1, keepdims=True)
            out[row, head] = weight / total @ v
            log_sum_exp[row, head] = (top + np.log(total))[:, 0]
    return out, log_sum_exp
