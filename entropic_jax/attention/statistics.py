"""Attention statistics of a step, computed only if a controller requests them.

The entropy of attention comes out of the same kernel that attends: with keys in the place of values it
returns k̄ = Σ p k, and

    H = −Σ p ln p = ln Σ exp s − Σ p s = log_sum − q·k̄

so that nothing is gathered and only valid positions count.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..pallas import paged_attention
from ..pallas.paged_attention.quantised import gather
from ..state import Focus
from ..state.cache import Cache, Layer


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Observation:
    """Which layers are observed, and how closely; static: another observation is another program.

    `layers` are numbers of layers, from the end where negative. The entropies are exact either way. Agreement
    and interaction are taken over pages, from their mean keys, or with `exact` over positions, which gathers
    the keys of the whole context. Everything that a row holds is observed, whatever a `Selection` leaves out.

    `padded` is the fault of the release of Entropix, for comparison: a cache of `padded` positions (or the
    row's own, if more) that holds zeros where nothing is written, all of them attended to, and in the place
    of agreement the mean distance of a head from the mean of all, which is disagreement.
    """

    layers: tuple[int, ...] = (-1,)
    exact: bool = False
    padded: int = 0

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers must name at least one layer; got ()")
        if self.padded < 0:
            raise ValueError(f"padded must be at least 0 (0 is off); got {self.padded}")

    def numbers(self, layers: int) -> set[int]:
        """The observed ones among `layers` layers."""
        wrong = [n for n in self.layers if not -layers <= n < layers]
        if wrong:
            raise ValueError(f"layers must be between {-layers} and {layers - 1}; got {wrong[0]}")
        return {n % layers for n in self.layers}


class Heads(NamedTuple):
    """One layer's attention; each `[rows, heads]` unless stated."""

    entropy: jax.Array
    attention_weights: jax.Array  # [rows, heads, places], of positions or pages: sum to 1
    strength: jax.Array  # mean |score|


class Observer:
    """Sees the attention of one step, layer after layer; it lives while a step is traced."""

    def __init__(self, observation: Observation, cache: Cache) -> None:
        self.observation, self.table = observation, cache.table
        self.observed_layers = observation.numbers(len(cache.layers))
        self.layer_stats: list[Focus | None] = []  # None for a layer that is not observed

    def see(self, layer: Layer, q: jax.Array, first: jax.Array, last: jax.Array) -> None:
        """Adds the statistics of the next layer, if it is observed.

        Args:
            layer: its keys and page summaries.
            q: scaled queries, `[rows, kv_heads, group, head_dim]`.
            first: int32 `[rows]`, first position that the query sees.
            last: int32 `[rows]`, end of the positions held.
        """
        if len(self.layer_stats) not in self.observed_layers:
            self.layer_stats.append(None)
            return
        table = layer.pages_of(self.table)
        positions = jnp.maximum(last - first, 0)
        most = jnp.log(jnp.maximum(positions, 1).astype(jnp.float32))
        if self.observation.padded:
            heads, padded = _released(layer, table, q, first, last, self.observation.padded)
            weights = heads.attention_weights
            distance = jnp.abs(weights - weights.mean(1, keepdims=True)).mean((1, 2))
            agreement, most = distance, jnp.full_like(most, jnp.log(padded))
        else:
            measure = _by_position if self.observation.exact else by_page
            heads = measure(layer, table, q, first, last)
            agreement = agree(heads.attention_weights)
        focus = Focus(heads.entropy.mean(1), heads.entropy.var(1), agreement, heads.strength.mean(1), most)
        self.layer_stats.append(jax.tree.map(lambda x: jnp.where(positions > 0, x, 0.0), focus))

    def layer_kind(self, number: int) -> bool:
        """See `layer_loop.LayerRecorder`: whether the layer is observed."""
        return number in self.observed_layers

    def total(self) -> Focus:
        """The mean over the layers observed."""
        seen = [focus for focus in self.layer_stats if focus is not None]
        return jax.tree.map(lambda *x: jnp.stack(x).mean(0), *seen)


def agree(weights: jax.Array) -> jax.Array:
    """How alike the heads attend, in [0, 1], from `[rows, heads, places]`.

        1 − (mean over heads of ½ Σ |a_h − ā|) / (1 − 1/H)

    The total variation to the mean of all heads is at most 1 − 1/H, where no two heads share a place.
    """
    heads = weights.shape[1]
    if heads == 1:
        return jnp.ones(weights.shape[:1], jnp.float32)
    distance = jnp.abs(weights - weights.mean(1, keepdims=True)).sum(-1).mean(1) / 2
    return jnp.clip(1 - distance / (1 - 1 / heads), 0.0, 1.0)


def attention_entropy(
    layer: Layer, table: jax.Array, q: jax.Array, first: jax.Array, last: jax.Array
) -> jax.Array:
    """Exact entropy over the positions in `[first, last)`, nats, float32 `[rows, heads]`.

    Args:
        layer: its keys.
        table: int32 `[rows, pages of a row]`, the page table.
        q: scaled queries, `[rows, kv_heads, group, head_dim]`.
        first: int32 `[rows]`, first position that the query sees.
        last: int32 `[rows]`, end of the positions held.
    """
    part = paged_attention.decode(q, layer.keys, layer.keys, table, None, None, first, last)
    mean = jnp.einsum("rkgd,rkgd->rkg", q, part.out, preferred_element_type=jnp.float32)
    entropy = jnp.where(part.log_sum_exp > -jnp.inf, part.log_sum_exp - mean, 0.0)
    return jnp.maximum(entropy, 0.0).reshape(entropy.shape[0], -1)


def by_page(layer: Layer, table: jax.Array, q: jax.Array, first: jax.Array, last: jax.Array) -> Heads:
    """Shares of pages by their mean keys; a page that a window cuts counts with what the window leaves.

    Args:
        layer: its keys and page summaries.
        table: int32 `[rows, pages of a row]`, the page table.
        q: scaled queries, `[rows, kv_heads, group, head_dim]`.
        first: int32 `[rows]`, first position that the query sees.
        last: int32 `[rows]`, end of the positions held.
    """
    size = layer.keys.shape[2]
    page = jnp.arange(table.shape[1]) * size
    held = jnp.clip(last[:, None] - page, 0, size).astype(jnp.float32)  # [rows, pages], the sums are of these
    seen = held - jnp.clip(first[:, None] - page, 0, size).astype(jnp.float32)
    real = (seen > 0)[:, None, None]
    total = jnp.where((held > 0)[:, :, None, None], layer.key_sum[table], 0.0)
    mean = total / jnp.maximum(held, 1.0)[:, :, None, None]
    score = jnp.einsum("rkgd,rpkd->rkgp", q.astype(jnp.float32), mean)
    weight = jnp.where(real, score + jnp.log(jnp.maximum(seen, 1.0))[:, None, None], -1e30)
    weights = jnp.where(real, jax.nn.softmax(weight, -1), 0.0)
    strength = (jnp.abs(score) * seen[:, None, None]).sum(-1) / jnp.maximum(seen.sum(-1), 1.0)[:, None, None]
    by_head = lambda x: x.reshape(x.shape[0], -1, *x.shape[3:])
    return Heads(attention_entropy(layer, table, q, first, last), by_head(weights), by_head(strength))


def _scores(
    layer: Layer, table: jax.Array, q: jax.Array, first: jax.Array, last: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Scores `[rows, heads, positions]` (0 where not seen), and which are seen, `[rows, 1, positions]`."""
    size = layer.keys.shape[2]
    position = jnp.arange(table.shape[1] * size)
    seen = ((position >= first[:, None]) & (position < last[:, None]))[:, None]
    keys = gather(layer.keys, table, jnp.float32).swapaxes(2, 3)
    keys = keys.reshape(keys.shape[0], -1, *keys.shape[3:])  # [rows, positions, kv_heads, head_dim]
    keys = jnp.where(seen[:, 0, :, None, None], keys, 0.0)
    score = jnp.einsum("rkgd,rpkd->rkgp", q.astype(jnp.float32), keys)
    return score.reshape(score.shape[0], -1, score.shape[-1]), seen


def _by_position(layer: Layer, table: jax.Array, q: jax.Array, first: jax.Array, last: jax.Array) -> Heads:
    """Attention weights of positions, from all scores."""
    score, seen = _scores(layer, table, q, first, last)
    weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen, score, -1e30), -1), 0.0)
    strength = jnp.abs(score).sum(-1) / jnp.maximum(seen.sum(-1), 1).astype(jnp.float32)
    return Heads(attention_entropy(layer, table, q, first, last), weights, strength)


def _released(
    layer: Layer, table: jax.Array, q: jax.Array, first: jax.Array, last: jax.Array, padded: int
) -> tuple[Heads, int]:
    """Like `_by_position`, over a cache padded with zeros whose empty positions are attended to; its size."""
    score, _ = _scores(layer, table, q, first, last)
    padded = max(padded, score.shape[-1])
    score = jnp.pad(score, ((0, 0), (0, 0), (0, padded - score.shape[-1])))
    log_weights = jax.nn.log_softmax(score, -1)
    weights = jnp.exp(log_weights)
    return Heads(-(weights * log_weights).sum(-1), weights, jnp.abs(score).mean(-1)), padded
