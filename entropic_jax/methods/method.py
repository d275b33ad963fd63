"""What a method of sparse prefill or of cache compression is, and how the loop runs it.

A `Method` stands where a page selection stands (`State.page_policy`). It is put together from at most three
parts: a `Prefill` says which pages each segment of a prompt reads, a `Compression` says which entries stay in
the cache afterwards, and an ordinary page selection says what a step then reads of them.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ..attention.page_selection import Information, PagePolicy, ReadStats, altogether, dense_reading
from ..cache import Cache, Layer, ModelShape
from ..pallas import paged_attention


class Scene(NamedTuple):
    """What a method sees in one layer: queries, and the pages that hold every key up to them."""

    q: jax.Array  # [rows, kv_heads, group, n, head_dim], scaled by 1/√head_dim
    asked: jax.Array  # bool [rows, n]: a query that is real
    start: jax.Array  # int32 [rows], where the first query stands
    earlier: jax.Array  # bool [rows, pages]: the page ends before the first query
    layer: Layer
    table: jax.Array  # int32 [rows, pages]


class Verdict(NamedTuple):
    """What a segment should read of the pages before it."""

    worth: jax.Array  # [rows, kv_heads, pages], the greatest are read first
    budget: jax.Array  # float32 [rows, kv_heads], tokens


class Prefill(Protocol):
    """Which earlier pages each segment of a prompt reads. Static.

    Segments that start before `dense_below`, the last one, and the first `dense_layers` layers read all.
    """

    @property
    def segment(self) -> int:
        """Queries of a segment, a power of two."""

    @property
    def dense_below(self) -> int:
        """Positions."""

    @property
    def dense_layers(self) -> int:
        """Layers."""

    def begin(self, rows: int, kv_heads: int, pages: int) -> Any:
        """What one layer remembers from segment to segment, at the start; leaves `[rows, …]`."""

    def judge(self, scene: Scene, memory: Any, below: Any) -> tuple[Verdict, Any, Any]:
        """The verdict, the memory after it, and what the layer above gets as `below` (None at first)."""


class Compression(Protocol):
    """Which entries stay in the cache once a prompt is read. Static."""

    @property
    def budget(self) -> int:
        """Entries kept per KV head; where heads differ, on average over those of a layer."""

    @property
    def after(self) -> int:
        """Steps of decoding before it is applied."""

    def begin(self, shape: ModelShape, cache: Cache) -> Any:
        """What one layer remembers of the queries, at the start; leaves `[rows, …]`."""

    def observe(self, scene: Scene, memory: Any) -> Any:
        """The memory after the queries of the scene."""

    def rank(self, memory: Any, keys: jax.Array, length: jax.Array) -> jax.Array:
        """`[rows, kv_heads, positions]`, the greatest are kept; keys `[rows, kv_heads, positions, head_dim]`.

        Positions at or past `length` hold anything and are never kept.
        """

    def share(self, rank: jax.Array, size: int) -> jax.Array | None:
        """int32 `[rows, kv_heads]`: pages kept per head; None keeps `budget` entries of every head."""


class Spent(NamedTuple):
    """What reading the prompts has cost so far, summed over layers; float32 `[rows]`."""

    products: jax.Array  # of a query with a key, over all query heads, scoring of pages included
    positions: jax.Array  # keys (or values) read, over all KV heads, page summaries included


class Memory(NamedTuple):
    """What a method remembers; every leaf has one entry per row."""

    prefill: tuple[Any, ...]  # one per layer
    observed: tuple[Any, ...]  # one per layer
    lists: Any  # of the selection for steps
    held: tuple[jax.Array, ...]  # per layer int32 [rows, kv_heads]: pages a compressed head holds, −1 for all
    kept: jax.Array  # int32 [rows]: pages that the row had after compression
    pending: jax.Array  # bool [rows]: compression is still to come
    spent: Spent


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Method:
    """A published method, or several together. Static: another method is another program."""

    prefill: Prefill | None = None
    compression: Compression | None = None
    steps: PagePolicy | None = None  # which pages a step reads; None reads all that are held

    def __post_init__(self) -> None:
        if self.steps is not None and getattr(self.compression, "ragged", False):
            raise ValueError(
                f"steps is {self.steps} beside {self.compression}, whose heads hold different "
                "pages; accepted is None, for a preset that reads all: off, micro, macro"
            )
        if self.compression is not None and self.information == "surprisal":
            raise ValueError(
                "steps weighs pages by 'surprisal', which a compressed page has not; accepted are value, "
                "mass and mahalanobis"
            )

    @property
    def page_size(self) -> int | None:
        """What is asked of the cache: what the steps ask, or the block of the prefill."""
        asked = None if self.steps is None else self.steps.page_size
        return getattr(self.prefill, "page_size", None) if asked is None else asked

    @property
    def information(self) -> Information:
        return "mass" if self.steps is None else self.steps.information

    @property
    def segment(self) -> int:
        """Tokens of a prompt that are read at once."""
        return 512 if self.prefill is None else self.prefill.segment

    def alters(self, positions: int) -> bool:
        """Whether the cache of a prompt of so many positions is not what reading it densely makes of it."""
        prefill, compression = self.prefill, self.compression
        sparse = prefill is not None and positions > prefill.dense_below
        return sparse or (compression is not None and positions + compression.after > compression.budget)

    def memory(self, shape: ModelShape, cache: Cache) -> Memory:
        """See `attention.page_selection.PagePolicy`."""
        rows, pages = cache.table.shape
        per_layer = lambda make: tuple(make() for _ in range(shape.layers))
        zero = jnp.zeros(rows, jnp.float32)
        prefill, compression, steps = self.prefill, self.compression, self.steps
        ragged = compression is not None and getattr(compression, "ragged", False)
        return Memory(
            () if prefill is None else per_layer(lambda: prefill.begin(rows, shape.kv_heads, pages)),
            () if compression is None else per_layer(lambda: compression.begin(shape, cache)),
            () if steps is None else steps.memory(shape, cache),
            per_layer(lambda: jnp.full((rows, shape.kv_heads), -1, jnp.int32)) if ragged else (),
            jnp.zeros(rows, jnp.int32),
            jnp.full(rows, compression is not None),
            Spent(zero, zero),
        )

    def reader(
        self, cache: Cache, dropped_mass_limit: jax.Array, memory: Memory, tokens: jax.Array
    ) -> "StepReader":
        """See `attention.page_selection.PagePolicy`."""
        return StepReader(self, cache, dropped_mass_limit, memory, tokens)

    def prompt_reader(self, cache: Cache, memory: Memory, step: Any, total: jax.Array) -> "PromptReader":
        """See `attention.page_selection.PagePolicy`."""
        return PromptReader(self, cache, memory, step, total)


def listed(kept: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The entries flagged in `[…, pages]` as an ascending list, and how many they are."""
    return jnp.argsort(~kept, axis=-1, stable=True).astype(jnp.int32), kept.sum(-1, dtype=jnp.int32)


