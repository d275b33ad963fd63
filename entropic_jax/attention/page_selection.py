"""Page selection: decides which pages each layer of a step reads; the actuator of `meso-lossy`.

`Action.dropped_mass_limit` says how much attention mass may stay unread; a `Selection` turns it into a list
of pages for every KV head. Nothing is evicted: a page that one step skips, another may read. `page_reader`
reads the pages.
"""

import dataclasses
from collections.abc import Hashable
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp

from ..pallas import paged_attention
from ..pallas.paged_attention import PageChoice, PageSummary, SelectionRules, reference
from ..pallas.paged_attention.reference import estimate_pages, page_gates
from ..state.cache import Cache, Layer, ModelShape
from ..state.row_subset import where_rows
from .divided_pages import over_group
from .page_reader import LayerPages, PageGates, PageReader

RULES = SelectionRules()
MAX_DROPPED_MASS = 0.95  # upper bound of the dropped mass of any layer
Information = Literal["value", "mass", "surprisal", "mahalanobis"]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Selection:
    """How pages are chosen; static: another selection is another program.

    `information` weighs the estimated attention mass of a page: `value` by the largest ‖v‖, which bounds what
    leaving it out can change; `surprisal` by the mean −ln p(x_i | x_<i) of its tokens; `mahalanobis` by the
    mean squared distance of its values under a diagonal Gaussian of the row's values; `mass` applies no
    weight. `surprisal` and `mahalanobis` need a cache that keeps what they ask for, see `cache.allocate`.

    The first layer that chooses may leave `first_layer_scale` times `dropped_mass_limit` unread, 0.95 at
    most: where the attention of the lowest layer is spread over all pages, reading part of them suffices.

    A row's lists are chosen every `refresh` of its tokens and shared by groups of `layers_per_list` layers;
    pages that begin in between are read. The first `dense_layers` layers and rows of limit 0 read everything.

    `page_size` is the page size that the rules are meant for, preferred when a cache is allocated; None
    accepts any.

    The choice is a step function of the limit: gradients with respect to what sets it are zero. With
    `softness` above 0 it is relaxed for research: every page is read, and multiplied by its gate
    (`reference.page_gates`).

    Source: Kiruluta 2026 (arXiv 2603.03310), information-weighted pruning. Differs from the paper: attention
    mass is estimated from page summaries, not from the attention it is meant to save; I(v) = −ln p(v) of a
    vector is undefined, `surprisal` is its nearest literal reading; nothing is evicted.
    """

    information: Information = "value"
    rules: SelectionRules = RULES
    dense_layers: int = 2
    first_layer_scale: float = 1.0
    refresh: int = 1
    layers_per_list: int = 1
    softness: float = 0.0
    page_size: int | None = None

    def __post_init__(self) -> None:
        if self.information not in get_args(Information):
            known = ", ".join(get_args(Information))
            raise ValueError(f"information must be one of {known}; got {self.information!r}")
        lowest = dict(dense_layers=0, refresh=1, layers_per_list=1)
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}; got {getattr(self, name)}")
        if not self.first_layer_scale > 0:
            raise ValueError(f"first_layer_scale must be above 0; got {self.first_layer_scale}")
        rules = self.rules
        if (
            min(rules.sink_pages, rules.min_pages) < 0
            or rules.recent_pages < 1
            or not 0 <= rules.bound_weight <= 1
        ):
            raise ValueError(
                "rules must have sink_pages and min_pages of at least 0, recent_pages of at least 1, and "
                f"bound_weight between 0 and 1; got {rules}"
            )

    @property
    def compression(self) -> None:
        """See `PagePolicy`: nothing is compressed."""

    def groups(self, layers: int) -> int:
        """The number of lists of a model with `layers` layers."""
        return -(-max(0, layers - self.dense_layers) // self.layers_per_list)

    def memory(self, shape: ModelShape, cache: Cache) -> "tuple[PageLists, ...]":
        """See `PagePolicy`: lists where they outlive a step."""
        return no_page_lists(self, cache)

    def reader(
        self, cache: Cache, dropped_mass_limit: jax.Array, memory: Any, tokens: jax.Array
    ) -> "PageReader":
        """See `PagePolicy`."""
        renew = tokens % self.refresh == 0
        return PageReader(StepSelection(self, cache, dropped_mass_limit, memory, renew), cache)

    def prompt_reader(self, cache: Cache, memory: Any, span: Any, total: jax.Array) -> None:
        """See `PagePolicy`: prompts are prefilled densely."""


class PagePolicy(Protocol):
    """Decides which pages a prompt chunk or a step reads; static, as `State.page_policy`.

    What it remembers from step to step is a pytree whose leaves have one entry per row,
    `State.page_policy_state`.
    """

    @property
    def information(self) -> Information:
        """The information that pages are weighed by; the cache is allocated accordingly."""

    @property
    def page_size(self) -> int | None:
        """The page size that the choice is meant for, None for any."""

    @property
    def compression(self) -> Any:
        """A `methods.policies.CompressionPolicy` to apply after prefill, None for no compression."""

    def memory(self, shape: ModelShape, cache: Cache) -> Any:
        """The state of the policy at the start."""

    def reader(self, cache: Cache, dropped_mass_limit: jax.Array, memory: Any, tokens: jax.Array) -> Any:
        """The reader of one step: it has `read`, `total` and `memory`, as `page_reader.PageReader`.

        Args:
            cache: the KV cache of the rows of the step.
            dropped_mass_limit: ε, float32 `[rows]`, in [0, 1).
            memory: the state of the policy.
            tokens: int32 `[rows]`, how many tokens each row has emitted.
        """

    def prompt_reader(self, cache: Cache, memory: Any, span: Any, total: jax.Array) -> Any:
        """The reader of a chunk of prompts; None reads densely.

        It has `read_prompt(layer, q, first, query, last)`, as `paged_attention.prefill` without its lists,
        `read` for chunks of one token, and `memory()`.

        Args:
            cache: the KV cache of the rows of the chunk.
            memory: the state of the policy.
            span: where the tokens of the chunk stand (`attend.TokenSpan`).
            total: int32 `[rows]`, positions that each whole prompt takes.
        """


class PageLists(NamedTuple):
    """The pages chosen for a group of layers, when the rows had `row_pages` pages."""

    page_list: jax.Array  # int32 [rows, kv_heads, most pages of a row]
    num_pages: jax.Array  # int32 [rows, kv_heads]
    row_pages: jax.Array  # int32 [rows]
    dropped_mass: jax.Array  # float32 [rows, kv_heads]


def no_page_lists(selection: Selection, cache: Cache) -> tuple[PageLists, ...]:
    """Empty lists for every group, where lists outlive a step; else none."""
    rows, max_pages = cache.table.shape
    kv_heads = cache.layers[0].keys.shape[1]
    if selection.refresh == 1:
        return ()
    zeros = lambda *shape: jnp.zeros((rows, *shape), jnp.int32)

    def empty() -> PageLists:
        dropped_mass = jnp.zeros((rows, kv_heads), jnp.float32)
        return PageLists(zeros(kv_heads, max_pages), zeros(kv_heads), zeros(), dropped_mass)

    return tuple(empty() for _ in range(selection.groups(len(cache.layers))))


class WeighedPages(NamedTuple):
    """The weights by which a step chooses pages, and the page table of the rows."""

    summary: PageSummary  # each [n, kv_heads, head_dim]
    weight: jax.Array  # float32 [n, kv_heads], ≥ 0, which multiplies the mass of a page
    table: jax.Array  # int32 [rows, most pages of a row], numbers below n; entries are those of the cache


def weigh_pages(kind: Information, layer: Layer, cache: Cache, length: jax.Array) -> WeighedPages:
    """The weight of every page. Rows that share a page do not change what it weighs in each other.

    Args:
        kind: what pages are weighed by; see `Selection`.
        layer: its page summaries.
        cache: whose page table says which pages a row has, and which may hold the surprisals.
        length: int32 `[rows]`, positions that each row holds.
    """
    summary, table = PageSummary(layer.key_min, layer.key_max, layer.key_sum), layer.pages_of(cache.table)
    if kind == "value":
        return WeighedPages(summary, layer.value_norm, table)
    if kind == "mass":
        return WeighedPages(summary, jnp.ones_like(layer.value_norm), table)
    # A page that rows share weighs something else in each: every row has copies of its summaries.
    flat = lambda x: x.reshape(table.size, *x.shape[2:])
    numbers = jnp.arange(table.size, dtype=jnp.int32).reshape(table.shape)
    weight = flat(_row_information(kind, layer, cache, length))
    return WeighedPages(jax.tree.map(lambda x: flat(x[table]), summary), weight, numbers)


def _row_information(kind: Information, layer: Layer, cache: Cache, length: jax.Array) -> jax.Array:
    """`surprisal` or `mahalanobis` of each page of a row, float32 `[rows, pages, kv_heads]`.

    Args:
        kind: surprisal or mahalanobis.
        layer: as for `weigh_pages`, like the others.
        cache: with the page table of the rows.
        length: int32 `[rows]`, positions that each row holds.
    """
    size = cache.page_size
    page = jnp.arange(cache.table.shape[1])
    filled = jnp.clip(length[:, None] - page * size, 0, size)  # [rows, pages]
    real = filled > 0
    many = jnp.maximum(filled, 1).astype(jnp.float32)
    if kind == "surprisal":
        if cache.surprisal is None:
            raise ValueError(
                "information must not be 'surprisal' without a cache allocated with surprisal=True"
            )
        mean = jnp.where(real, cache.surprisal[cache.table], 0.0) / many
        weight = jnp.broadcast_to(mean[..., None], (*mean.shape, layer.value_norm.shape[1]))
    else:
        if layer.page_shards is not None:
            raise ValueError("information must not be 'mahalanobis' where devices divide a KV head's pages")
        if layer.value_sum is None or layer.value_square is None:
            raise ValueError(
                "information must not be 'mahalanobis' without a cache allocated with moments=True"
            )
        total, square = (
            jnp.where(real[..., None, None], x[layer.pages_of(cache.table)], 0.0)
            for x in (layer.value_sum, layer.value_square)
        )
        count = jnp.maximum(filled.sum(1), 1).astype(jnp.float32)[:, None, None]
        mean = (total.sum(1) / count)[:, None]
        variance = jnp.maximum((square.sum(1) / count)[:, None] - mean**2, 1e-6)
        many = many[..., None, None]
        weight = ((square / many - 2 * mean * total / many + mean**2) / variance).mean(-1)
    return jnp.where(real[..., None], jnp.maximum(weight, 0.0), 0.0)


class StepSelection:
    """The pages of one step by a `Selection`, layer after layer; it lives while a step is traced.

    Args:
        selection: how pages are chosen.
        cache: the KV cache of the rows of the step.
        dropped_mass_limit: ε, float32 `[rows]`, in [0, 1).
        lists: the lists of the step before, one per group of layers; none where every step chooses anew.
        renew: bool `[rows]`, the rows whose lists are chosen in this step.
    """

    def __init__(
        self,
        selection: Selection,
        cache: Cache,
        dropped_mass_limit: jax.Array,
        lists: tuple[PageLists, ...],
        renew: jax.Array,
    ) -> None:
        self.selection, self.cache = selection, cache
        self.dropped_mass_limit, self.renew = dropped_mass_limit, renew
        self.lists: list[Any] = list(lists)

    def choose(
        self, number: int, layer: Layer, q: jax.Array, last: jax.Array
    ) -> LayerPages | PageGates | None:
        """See `page_reader.PageChooser`."""
        selection, number = self.selection, number - self.selection.dense_layers
        if number < 0:
            return None
        limit = self.dropped_mass_limit
        if number == 0 and selection.first_layer_scale != 1:
            limit = jnp.minimum(selection.first_layer_scale * limit, MAX_DROPPED_MASS)
        if selection.softness > 0:
            return self._gates(layer, q, limit, last)
        group, follower = divmod(number, selection.layers_per_list)
        if follower:
            lists, no_row = self.lists[group], jnp.zeros(last.shape, bool)
            return LayerPages(lists.page_list, lists.num_pages, lists.dropped_mass, no_row, no_row, None)
        choice, is_new = self._lead(layer, q, limit, last, group)
        rules, row_pages = selection.rules, -(-last // self.cache.page_size)
        summaries_read = (
            is_new
            & (self.dropped_mass_limit > 0)
            & (row_pages > max(rules.min_pages, rules.sink_pages + rules.recent_pages))
        )
        return LayerPages(
            choice.page_list, choice.num_pages, choice.dropped_mass, is_new, summaries_read, choice.log_bound
        )

    def memory(self) -> tuple[Any, ...]:
        """The lists, where they outlive the step."""
        return tuple(self.lists) if self.selection.refresh > 1 else ()

    def layer_kind(self, number: int) -> Hashable | None:
        """See `layer_loop.LayerRecorder`. Lists that layers or steps share are traced layer by layer."""
        selection = self.selection
        if selection.refresh > 1 or selection.layers_per_list > 1:
            return None
        is_first = number == selection.dense_layers and selection.first_layer_scale != 1
        return number < selection.dense_layers, is_first

    def _lead(
        self, layer: Layer, q: jax.Array, limit: jax.Array, last: jax.Array, group: int
    ) -> tuple[PageChoice, jax.Array]:
        """The choice of the first layer of a group, and in which rows (bool `[rows]`) it is new."""
        if self.selection.refresh == 1:
            choice = self._select(layer, q, limit, last)
            if self.selection.layers_per_list > 1:
                self.lists.append(choice)
            return choice, jnp.ones(last.shape, bool)
        row_pages = -(-last // self.cache.page_size)
        keep = lambda: extended(self.lists[group], row_pages, q.shape[:3])

        def renewed():
            return where_rows(self.renew, self._select(layer, q, limit, last), keep())

        choice = jax.lax.cond(self.renew.any(), renewed, keep)
        self.lists[group] = PageLists(
            choice.page_list, choice.num_pages, row_pages.astype(jnp.int32), choice.dropped_mass
        )
        return choice, self.renew

    def _select(self, layer: Layer, q: jax.Array, limit: jax.Array, last: jax.Array) -> PageChoice:
        """The smallest set of pages, for this query, whose estimated mass reaches 1 − ε."""
        selection, cache = self.selection, self.cache
        pages = weigh_pages(selection.information, layer, cache, last)
        q, pages, last, limit = jax.lax.stop_gradient((q, pages, last, limit))
        operands = (
            q,
            pages.summary,
            pages.weight,
            pages.table,
            last,
            limit,
            cache.page_size,
            selection.rules,
        )
        if layer.page_shards is None:
            return paged_attention.select_pages(*operands)
        return reference.select_pages(*operands, complete=partial(over_group, layer, cache.table))

    def _gates(self, layer: Layer, q: jax.Array, limit: jax.Array, last: jax.Array) -> PageGates:
        selection, cache = self.selection, self.cache
        if layer.page_shards is not None:
            raise ValueError(
                f"softness must be 0 where devices divide a KV head's pages; got {selection.softness}"
            )
        weighed = weigh_pages(selection.information, layer, cache, last)
        pages = estimate_pages(
            q, weighed.summary, weighed.weight, weighed.table, last, cache.page_size, selection.rules
        )
        gate = page_gates(pages.weight, pages.always_kept, limit, selection.softness)
        gate = jnp.where((limit > 0)[:, None, None], gate, 1.0)
        return PageGates(gate, (pages.mass * (1 - gate)).sum(-1), pages.in_use)


def extended(lists: PageLists, row_pages: jax.Array, heads: tuple[int, ...]) -> PageChoice:
    """Page lists of an earlier step and the pages that have begun since. They bound nothing for a new query.

    Args:
        lists: the lists of the earlier step.
        row_pages: int32 `[rows]`, pages that each row has by now.
        heads: rows, KV heads, and query heads of a KV head.
    """
    entry = jnp.arange(lists.page_list.shape[2])
    beyond = lists.row_pages[:, None, None] + entry - lists.num_pages[..., None]
    count = lists.num_pages + (row_pages - lists.row_pages)[:, None]
    index = jnp.where(entry < lists.num_pages[..., None], lists.page_list, beyond)
    index = jnp.where(entry < count[..., None], index, 0)
    bound = jnp.full(heads, jnp.inf, jnp.float32)
    return PageChoice(index.astype(jnp.int32), count.astype(jnp.int32), lists.dropped_mass, bound)
