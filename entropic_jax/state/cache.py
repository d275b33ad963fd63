"""The paged key–value cache as a pytree: pages, page table, free stack, page summaries.

A *page* holds `page_size` consecutive positions of one sequence, for every layer. Within a layer the
tile of one (page, KV head) is contiguous `[page_size, head_dim]`, so a kernel can fetch exactly the tiles
chosen for a head. Pages move between the free stack and the page table on the device, without loops.

Pages are counted: a full page may belong to several rows, and to the host, which keeps prefixes. Only its
last owner returns it to the free stack. A page that is not full has one owner, so no row ever writes into
what another reads.

On a CPU, layers are a tuple of separate arrays rather than one stacked array: XLA's CPU backend copies what
it slices out of a stacked array. Programs that scan over layers have stacks of them (`layer_stacks`).
"""

import collections
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..pallas.paged_attention import default_page_size as default_page_size
from ..pallas.paged_attention import quantised
from ..pallas.paged_attention.quantised import bytes_per_number as bytes_per_number
from .layer_stacks import Layer as Layer
from .layer_stacks import LayerPattern, LayerStacks, empty_layers, in_all_layers, map_pools
from .row_subset import RowSubset

MOST = 2**31 - 2  # of anything that the device counts: page numbers are int32, and one is the scratch page


class ModelShape(NamedTuple):
    """Model dimensions used by the cache and the ledger."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    hidden: int
    # Weights of matrix products, including the output projection but not the embedding look-up.
    weights: int = 0  # in one token's step; of experts, those that one token chooses
    expert_weights: int = 0  # of all experts of all layers together
    expert_share: float = 0.0  # the share of the experts that one token chooses
    drafters: tuple["ModelShape", ...] = ()  # models whose layers follow in the same pages
    pattern: LayerPattern | None = None  # of the layers that a program scans over; None: it is unrolled
    page_shards: int = 1  # devices that divide the pages of a KV head; the pool has a head for each of them


class Cache(NamedTuple):
    """The KV cache of a batch: a page pool for each layer, and the page table that all layers share.

    `allocate` makes one; `grant`, `retain` and `release` count who owns a page.
    """

    layers: tuple[Layer, ...] | LayerStacks
    table: jax.Array  # int32 [rows, most pages of a row]; `pages` (the scratch page) where nothing is granted
    granted: jax.Array  # int32 [rows], how many entries of a table row are granted
    free: jax.Array  # int32 [pages], a stack: the first `available` entries are free pages
    available: jax.Array  # int32 []
    references: jax.Array  # int32 [pages + 1], the owners of a page: rows, and the host; 0 where it is free
    surprisal: jax.Array | None = None  # float32 [pages + 1], summed over the tokens of a page, if kept

    @property
    def page_size(self) -> int:
        """Positions per page."""
        return self.layers[0].keys.shape[2]

    @property
    def bytes_per_number(self) -> float:
        """Bytes per key or value element, including its share of the scale."""
        keys = self.layers[0].keys
        return quantised.bytes_per_number(keys.dtype, keys.shape[-1])

    @property
    def is_divided(self) -> bool:
        """Whether devices divide the pages of a KV head."""
        return any(layer.page_shards is not None for layer in self.layers)

    @property
    def pages(self) -> int:
        """Pages of the pool, without the scratch page."""
        return self.free.shape[0]


def allocate(
    shape: ModelShape,
    rows: int,
    context: int,
    *,
    pages: int | None = None,
    page_size: int | None = None,
    dtype: jax.typing.DTypeLike = "float32",
    moments: bool = False,
    surprisal: bool = False,
) -> Cache:
    """An empty cache for `rows` sequences of at most `context` positions.

    Memory that no sequence owns is never read into a result: it may hold anything, NaN included.

    Args:
        shape: sizes of the model.
        rows: sequences.
        context: positions of a sequence at most.
        pages: number of pages of the pool, by default enough for every row to reach `context`.
        page_size: positions per page, by default that of the device.
        dtype: the dtype of keys and values: float32, bfloat16, float16 or float64, or "int8" or
            "float8_e4m3fn" with a scale per key or value and KV head.
        moments: whether to keep sums of v and v² per page, for page selection by "mahalanobis".
        surprisal: whether to keep sums of the tokens' surprisals per page, for selection by "surprisal".

    Raises:
        ValueError: a size is not an integer of at least 1 or is too large, or the dtype is not supported.
    """
    page_size = default_page_size() if page_size is None else page_size
    sizes = {"rows": rows, "context": context, "page_size": page_size, "pages": 1 if pages is None else pages}
    for name, value in sizes.items():
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1; got {value!r:.200}")
    per_row = -(-context // page_size)
    pages = rows * per_row if pages is None else pages
    for name, value in (sizes | {"pages": pages}).items():
        if value > MOST:
            raise ValueError(f"{name} must be at most {MOST}; got {value}")
    return _empty(shape, rows, per_row, pages, page_size, quantised.dtype_name(dtype), moments, surprisal)


@partial(jax.jit, static_argnums=range(8))
def _empty(
    shape: ModelShape,
    rows: int,
    per_row: int,
    pages: int,
    page_size: int,
    dtype: str,
    moments: bool,
    surprisal: bool,
) -> Cache:
    """The cache of `allocate`, with `per_row` pages in a row's table: one program makes all of its arrays."""
    layers = empty_layers((shape, *shape.drafters), pages, page_size, dtype, moments)
    return Cache(
        layers,
        jnp.full((rows, per_row), pages, jnp.int32),
        jnp.zeros(rows, jnp.int32),
        jnp.arange(pages, dtype=jnp.int32),
        jnp.int32(pages),
        jnp.zeros(pages + 1, jnp.int32),
        jnp.zeros(pages + 1, jnp.float32) if surprisal else None,
    )


