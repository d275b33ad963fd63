"""Which pages a layer reads: the actuator of the meso scale.

`Action.dropped_mass_limit` says how much attention mass may stay unread; a `Selection` turns it into a list
of pages for every KV head. Nothing is ever evicted: a page that is skipped now comes back when it matters.
"""

import dataclasses
from typing import Any, Literal, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp

from ..cache import Cache, Layer, ModelShape
from ..pallas import paged_attention
from ..pallas.paged_attention import PageChoice, PageSummary, PartialAttention, SelectionRules
from ..pallas.paged_attention.quantised import bytes_per_number
from ..pallas.paged_attention.reference import decode_gathered, estimate_pages, page_gates

RULES = SelectionRules()
MOST_OF_IT = 0.95  # of the attention mass, more than which no layer leaves unread
Information = Literal["value", "mass", "surprisal", "mahalanobis"]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Selection:
    """How pages are chosen; static: another selection is another program.

    `information` weighs the estimated attention mass of a page: `value` by the largest ‖v‖, which bounds
    what leaving it out can change; `surprisal` by the mean −ln p(x_i | x_<i) of its tokens; `mahalanobis` by
    the mean squared distance of its values under a diagonal Gaussian of the row's values; `mass` by nothing.
    The last two need a cache that keeps what they ask for, see `cache.allocate`.

    The first layer that chooses may leave `first_layer_scale` times `dropped_mass_limit` unread, 0.95 at
    most: where the attention of the lowest layer is spread over everything, a part of it is as good as all.

    A row's lists are made anew every `refresh` of its tokens and shared by groups of `share` layers; pages
    that begin in between are read. The first `dense_layers` layers, and rows of limit 0, read everything.

    `page_size` is what the rules are meant for, a hint to whoever allocates the cache; None is any.

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
    share: int = 1
    softness: float = 0.0
    page_size: int | None = None

    def __post_init__(self) -> None:
        if self.information not in get_args(Information):
            raise ValueError(
                f"information is {self.information!r}; accepted are {', '.join(get_args(Information))}"
            )
        least = dict(dense_layers=0, refresh=1, share=1)
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}; accepted are integers of at least {low}")
        if not self.first_layer_scale > 0:
            raise ValueError(f"first_layer_scale is {self.first_layer_scale}; accepted are numbers above 0")
        rules = self.rules
        if (
            min(rules.sink_pages, rules.min_pages) < 0
            or rules.recent_pages < 1
            or not 0 <= rules.bound_weight <= 1
        ):
            raise ValueError(
                f"rules is {rules}; accepted are sink_pages and min_pages >= 0, "
                "recent_pages >= 1, bound_weight in [0, 1]"
            )

    @property
    def compression(self) -> None:
        """See `PagePolicy`: nothing is compressed."""

    def groups(self, layers: int) -> int:
        """How many lists a model of so many layers has."""
        return -(-max(0, layers - self.dense_layers) // self.share)

    def memory(self, shape: ModelShape, cache: Cache) -> "tuple[PageLists, ...]":
        """See `PagePolicy`: lists where they outlive a step."""
        return no_page_lists(self, cache)

    def reader(
        self, cache: Cache, dropped_mass_limit: jax.Array, memory: Any, tokens: jax.Array
    ) -> "PageReader":
        """See `PagePolicy`."""
        return PageReader(self, cache, dropped_mass_limit, memory, tokens % self.refresh == 0)

    def prompt_reader(self, cache: Cache, memory: Any, step: Any, total: jax.Array) -> None:
        """See `PagePolicy`: prompts are read densely."""


class PagePolicy(Protocol):
    """What decides which pages are read, of a prompt and in a step; static, as `State.selection`.

    What it remembers from step to step is a pytree whose leaves have one entry per row, `State.lists`.
    """

    @property
    def information(self) -> Information:
        """What pages are weighed by, for whoever allocates the cache."""

    @property
    def page_size(self) -> int | None:
        """What the choice is meant for, None for any."""

    @property
    def compression(self) -> Any:
        """A `methods.policies.CompressionPolicy` to apply after prefill, None for no compression."""

    def memory(self, shape: ModelShape, cache: Cache) -> Any:
        """What is remembered at the start."""

    def reader(self, cache: Cache, dropped_mass_limit: jax.Array, memory: Any, tokens: jax.Array) -> Any:
        """Who reads for one step, layer by layer: `read`, `total` and `memory`, as those of `PageReader`.

        `tokens` int32 `[rows]` is how many tokens each row has emitted.
        """

    def prompt_reader(self, cache: Cache, memory: Any, step: Any, total: jax.Array) -> Any:
        """Who reads for a chunk of prompts at `step`, of `total` tokens `[rows]` each; None reads densely.

        It has `read_prompt(layer, q, first, query, last)`, as `paged_attention.prefill` without its lists,
        `read` for chunks of one token, and `memory()`.
        """


class ReadStats(NamedTuple):
    """What one layer, or a step, read; each float32 `[rows]`."""

    positions: jax.Array  # keys (or values) read, summed over KV heads
    held: jax.Array  # keys there were, summed over KV heads
    dropped: jax.Array  # attention mass left unread, estimated, mean over heads
    certificate: jax.Array  # bound of the change of any head's output, ‖Δ‖₂ ≤ 2δ·max‖v‖
    summaries: jax.Array | float = 0.0  # what was read to choose, in positions that cost as much


class PageLists(NamedTuple):
    """The pages chosen for a group of layers, when the rows had `row_pages` pages."""

    page_list: jax.Array  # int32 [rows, kv_heads, most pages of a row]
    num_pages: jax.Array  # int32 [rows, kv_heads]
    row_pages: jax.Array  # int32 [rows]
    dropped_mass: jax.Array  # float32 [rows, kv_heads]


def no_page_lists(selection: Selection, cache: Cache) -> tuple[PageLists, ...]:
    """Empty lists for every group, where lists outlive a step; else none."""
    rows, most = cache.table.shape
    kv_heads = cache.layers[0].keys.shape[1]
    if selection.refresh == 1:
        return ()
    whole = lambda *shape: jnp.zeros((rows, *shape), jnp.int32)
    blank = lambda: PageLists(
        whole(kv_heads, most), whole(kv_heads), whole(), jnp.zeros((rows, kv_heads), jnp.float32)
    )
    return tuple(blank() for _ in range(selection.groups(len(cache.layers))))


def information(kind: Information, layer: Layer, cache: Cache, length: jax.Array) -> jax.Array:
    """The weight of every page, float32 `[pages + 1, kv_heads]`, beside its mass."""
    kv_heads = layer.value_norm.shape[1]
    if kind == "value":
        return layer.value_norm
    if kind == "mass":
        return jnp.ones_like(layer.value_norm)
    size = cache.page_size
    page = jnp.arange(cache.table.shape[1])
    filled = jnp.clip(length[:, None] - page * size, 0, size)  # [rows, pages]
    real = filled > 0
    many = jnp.maximum(filled, 1).astype(jnp.float32)
    if kind == "surprisal":
        if cache.surprisal is None:
            raise ValueError("information is 'surprisal'; accepted with a cache allocated to keep it")
        mean = jnp.where(real, cache.surprisal[cache.table], 0.0) / many
        weight = jnp.broadcast_to(mean[..., None], (*mean.shape, kv_heads))
    else:
        if layer.value_sum is None or layer.value_square is None:
            raise ValueError("information is 'mahalanobis'; accepted with a cache allocated to keep it")
        total, square = (
            jnp.where(real[..., None, None], x[cache.table], 0.0)
            for x in (layer.value_sum, layer.value_square)
        )
        count = jnp.maximum(filled.sum(1), 1).astype(jnp.float32)[:, None, None]
        mean = (total.sum(1) / count)[:, None]
        variance = jnp.maximum((square.sum(1) / count)[:, None] - mean**2, 1e-6)
        many = many[..., None, None]
        weight = ((square / many - 2 * mean * total / many + mean**2) / variance).mean(-1)
    # From rows and their pages back to the pool; unowned pages keep 0.
    blank = jnp.zeros_like(layer.value_norm)
    return blank.at[cache.table].set(jnp.where(real[..., None], jnp.maximum(weight, 0.0), 0.0))


class PageReader:
    """Reads the pages of one step, layer after layer, and keeps account; it lives while a step is traced."""

    def __init__(
        self,
        selection: Selection,
        cache: Cache,
        dropped_mass_limit: jax.Array,
        lists: tuple[PageLists, ...],
        renew: jax.Array,
    ) -> None:
        self.selection, self.cache, self.dropped_mass_limit, self.renew = (
            selection,
            cache,
            dropped_mass_limit,
            renew,
        )
        self.lists: list[Any] = list(lists)
        self.readings: list[ReadStats] = []

    def read(self, layer: Layer, q: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
        """Attention of scaled q `[rows, kv_heads, group, head_dim]` to chosen pages before `last`."""
        number = len(self.readings) - self.selection.dense_layers
        if number < 0:
            self.readings.append(dense_reading(layer, first, last))
            return paged_attention.decode(
                q, layer.keys, layer.values, self.cache.table, None, None, first, last
            ).out
        dropped_mass_limit = self.dropped_mass_limit
        if number == 0 and self.selection.first_layer_scale != 1:
            dropped_mass_limit = jnp.minimum(
                self.selection.first_layer_scale * dropped_mass_limit, MOST_OF_IT
            )
        if self.selection.softness > 0:
            return self._read_softly(layer, q, dropped_mass_limit, first, last)
        group, leads = divmod(number, self.selection.share)
        choice, bounded = self._choose(layer, q, dropped_mass_limit, last, group, not leads)
        part = paged_attention.decode(
            q, layer.keys, layer.values, self.cache.table, choice.page_list, choice.num_pages, first, last
        )
        self.readings.append(self._account(layer, choice, part, bounded, last))
        return part.out

    def _choose(
        self,
        layer: Layer,
        q: jax.Array,
        dropped_mass_limit: jax.Array,
        last: jax.Array,
        group: int,
        leads: bool,
    ) -> tuple[Any, jax.Array]:
        """The choice for a layer, and whether its bound on what it leaves out is for this very query."""
        selection, cache, size = self.selection, self.cache, self.cache.page_size

        def anew() -> PageChoice:
            summary = PageSummary(layer.key_min, layer.key_max, layer.key_sum)
            weight = information(selection.information, layer, cache, last)
            table = cache.table
            given = jax.lax.stop_gradient((q, summary, weight, table, last, dropped_mass_limit))
            return paged_attention.select_pages(*given, size, selection.rules)

        if not leads:
            return self.lists[group], jnp.zeros(last.shape, bool)
        if selection.refresh == 1:
            choice = anew()
            if group == len(self.lists):
                self.lists.append(choice)
            return choice, jnp.ones(last.shape, bool)
        old: PageLists = self.lists[group]
        pages = -(-last // size)

        def keep() -> PageChoice:
            # Pages that have begun since are appended.
            entry = jnp.arange(old.page_list.shape[2])
            beyond = old.row_pages[:, None, None] + entry - old.num_pages[..., None]
            count = old.num_pages + (pages - old.row_pages)[:, None]
            index = jnp.where(entry < old.num_pages[..., None], old.page_list, beyond)
            index = jnp.where(entry < count[..., None], index, 0)
            bound = jnp.full(q.shape[:3], jnp.inf, jnp.float32)
            return PageChoice(index.astype(jnp.int32), count.astype(jnp.int32), old.dropped_mass, bound)

        choice = jax.lax.cond(self.renew.any(), lambda: choose_rows(self.renew, anew(), keep()), keep)
        self.lists[group] = PageLists(
            choice.page_list, choice.num_pages, pages.astype(jnp.int32), choice.dropped_mass
        )
        return choice, self.renew

    def _read_softly(
        self, layer: Layer, q: jax.Array, dropped_mass_limit: jax.Array, first: jax.Array, last: jax.Array
    ) -> jax.Array:
        selection, size, table = self.selection, self.cache.page_size, self.cache.table
        summary = PageSummary(layer.key_min, layer.key_max, layer.key_sum)
        weight = information(selection.information, layer, self.cache, last)
        known = estimate_pages(q, summary, weight, table, last, size, selection.rules)
        gate = page_gates(known.weight, known.always_kept, dropped_mass_limit, selection.softness)
        gate = jnp.where((dropped_mass_limit > 0)[:, None, None], gate, 1.0)
        filled = jnp.clip(last[:, None] - jnp.arange(table.shape[1]) * size, 0, size)[:, None].astype(
            jnp.float32
        )
        held = (last * gate.shape[1]).astype(jnp.float32)
        dropped = (known.mass * (1 - gate)).sum(-1).mean(-1)
        norm = jnp.where(known.in_use, layer.value_norm[table].swapaxes(1, 2), 0.0).max((1, 2))
        self.readings.append(ReadStats((gate * filled).sum((1, 2)), held, dropped, 2 * norm))
        return decode_gathered(q, layer.keys, layer.values, table, None, None, first, last, gate).out

    def _account(
        self, layer: Layer, choice: Any, part: PartialAttention, bounded: jax.Array, last: jax.Array
    ) -> ReadStats:
        size = self.cache.page_size
        pages = -(-last // size)[:, None]
        # All listed pages are full but the newest, which is always listed.
        slack = jnp.where(pages > 0, pages * size - last[:, None], 0)
        positions = jnp.maximum(choice.num_pages * size - slack, 0).sum(1).astype(jnp.float32)
        held = (last * choice.num_pages.shape[1]).astype(jnp.float32)
        left_out = (choice.num_pages < pages)[..., None]
        # Three vectors a page, of float32; `bounded` says that this layer has just chosen.
        worth = (
            3 * 4 / (2 * bytes_per_number(layer.keys.dtype, layer.keys.shape[-1])) * choice.num_pages.shape[1]
        )
        rules = self.selection.rules
        looked = (
            bounded
            & (self.dropped_mass_limit > 0)
            & (pages[:, 0] > max(rules.min_pages, rules.sink_pages + rules.recent_pages))
        )
        summaries = jnp.where(looked, worth * pages[:, 0].astype(jnp.float32), 0.0)
        page = jnp.arange(self.cache.table.shape[1])
        norm = jnp.where((page < pages)[..., None], layer.value_norm[self.cache.table], 0.0).max(1)
        bound = getattr(choice, "log_bound", None)
        if bound is None:
            share = jnp.ones_like(part.log_sum_exp)
        else:
            share = jnp.where(bounded[:, None, None], jax.nn.sigmoid(bound - part.log_sum_exp), 1.0)
        share = jnp.where(left_out & (part.log_sum_exp > -jnp.inf), share, 0.0)
        return ReadStats(
            positions, held, choice.dropped_mass.mean(1), (2 * share.max(2) * norm).max(1), summaries
        )

    def memory(self) -> tuple[Any, ...]:
        """What the next step needs of the lists."""
        return tuple(self.lists) if self.selection.refresh > 1 else ()

    def total(self) -> ReadStats:
        """What the step read."""
        return altogether(self.readings)


def choose_rows(flag: jax.Array, new: PageChoice, old: PageChoice) -> PageChoice:
    """`new` in the flagged rows (bool `[rows]`), `old` in the others."""
    return jax.tree.map(lambda x, y: jnp.where(flag.reshape(-1, *(1,) * (x.ndim - 1)), x, y), new, old)


def altogether(readings: list[ReadStats]) -> ReadStats:
    """Of the layers of a step: positions summed, mass averaged, the largest certificate."""
    some = (x._replace(summaries=x.summaries + jnp.zeros_like(x.positions)) for x in readings)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *some)
    return ReadStats(
        stacked.positions.sum(0),
        stacked.held.sum(0),
        stacked.dropped.mean(0),
        stacked.certificate.max(0),
        stacked.summaries.sum(0),
    )


def dense_reading(layer: Layer, first: jax.Array, last: jax.Array) -> ReadStats:
    """Everything from `first` to `last` is read."""
    seen = (jnp.maximum(last - first, 0) * layer.keys.shape[1]).astype(jnp.float32)
    return ReadStats(seen, seen, jnp.zeros_like(seen), jnp.zeros_like(seen))


def dense_step(shape: ModelShape, span: Any) -> ReadStats:
    """What a step reads that leaves nothing out: every page of every active row.

    `span` (`attend.TokenSpan`) says where the tokens stand, before they are written.
    """
    positions = (
        jnp.where(span.num_tokens > 0, span.start + span.num_tokens, 0) * shape.kv_heads * shape.layers
    )
    positions = positions.astype(jnp.float32)
    zero = jnp.zeros_like(positions)
    return ReadStats(positions, positions, dropped=zero, certificate=zero)
