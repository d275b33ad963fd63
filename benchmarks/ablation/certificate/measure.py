"""Bounds of the dropped mass and of the change of the output, beside both, for every head of every step.

All bounds are sound. They differ in what is known of the pages that a step leaves unread.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax import loop
from entropic_jax.analysis import ablation, studies
from entropic_jax.attention.page_reader import LayerPages, PageReader
from entropic_jax.attention.page_selection import Selection, StepSelection
from entropic_jax.pallas.paged_attention import PartialAttention
from entropic_jax.serving.options.model import EMBEDDED
from entropic_jax.state.cache import Cache, Layer, ModelShape

from ...harness.held_out_text import module_texts
from ..workload import load_workload

PRESET = "meso-lossy"
CONTEXTS, TEXTS, STEPS, SEED = (2048, 7936), 6, 32, 23
ROUNDING = 1e-5  # of an output, relative to the largest ‖v‖: float32, two orders of summation
PART = 4  # positions of a part of a page that has a box of its own
SCORED = {"1/16 scored": 1 / 16, "1/4 scored": 1 / 4, "1/2 scored": 1 / 2, "3/4 scored": 3 / 4}
BOUNDS = ("as shipped", "ball", "boxes of 4 positions", "exact maxima", *SCORED)
FIELDS = ("dropped", "change", "shipped change", "unread", *BOUNDS, *(f"change, {name}" for name in BOUNDS))


class BoundReader(PageReader):
    """`PageReader` that also measures the true dropped mass and every bound.

    Args:
        chooser: as in `PageReader`.
        cache: as in `PageReader`.
    """

    def __init__(self, chooser: StepSelection, cache: Cache) -> None:
        super().__init__(chooser, cache)
        self.measured: list[jax.Array] = []

    def read_partial(
        self, layer: Layer, q: jax.Array, first: jax.Array, last: jax.Array, soft_cap: float | None = None
    ) -> PartialAttention:
        """See `PageReader`; the pages are chosen twice, by the same rule."""
        pages = self.chooser.choose(len(self.layer_stats), layer, q, last)
        assert isinstance(pages, LayerPages)
        part = super().read_partial(layer, q, first, last, soft_cap)
        values = bounds(layer, self.cache.table, self.cache.page_size, pages, q, part, last)
        self.measured.append(jnp.stack([values[name] for name in FIELDS], -1))
        return part

    def memory(self) -> tuple[jax.Array, ...]:
        """The measurements of each layer, `[rows, kv_heads, group, fields]`."""
        return tuple(self.measured)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class BoundSelection(Selection):
    """`Selection` whose state is the measurements of the last step."""

    group: int = 1  # query heads of a KV head

    def memory(self, shape: ModelShape, cache: Cache) -> Any:
        """See `PagePolicy`."""
        blank = (cache.table.shape[0], shape.kv_heads, self.group, len(FIELDS))
        return tuple(jnp.zeros(blank) for _ in range(shape.layers))

    def reader(
        self, cache: Cache, dropped_mass_limit: jax.Array, memory: Any, tokens: jax.Array
    ) -> BoundReader:
        """See `PagePolicy`."""
        renew = tokens % self.refresh == 0
        return BoundReader(StepSelection(self, cache, dropped_mass_limit, (), renew), cache)


def bounds(
    layer: Layer,
    table: jax.Array,
    size: int,
    pages: LayerPages,
    q: jax.Array,
    part: PartialAttention,
    last: jax.Array,
) -> dict[str, jax.Array]:
    """Every field of `FIELDS`, float32 `[rows, kv_heads, group]`.

    Args:
        layer: keys and values.
        table: int32 `[rows, pages]`, the page table.
        size: positions of a page.
        pages: the pages that the step read.
        q: scaled queries, `[rows, kv_heads, group, head_dim]`.
        part: the attention to the pages read.
        last: int32 `[rows]`, end of the positions held.
    """
    most = table.shape[1]
    held = (jnp.arange(most * size) < last[:, None]).reshape(-1, 1, most, size)
    keys, values = (
        jnp.where(held[..., None], x[table].swapaxes(1, 2), 0.0) for x in (layer.keys, layer.values)
    )
    scores = jnp.where(held[:, :, None], jnp.einsum("rkgd,rkpsd->rkgps", q, keys), -jnp.inf)
    exact = jax.nn.logsumexp(scores, -1)
    filled = held.sum(-1).astype(jnp.float32)  # [rows, 1, pages]
    listed = jax.nn.one_hot(pages.page_list, most, dtype=bool)
    counted = jnp.arange(pages.page_list.shape[-1]) < pages.num_pages[..., None]
    out = (filled > 0) & ~(listed & counted[..., None]).any(2)  # [rows, kv_heads, pages]
    norm = jnp.where(held, jnp.linalg.norm(values, axis=-1), 0.0).max(-1)[:, :, None]
    read = part.log_sum_exp
    log_filled = jnp.log(jnp.maximum(filled, 1.0))[:, :, None]
    known = {
        "as shipped": box(q, keys, held, size),
        "ball": ball(q, keys, held) + log_filled,
        "boxes of 4 positions": box(q, keys, held, PART),
        "exact maxima": scores.max(-1) + log_filled,
    }
    for name, part_scored in SCORED.items():
        worth = jnp.where(out, jax.nn.logsumexp(known["as shipped"] - read[..., None], 2), -jnp.inf)
        rank = jnp.argsort(jnp.argsort(-worth, -1), -1)
        scored = out & (rank < jnp.ceil(part_scored * out.sum(-1, keepdims=True)))
        known[name] = jnp.where(scored[:, :, None], exact, known["as shipped"])
    unread = out[:, :, None]
    total = lambda bound: jax.nn.logsumexp(jnp.where(unread, bound, -jnp.inf), -1)
    dropped = jax.nn.sigmoid(total(exact) - read)
    weights = jax.nn.softmax(scores.reshape(*scores.shape[:3], -1), -1).reshape(scores.shape)
    change = jnp.linalg.norm(jnp.einsum("rkgps,rkpsd->rkgd", weights, values) - part.out, axis=-1)
    measured = {"dropped": dropped, "change": change, "unread": unread.any(-1) & (read > -jnp.inf)}
    for name, bound in known.items():
        limit = jax.nn.sigmoid(total(bound) - read)
        measured[name] = limit
        mass = jnp.where(unread, jnp.exp(jnp.minimum(bound - read[..., None], 80.0)), 0.0)
        measured[f"change, {name}"] = largest_change(
            mass, norm + jnp.linalg.norm(part.out, axis=-1)[..., None]
        )
    measured["shipped change"] = 2 * measured["as shipped"] * norm.max(-1)
    return {name: x.astype(jnp.float32) for name, x in measured.items()}


def largest_change(mass: jax.Array, norm: jax.Array) -> jax.Array:
    """The largest Σ m_b n_b / (1 + Σ m_b) over 0 ≤ m_b ≤ `mass`, by Dinkelbach's iteration.

    Args:
        mass: bounds of the mass of each page, relative to what was read, `[…, pages]`.
        norm: how far a page can move the output, `[…, pages]`.
    """
    value = jnp.zeros(mass.shape[:-1])
    for _ in range(8):
        used = jnp.where(norm > value[..., None], mass, 0.0)
        value = jnp.maximum(value, (used * norm).sum(-1) / (1 + used.sum(-1)))  # rounding may lower it
    return value


def box(q: jax.Array, keys: jax.Array, held: jax.Array, part: int) -> jax.Array:
    """Bound of the log-sum-exp of each page from the smallest and largest keys of its parts.

    Args:
        q: `[rows, kv_heads, group, head_dim]`.
        keys: `[rows, kv_heads, pages, positions, head_dim]`.
        held: bool `[rows, 1, pages, positions]`.
        part: positions of a part.
    """
    rows, kv_heads, pages, size, head_dim = keys.shape
    keys = keys.reshape(rows, kv_heads, pages, size // part, part, head_dim)
    held = held.reshape(rows, 1, pages, size // part, part)
    high = jnp.where(held[..., None], keys, -jnp.inf).max(4)
    low = jnp.where(held[..., None], keys, jnp.inf).min(4)
    any_held = held.any(-1)
    high, low = (jnp.where(any_held[..., None], x, 0.0) for x in (high, low))
    top = jnp.einsum("rkgd,rkpcd->rkgpc", jnp.maximum(q, 0), high)
    top += jnp.einsum("rkgd,rkpcd->rkgpc", jnp.minimum(q, 0), low)
    log_count = jnp.log(jnp.maximum(held.sum(-1), 1).astype(jnp.float32))[:, :, None]
    return jax.nn.logsumexp(jnp.where(any_held[:, :, None], top + log_count, -jnp.inf), -1)


def ball(q: jax.Array, keys: jax.Array, held: jax.Array) -> jax.Array:
    """Bound of the largest score of each page, q·k̄ + ‖q‖ max‖k − k̄‖; arguments as for `box`."""
    count = jnp.maximum(held.sum(-1), 1).astype(jnp.float32)[..., None]
    mean = jnp.where(held[..., None], keys, 0.0).sum(3) / count
    radius = jnp.where(held, jnp.linalg.norm(keys - mean[:, :, :, None], axis=-1), 0.0).max(-1)
    return (
        jnp.einsum("rkgd,rkpd->rkgp", q, mean) + jnp.linalg.norm(q, axis=-1)[..., None] * radius[:, :, None]
    )


def measure(quick: bool) -> dict[str, Any]:
    """The measurements of every context, summarised: see `summary`."""
    workload = load_workload(EMBEDDED, module_texts(longer_than=2000))
    contexts, texts, steps = ((1024,), 2, 8) if quick else (CONTEXTS, TEXTS, STEPS)
    cells = {str(n): summary(measure_context(workload, n, texts, steps)) for n in contexts}
    return {"texts": texts, "steps": steps, "contexts": cells}


def measure_context(workload: studies.Workload, context: int, texts: int, steps: int) -> np.ndarray:
    """All heads that left pages unread while the last tokens of a context were read one by one.

    Args:
        workload: model and held-out text.
        context: tokens of each text before the steps.
        texts: how many texts.
        steps: tokens after them.

    Returns:
        `[samples, fields]`.
    """
    subject, setting = workload.subject, workload.preset(PRESET)
    windows = workload.windows(texts, context + steps, SEED)
    state = ablation.prefill(subject, [text[:context] for text in windows], steps + 1)
    shape = subject.decoder.shape
    shared = {x.name: getattr(setting.page_policy, x.name) for x in dataclasses.fields(Selection)}
    policy = BoundSelection(**shared, group=shape.heads // shape.kv_heads)
    state = studies.set_up(state, setting._replace(page_policy=policy))
    state = state._replace(page_policy_state=policy.memory(shape, state.cache))
    samples = []
    for step in range(steps):
        token = jnp.asarray([text[context + step : context + step + 1] for text in windows], jnp.int32)
        state, _ = loop.replay(subject.decoder, subject.params, setting.controller, state, token)
        samples += [np.asarray(x).reshape(-1, len(FIELDS)) for x in state.page_policy_state]
    stacked = np.concatenate(samples)
    return stacked[stacked[:, FIELDS.index("unread")] > 0]


def summary(samples: np.ndarray) -> dict[str, Any]:
    """Medians and quartiles of the dropped mass, of every bound and of its ratio to what it bounds.

    Args:
        samples: `[samples, fields]`, as `measure_context` returns them.
    """
    column = {name: samples[:, i].astype(float) for i, name in enumerate(FIELDS)}
    quartiles = lambda x: np.quantile(x, [0.25, 0.5, 0.75]).tolist()
    result: dict[str, Any] = {
        "heads": len(samples),
        "dropped": quartiles(column["dropped"]),
        "change": quartiles(column["change"]),
        "violations": 0,
        "largest_excess": -1.0,  # of the change over its bound, relative to the largest ‖v‖
        "bounds": {},
    }
    dropped, change = (np.maximum(column[name], 1e-6) for name in ("dropped", "change"))
    norm = column["shipped change"] / (2 * column["as shipped"])
    for name in BOUNDS:
        limit = column["shipped change"] if name == "as shipped" else column[f"change, {name}"]
        result["violations"] += int((column[name] < column["dropped"] * (1 - 1e-3) - 1e-6).sum())
        excess = column["change"] - limit
        result["violations"] += int((excess > 1e-3 * column["change"] + ROUNDING * norm).sum())
        result["largest_excess"] = max(result["largest_excess"], float((excess / norm).max()))
        result["bounds"][name] = {
            "bound": quartiles(column[name]),
            "ratio": quartiles(column[name] / dropped),
            "change ratio": quartiles(limit / change),
        }
    return result