def grant(cache: Cache, length: jax.Array) -> tuple[Cache, jax.Array]:
    """Allocates pages so that each row can hold `length` positions, in row order, while pages are free.

    Args:
        cache: the cache of the batch.
        length: int32 `[rows]`; 0 requests none.

    Returns:
        The cache, and a flag per row, whether its request was granted in full. A row that cannot get all the
        pages that it needs gets none.
    """
    rows, per_row = cache.table.shape
    num_pages = jnp.minimum(jax.lax.div(length + (cache.page_size - 1), jnp.int32(cache.page_size)), per_row)
    missing = jnp.maximum(num_pages - cache.granted, 0)

    # Rows are served in order; one that does not fit is passed over, its neighbours are not.
    def serve(left, need):
        fits = need <= left
        return jnp.where(fits, left - need, left), fits

    _, fits = jax.lax.scan(serve, cache.available, missing)
    taken = jnp.where(fits, missing, 0)
    before = jnp.cumsum(taken) - taken
    column = jnp.arange(per_row, dtype=jnp.int32)[None, :]
    nth = column - cache.granted[:, None]  # of the row's new pages
    fresh = (nth >= 0) & (nth < taken[:, None])
    free_index = cache.available - 1 - (before[:, None] + nth)
    page = cache.free[jnp.where(fresh, free_index, 0)]
    enough = fits & (length <= per_row * cache.page_size)
    return (
        cache._replace(
            table=jnp.where(fresh, page, cache.table),
            granted=cache.granted + taken,
            available=cache.available - taken.sum(dtype=jnp.int32),
            references=cache.references.at[jnp.where(fresh, page, cache.pages + 1)].set(1, mode="drop"),
        ),
        enough,
    )


