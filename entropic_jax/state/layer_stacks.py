"""Pools of pages of the layers: one per layer, or one for all layers that a program scans over.

A program that is unrolled has a pool of its own for every layer. One that scans over layers has a *stack*: a
flat pool `[repeats · (pages + 1), …]` in which the pages of the layers lie one layer after the other. Kernels
get the flat pool and a page table shifted to the layer (`Layer.pages_of`), so no layer is sliced out of it or
copied.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..mesh import PageShards
from ..pallas.paged_attention import quantised, uninitialised
from ..pallas.paged_attention.quantised import Pool

MOMENTS = ("value_sum", "value_square")  # fields of `Layer` that are kept on demand


@dataclasses.dataclass(frozen=True)
class LayerPattern:
    """Which layers of a model are scanned over: `repeats` times the same `period` layers, after a prefix.

    The layers before and behind are unrolled.
    """

    prefix: int  # layers before the first repeat
    period: int  # layers of a repeat, which may differ from each other
    repeats: int  # at least 2

    @property
    def end(self) -> int:
        """The first layer behind the repeats."""
        return self.prefix + self.period * self.repeats

    def places(self, layers: int) -> "tuple[Place, ...]":
        """The place of each of a model's layers among its pools, or among its stacked weights."""

        def place(number: int) -> Place:
            if number < self.prefix:
                return Place(number)
            if number >= self.end:
                return Place(number - self.period * (self.repeats - 1))
            repeat, position = divmod(number - self.prefix, self.period)
            return Place(self.prefix + position, repeat, self.repeats)

        return tuple(map(place, range(layers)))


class Place(NamedTuple):
    """Where a layer lies: the number of its pool, and which of the pool's layers it is."""

    pool: int
    repeat: int = 0
    repeats: int = 1  # layers of the pool