def best(worth: jax.Array, among: jax.Array, many: jax.Array) -> jax.Array:
    """Flags of the `many` `[…]` greatest of `[…, n]` among those flagged; of equals the first."""
    worth = jnp.where(among, worth, -jnp.inf)
    falling = -jnp.sort(-worth, axis=-1)
    place = jnp.clip(many - 1, 0, worth.shape[-1] - 1)[..., None]
    floor = jnp.take_along_axis(falling, place, -1)
    above, level = worth > floor, (worth == floor) & among
    room = (many - above.sum(-1))[..., None]
    return (above | (level & (jnp.cumsum(level, -1) <= room))) & (many > 0)[..., None]


class PromptReader:
    """Reads a chunk of the prompts, layer after layer; it lives while the chunk is traced."""

    def __init__(self, method: Method, cache: Cache, memory: Memory, step: Any, total: jax.Array) -> None:
        self.method, self.cache, self.before, self.step = method, cache, memory, step
        self.last_segment = step.start + step.count >= total
        self.prefill: list[Any] = []
        self.observed: list[Any] = []
        self.below: Any = None
        self.spent = memory.spent

    def memory(self) -> Memory:
        """What the next chunk needs."""
        return self.before._replace(
            prefill=tuple(self.prefill), observed=tuple(self.observed), spent=self.spent
        )

    def read(self, layer: Layer, q: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
        """A chunk of one query, `[rows, kv_heads, group, head_dim]`."""
        return self.read_prompt(layer, q[:, :, :, None], first[:, None], self.step.start, last)[:, :, :, 0]

    def read_prompt(
        self, layer: Layer, q: jax.Array, first: jax.Array, query: jax.Array, last: jax.Array
    ) -> jax.Array:
        """Causal attention of scaled q `[rows, kv_heads, group, n, head_dim]` to what the method lists."""
        table, size, n = self.cache.table, self.cache.page_size, q.shape[3]
        asked = jnp.arange(n) < self.step.count[:, None]
        page = jnp.arange(table.shape[1])
        earlier = (page + 1) * size <= query[:, None]
        scene = Scene(q, asked, query, earlier, layer, table)
        method, number = self.method, max(len(self.prefill), len(self.observed))
        dense = lambda: paged_attention.prefill(
            q, layer.keys, layer.values, table, None, None, first, query, last
        )
        many = earlier.sum(-1, dtype=jnp.int32)[:, None]  # [rows, 1]
        if method.prefill is None:
            out, count = dense(), many
        else:
            policy = method.prefill
            verdict, memory, self.below = policy.judge(scene, self.before.prefill[number], self.below)
            self.prefill.append(memory)
            whole = (query < policy.dense_below) | self.last_segment | (self.step.count == 0)
            count = jnp.where(
                whole[:, None], many, jnp.minimum(verdict.budget.astype(jnp.int32) // size, many)
            )
            own = (page * size < last[:, None]) & ~earlier

            def sparse() -> jax.Array:
                kept = best(verdict.worth, earlier[:, None], count) | own[:, None]
                where = listed(kept)
                return paged_attention.prefill(q, layer.keys, layer.values, table, *where, first, query, last)

            if number < policy.dense_layers:
                out, count = dense(), many
            else:
                out = jax.lax.cond(whole.all(), dense, sparse)
        self._account(scene, count)
        if method.compression is not None:
            self.observed.append(method.compression.observe(scene, self.before.observed[number]))
        return out

    def _account(self, scene: Scene, count: jax.Array) -> None:
        """Enter what a layer read: `count` `[rows, kv_heads or 1]` earlier pages by every query."""
        kv_heads, group, size = scene.q.shape[1], scene.q.shape[2], self.cache.page_size
        asked = self.step.count.astype(jnp.float32)
        count = jnp.broadcast_to(count, (count.shape[0], kv_heads)).sum(1).astype(jnp.float32) * size
        lead = (scene.start - scene.earlier.sum(1) * size).astype(jnp.float32)  # before the queries, own page
        own = asked * (lead + (asked + 1) / 2)
        products = group * (count * asked + kv_heads * own)
        positions = count + kv_heads * (lead + asked)
        if self.method.prefill is not None:  # a page costs a query head two products with d numbers each
            looked = jnp.where(asked > 0, scene.earlier.sum(1), 0).astype(jnp.float32) * kv_heads
            products, positions = products + group * looked, positions + looked
        some = asked > 0
        self.spent = Spent(
            self.spent.products + jnp.where(some, products, 0.0),
            self.spent.positions + jnp.where(some, positions, 0.0),
        )


class StepReader:
    """Reads for one step, layer after layer; it lives while the step is traced."""

    def __init__(
        self, method: Method, cache: Cache, dropped_mass_limit: jax.Array, memory: Memory, tokens: jax.Array
    ) -> None:
        self.method, self.cache, self.before = method, cache, memory
        self.inner = (
            None
            if method.steps is None
            else method.steps.reader(cache, dropped_mass_limit, memory.lists, tokens)
        )
        self.readings: list[ReadStats] = []
        self.observed: list[Any] = []

    def memory(self) -> Memory:
        """What the next step needs."""
        lists = self.before.lists if self.inner is None else self.inner.memory()
        return self.before._replace(observed=tuple(self.observed), lists=lists)

    def read(self, layer: Layer, q: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
        """Attention of scaled q `[rows, kv_heads, group, head_dim]` to what is held before `last`."""
        table, number = self.cache.table, len(self.readings)
        if self.method.compression is not None:
            start = jnp.maximum(last - 1, 0)
            earlier = (jnp.arange(table.shape[1]) + 1) * self.cache.page_size <= start[:, None]
            scene = Scene(q[:, :, :, None], (last > 0)[:, None], start, earlier, layer, table)
            after = self.method.compression.observe(scene, self.before.observed[number])
            self.observed.append(after)
        if self.inner is not None:
            out = self.inner.read(layer, q, first, last)
            self.readings.append(self.inner.readings[-1])
            return out
        index = count = None
        reading = dense_reading(layer, first, last)
        if self.before.held:
            index, count = self._lists(self.before.held[number], last)
            slack = jnp.where(last > 0, -last % self.cache.page_size, 0)
            read = (count * self.cache.page_size - slack[:, None]).sum(1).astype(jnp.float32)
            reading = reading._replace(positions=read, held=read)
        self.readings.append(reading)
        return paged_attention.decode(q, layer.keys, layer.values, table, index, count, first, last).out

    def _lists(self, held: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of the pages a compressed row had, the first `held` of each head; all that came since."""
        page = jnp.arange(self.cache.table.shape[1])
        pages = -(-last // self.cache.page_size)[:, None, None]
        old = page < self.before.kept[:, None, None]
        mine = jnp.where(held[..., None] < 0, True, page < held[..., None])
        return listed((~old | mine) & (page < pages))

    def total(self) -> ReadStats:
        """What the step read."""
        return altogether(self.readings)