def note_surprisal(cache: Cache, start: jax.Array, count: jax.Array, surprisal: jax.Array) -> Cache:
    """Adds the surprisals of tokens to the sums of their pages.

    Args:
        cache: unchanged unless it keeps surprisals.
        start: int32 `[rows]`, position of the first token.
        count: int32 `[rows]`, how many of the n are real.
        surprisal: float32 `[rows, n]`, −ln p of the tokens, nats.
    """
    if cache.surprisal is None:
        return cache
    n, size = surprisal.shape[1], cache.page_size
    position = start[:, None] + jnp.arange(n)
    known = jnp.arange(n) < count[:, None]
    entry = jnp.minimum(position // size, cache.table.shape[1] - 1)
    page = jnp.where(known, jnp.take_along_axis(cache.table, entry, 1), cache.pages)
    fresh = jnp.where(known & (position % size == 0), page, cache.pages)
    sums = cache.surprisal.at[fresh].set(0.0).at[page].add(jnp.where(known, surprisal, 0.0))
    return cache._replace(surprisal=sums)


def release_rows(cache: Cache, rows: jax.Array) -> Cache:
    """Releases all pages of the flagged rows (bool `[rows]`); pages without another owner become free."""
    return shrink(cache, jnp.where(rows, 0, cache.table.shape[1] * cache.page_size))


def shrink(cache: Cache, length: jax.Array) -> Cache:
    """Releases each row's pages past its first `length` positions, int32 `[rows]`."""
    column = jnp.arange(cache.table.shape[1], dtype=jnp.int32)[None, :]
    needed = -(-length // cache.page_size)[:, None]
    returned = (column >= needed) & (column < cache.granted[:, None])
    pages = jnp.where(returned, cache.table, cache.pages)
    return release(cache, pages.reshape(-1))._replace(
        table=jnp.where(returned, cache.pages, cache.table),
        granted=jnp.minimum(cache.granted, needed[:, 0]),
    )


def release(cache: Cache, pages: jax.Array) -> Cache:
    """Removes one reference from each of the pages int32 `[n]`; those left without one become free.

    A page may occur several times. Out-of-range page numbers are ignored.
    """
    lost = jnp.zeros_like(cache.references).at[pages].add(1, mode="drop").at[-1].set(0)
    references = cache.references - lost
    empty = ((lost > 0) & (references == 0))[:-1]
    free_index = cache.available + jnp.cumsum(empty, dtype=jnp.int32) - 1
    number = jnp.arange(cache.pages, dtype=jnp.int32)
    return cache._replace(
        free=cache.free.at[jnp.where(empty, free_index, cache.pages)].set(number, mode="drop"),
        available=cache.available + empty.sum(dtype=jnp.int32),
        references=references,
    )


def retain(cache: Cache, pages: jax.Array) -> Cache:
    """Adds one reference to each of the pages int32 `[n]`, which have an owner; `release` removes it.

    A page may occur several times. Out-of-range page numbers are ignored.
    """
    return cache._replace(references=cache.references.at[pages].add(1, mode="drop").at[-1].set(0))


def share_pages(cache: Cache, rows: jax.Array, pages: jax.Array, num_pages: jax.Array) -> Cache:
    """Assigns pages that have an owner to empty rows as well.

    Args:
        cache: the cache of the batch.
        rows: int32 `[k]`, empty rows, each at most once; out-of-range numbers are ignored.
        pages: int32 `[k, n]`, full pages in the order of their positions, n at most what a row can hold.
        num_pages: int32 `[k]`, how many of the n each row gets.
    """
    num_pages = jnp.where(rows < cache.table.shape[0], num_pages, 0)
    taken = jnp.arange(pages.shape[1], dtype=jnp.int32) < num_pages[:, None]
    pages = jnp.where(taken, pages, cache.pages)
    return retain(cache, pages.reshape(-1))._replace(
        table=cache.table.at[rows, : pages.shape[1]].set(pages, mode="drop"),
        granted=cache.granted.at[rows].set(num_pages, mode="drop"),
    )


def fork(
    cache: Cache, sources: jax.Array, destinations: jax.Array, length: jax.Array
) -> tuple[Cache, jax.Array]:
    """Gives each empty destination row the first `length` positions of a source row.

    Full pages are shared; the page that is partly filled is copied.

    Args:
        cache: the cache of the batch.
        sources: int32 `[k]`; several forks may have one source.
        destinations: int32 `[k]`, empty rows; out-of-range numbers are ignored.
        length: int32 `[k]`, positions.

    Returns:
        The cache, and a flag per fork: False where no page was free for the copy, and the destination stays
        empty.

    Raises ValueError where the pages of a KV head are divided over devices.
    """
    _refuse_divided(cache, "forked")
    rows, per_row = cache.table.shape
    size, real = cache.page_size, destinations < rows
    full = length // size
    partial = real & (length % size > 0)
    enough = ~partial | (jnp.cumsum(partial, dtype=jnp.int32) <= cache.available)
    begun = jnp.take_along_axis(cache.table[sources], jnp.minimum(full, per_row - 1)[:, None], 1)[:, 0]
    cache = share_pages(cache, destinations, cache.table[sources], jnp.where(enough, full, 0))
    lengths = jnp.zeros(rows, jnp.int32).at[destinations].set(jnp.where(enough, length, 0), mode="drop")
    cache, _ = grant(cache, lengths)
    target = cache.table[jnp.where(real, destinations, 0), jnp.minimum(full, per_row - 1)]
    copied = partial & enough
    source, target = jnp.where(copied, begun, cache.pages), jnp.where(copied, target, cache.pages)

    def copy(x: jax.Array) -> jax.Array:
        to, of = (in_all_layers(page, x.shape[0], cache.pages + 1) for page in (target, source))
        return x.at[to].set(x[of])

    layers = jax.tree.map(copy, cache.layers)
    surprisal = None if cache.surprisal is None else copy(cache.surprisal)
    return cache._replace(layers=layers, surprisal=surprisal), enough | ~real


def rewind(cache: Cache, rows: jax.Array, length: jax.Array, max_rows: int | None = None) -> Cache:
    """Truncates the flagged rows to their first `length` positions.

    Pages that become empty are released. The summaries of a page that is left partly filled, which must have
    no other owner, are recomputed.

    Args:
        cache: the cache of the batch.
        rows: bool `[rows]`, the rows to truncate.
        length: int32 `[rows]`, positions to keep.
        max_rows: how many rows are flagged at most, and so how many pages are read; static, None for all.

    Raises:
        ValueError: the cache keeps surprisals, which cannot be undone, or its pages are divided over devices.
    """
    if cache.surprisal is not None:
        raise ValueError(
            "cache must be allocated without surprisals to be truncated; got one that keeps them"
        )
    _refuse_divided(cache, "truncated")
    size, per_row = cache.page_size, cache.table.shape[1]
    kept = -(-length // size)
    column = jnp.arange(per_row, dtype=jnp.int32)
    returned = rows[:, None] & (column >= kept[:, None]) & (column < cache.granted[:, None])
    entry = jnp.minimum(length // size, per_row - 1)
    last = jnp.take_along_axis(cache.table, entry[:, None], 1)[:, 0]
    page = jnp.where(rows & (length % size > 0), last, cache.pages)
    flagged = RowSubset(rows, max_rows)
    last_page, kept_of = flagged.gather(page, cache.pages), flagged.gather(length % size)
    all_held = (jnp.arange(size) < kept_of[:, None])[:, None, :, None]

    def summarised(layer: Layer) -> Layer:
        pool_pages = layer.key_min.shape[0]
        page = in_all_layers(last_page, pool_pages, cache.pages + 1)
        held = jnp.tile(all_held, (pool_pages // (cache.pages + 1), 1, 1, 1))
        key, value = (quantised.gather(x, page, jnp.float32) for x in (layer.keys, layer.values))
        value = jnp.where(held, value, 0.0)
        moments: dict[str, Any] = {}
        if layer.value_sum is not None and layer.value_square is not None:
            moments["value_sum"] = layer.value_sum.at[page].set(value.sum(2))
            moments["value_square"] = layer.value_square.at[page].set(jnp.square(value).sum(2))
        return layer._replace(
            key_min=layer.key_min.at[page].set(jnp.where(held, key, jnp.inf).min(2)),
            key_max=layer.key_max.at[page].set(jnp.where(held, key, -jnp.inf).max(2)),
            key_sum=layer.key_sum.at[page].set(jnp.where(held, key, 0.0).sum(2)),
            value_norm=layer.value_norm.at[page].set(jnp.linalg.norm(value, axis=-1).max(2)),
            **moments,
        )

    return release(cache, jnp.where(returned, cache.table, cache.pages).reshape(-1))._replace(
        layers=map_pools(summarised, cache.layers),
        table=jnp.where(returned, cache.pages, cache.table),
        granted=jnp.where(rows, jnp.minimum(cache.granted, kept), cache.granted),
    )


def _refuse_divided(cache: Cache, action: str) -> None:
    """Raises ValueError where a page and its copy may be on different devices."""
    if cache.is_divided:
        raise ValueError(f"cache must have a KV head's pages on one device to be {action}; got divided pages")


def check(cache: Cache, retained: Sequence[int] = ()) -> None:
    """Raises AssertionError unless every page is free exactly once, or has as many owners as references.

    A debugging aid for the host; it copies the tables.

    Args:
        cache: the cache of the batch.
        retained: the pages that the host has retained, once per reference.
    """
    table, granted, free, references = (
        np.asarray(x) for x in (cache.table, cache.granted, cache.free, cache.references)
    )
    unused = free[: int(cache.available)].tolist()
    owners = collections.Counter(retained)
    for number, (row, n) in enumerate(zip(table, granted, strict=True)):
        owners.update(row[:n].tolist())
        assert len(set(row[:n].tolist())) == n, f"row {number} holds a page twice: {row[:n]}"
        assert (row[n:] == cache.pages).all(), "a table entry past the granted ones is not the scratch page"
    counted = {page: int(n) for page, n in enumerate(references[:-1]) if n}
    assert counted == dict(owners), f"references are {counted}, owners {dict(owners)}"
    seen = sorted(unused + list(owners))
    assert seen == list(range(cache.pages)), f"pages lost or owned twice: {seen}"