class Layer(NamedTuple):
    """Keys and values of one layer, and a summary of each page of them.

    The last page is scratch space: inactive rows write to it, so that every write has one shape and happens
    in place. Of a stack, a `Layer` is the whole pool, and `first_page` says which part of it is the layer's.
    """

    keys: Pool  # [pages + 1, kv_heads, page_size, head_dim], rotated
    values: Pool  # [pages + 1, kv_heads, page_size, head_dim]
    key_min: jax.Array  # [pages + 1, kv_heads, head_dim], element-wise over the page
    key_max: jax.Array  # [pages + 1, kv_heads, head_dim]
    key_sum: jax.Array  # [pages + 1, kv_heads, head_dim]
    value_norm: jax.Array  # [pages + 1, kv_heads], the largest ‖v‖₂ of the page
    value_sum: jax.Array | None = None  # [pages + 1, kv_heads, head_dim], if moments are kept
    value_square: jax.Array | None = None  # the same of v², element-wise
    first_page: jax.Array | int | None = None  # int32 [], of the layer in its stack; None: it has no stack
    page_shards: PageShards | None = None  # how devices divide the pages of a KV head; None: they do not

    def pages_of(self, table: jax.Array) -> jax.Array:
        """The numbers of this layer's pages in its pool, from page numbers int32 `[…]` that layers share.

        Where devices divide the pages, those of other devices are the last page of the pool.
        """
        numbers = table if self.page_shards is None else self.page_shards.place(table)
        numbers = numbers if self.first_page is None else numbers + self.first_page
        if self.page_shards is None:
            return numbers
        return jnp.where(self.page_shards.holds(table), numbers, self.key_min.shape[0] - 1)

    def in_stack(self, repeat: jax.Array | int, repeats: int) -> "Layer":
        """One of the layers of this stack.

        Args:
            repeat: its number among them, int32 `[]`.
            repeats: how many layers the stack has.
        """
        return self._replace(first_page=repeat * (self.key_min.shape[0] // repeats))


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class LayerStacks:
    """The pools of a program that scans over layers: a sequence of `Layer`, each a view of its pool."""

    pools: tuple[Layer, ...]
    places: tuple[Place, ...]  # of each layer; static

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[Layer]:
        return (self._layer(place) for place in self.places)

    def __getitem__(self, key: Any) -> Any:
        """A layer by its number, or the stacks that hold the layers of a slice: all of a pool, or none."""
        if not isinstance(key, slice):
            return self._layer(self.places[key])
        places = self.places[key]
        kept = sorted({place.pool for place in places})
        if any(place.pool in kept and place not in places for place in self.places):
            raise ValueError(f"layers must be all or none of a stack to be taken out; got {key}")
        moved = tuple(place._replace(pool=kept.index(place.pool)) for place in places)
        return LayerStacks(tuple(self.pools[n] for n in kept), moved)

    def __add__(self, other: "LayerStacks") -> "LayerStacks":
        """The layers of both."""
        moved = tuple(place._replace(pool=place.pool + len(self.pools)) for place in other.places)
        return LayerStacks(self.pools + other.pools, self.places + moved)

    def _layer(self, place: Place) -> Layer:
        pool = self.pools[place.pool]
        return pool if place.repeats == 1 else pool.in_stack(place.repeat, place.repeats)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """See `jax.tree_util.register_pytree_with_keys_class`."""
        return ((jax.tree_util.GetAttrKey("pools"), self.pools),), self.places

    @classmethod
    def tree_unflatten(cls, places: Any, children: Any) -> "LayerStacks":
        """See `jax.tree_util.register_pytree_with_keys_class`."""
        return cls(children[0], places)


def replace_layer(layers: Any, number: int, layer: Any) -> Any:
    """The layers of a cache with one of them as written.

    Args:
        layers: the layers, a tuple or `LayerStacks`.
        number: the number of the layer that was written.
        layer: what `layers[number]` has become.
    """
    if isinstance(layers, LayerStacks):
        pool, pools = layers.places[number].pool, layers.pools
        layer = layer._replace(first_page=None)
        return LayerStacks((*pools[:pool], layer, *pools[pool + 1 :]), layers.places)
    return (*layers[:number], layer, *layers[number + 1 :])


def map_pools(function: Callable[[Layer], Layer], layers: Any) -> Any:
    """The layers with `function` of every pool; that of a stack has the pages of several layers.

    Args:
        function: returns the new pool.
        layers: the layers of a cache, a tuple or `LayerStacks`.
    """
    if isinstance(layers, LayerStacks):
        return LayerStacks(tuple(map(function, layers.pools)), layers.places)
    return tuple(map(function, layers))


def in_all_layers(numbers: jax.Array, pool_pages: int, pages: int) -> jax.Array:
    """The numbers of some pages in each layer of a pool, int32 `[layers · n]`, layer after layer.

    Args:
        numbers: int32 `[n]`, page numbers that layers share.
        pool_pages: pages of the pool.
        pages: pages of one layer, its scratch page included.
    """
    if pool_pages == pages:
        return numbers
    first = jnp.arange(0, pool_pages, pages, dtype=jnp.int32)
    return (first[:, None] + numbers).reshape(-1)


def empty_layers(
    models: tuple[Any, ...], pages: int, page_size: int, dtype: str, moments: bool
) -> tuple[Layer, ...] | LayerStacks:
    """Layers that hold nothing, those of the models one after the other.

    Args:
        models: the sizes of each model (`cache.ModelShape`).
        pages: pages of a layer, without the scratch page.
        page_size: positions of a page.
        dtype: the name of the dtype of keys and values.
        moments: whether to keep sums of v and v² per page.
    """

    def pool(model: Any, repeats: int = 1) -> Layer:
        shards = None if model.page_shards == 1 else PageShards(model.page_shards)
        local_pages = pages if shards is None else shards.local_pages(pages)
        heads = model.kv_heads * model.page_shards  # on a mesh, each device has one of them
        tile = (repeats * (local_pages + 1), heads, page_size, model.head_dim)
        summary = (*tile[:2], model.head_dim)
        summaries = (uninitialised(summary, jnp.float32) for _ in range(5 if moments else 3))
        low, high, total, *moment_sums = summaries
        keys, values = (quantised.with_scales(uninitialised(tile, dtype)) for _ in range(2))
        norm = uninitialised(tile[:2], jnp.float32)
        sums: dict[str, Any] = dict(zip(MOMENTS, moment_sums, strict=False))
        return Layer(keys, values, low, high, total, norm, **sums)._replace(page_shards=shards)

    def stacks(model: Any) -> LayerStacks:
        places = tuple(map(Place, range(model.layers)))
        places = places if model.pattern is None else model.pattern.places(model.layers)
        repeats = {place.pool: place.repeats for place in places}
        return LayerStacks(tuple(pool(model, repeats[number]) for number in sorted(repeats)), places)

    if all(model.pattern is None for model in models):
        return tuple(pool(model) for model in models for _ in range(model.layers))
    return functools.reduce(operator.add, map(stacks, models))
