"""Gains of one more expert: reductions of the output's entropy and loss, and regressions that predict them.

A layer is given n experts, all others as many as the router chooses, and n goes from one to the most. The
difference between n and n + 1 is what the expert of rank n + 1 brings to the same token. What later tokens
gain from it is not counted.
"""

import itertools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax.methods.expert_selection import features

ROWS = 8  # files of a pass
ROUTER = np.array([True, True, True, False, True, False])  # features without the entropy of the token before


class Pass(NamedTuple):
    """Measurements of a pass over texts."""

    entropy: np.ndarray  # [files, tokens], of the output, nats
    loss: np.ndarray  # [files, tokens], of the token that follows, nats
    probability: np.ndarray  # [layers, files, tokens, experts], of the routers


class Gains(NamedTuple):
    """Features and gains of each further expert in each layer."""

    features: np.ndarray  # [layers, ranks, cases, 6]
    entropy: np.ndarray  # [layers, ranks, cases], reduction of the output's entropy, nats
    loss: np.ndarray  # [layers, ranks, cases], reduction of the loss, nats
    output_entropy: np.ndarray  # [cases], of the token itself, with all experts


class LimitOneLayer:
    """Reads n experts in one layer and all in the others; keeps the probabilities of the routers.

    Args:
        layer: the number of the layer among those with experts; traced.
        count: n; traced.
    """

    def __init__(self, layer: jax.Array, count: jax.Array) -> None:
        self.layer, self.count = layer, count
        self.probability: list[jax.Array] = []

    def __call__(self, probability: jax.Array, most: int) -> jax.Array:
        count = jnp.where(self.layer == len(self.probability), self.count, most)
        self.probability.append(probability)
        return jnp.broadcast_to(count, probability.shape[:1]).astype(jnp.int32)


def attend(query: Any, key: Any, value: Any, cache: Any, /, *, window: Any = None) -> tuple[jax.Array, Any]:
    """Dense causal attention to the tokens of the pass."""
    rows, length, heads, dim = query.shape
    grouped = query.reshape(rows, length, key.shape[2], -1, dim)
    scores = jnp.einsum("rqhgd,rkhd->rhgqk", grouped, key) * dim**-0.5
    position = jnp.arange(length)
    seen = position[:, None] >= position
    if window is not None:
        seen &= position[:, None] < position + window
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
    return jnp.einsum("rhgqk,rkhd->rqhgd", weights, value).reshape(query.shape), cache


@partial(jax.jit, static_argnums=0)
def one_pass(
    decoder: Any, params: Any, tokens: jax.Array, layer: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Entropies and losses `[rows, time]`, and router probabilities `[layers, rows, time, experts]`.

    Args:
        decoder: the functions of the model; static.
        params: its parameters.
        tokens: int32 `[rows, time + 1]`.
        layer: the number of the layer whose experts are limited; −1 limits none.
        count: the number of experts that it reads.
    """
    reader, inputs = LimitOneLayer(layer, count), tokens[:, :-1]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
    caches = (None,) * decoder.shape.layers
    hidden, _ = decoder.hidden(params, inputs, positions, caches, attend, expert_reader=reader)

    def of_row(pair):
        states, targets = pair
        log_p = jax.nn.log_softmax(decoder.logits(params, states), -1)
        loss = -jnp.take_along_axis(log_p, targets[:, None], -1)[:, 0]
        return -(jnp.exp(log_p) * log_p).sum(-1), loss

    entropy, loss = jax.lax.map(of_row, (hidden, tokens[:, 1:]))
    return entropy, loss, jnp.stack([p.reshape(*inputs.shape, -1) for p in reader.probability])


def passes(model: Any, tokens: np.ndarray, layer: int, count: int) -> Pass:
    """A pass over all texts.

    Args:
        model: the mixture.
        tokens: int32 `[files, time + 1]`.
        layer: the number of the layer whose experts are limited; −1 limits none.
        count: the number of experts that it reads.
    """
    parts = []
    for first in range(0, len(tokens), ROWS):
        rows = tokens[first : first + ROWS]
        padded = np.concatenate([rows, np.zeros((ROWS - len(rows), rows.shape[1]), np.int32)])
        limit = jnp.int32(layer), jnp.int32(count)
        entropy, loss, p = map(np.asarray, one_pass(model.decoder, model.params, jnp.asarray(padded), *limit))
        parts.append((entropy[: len(rows)], loss[: len(rows)], p[:, : len(rows)]))
    entropy, loss, probability = zip(*parts, strict=True)
    return Pass(np.concatenate(entropy), np.concatenate(loss), np.concatenate(probability, 1))


def measure(model: Any, tokens: np.ndarray) -> Gains:
    """Measures the gains of every further expert of every layer on the tokens of texts, except their first.

    Args:
        model: the mixture.
        tokens: int32 `[files, time + 1]`.
    """
    most = model.config.num_experts_per_tok
    every = passes(model, tokens, -1, most)
    layers = len(every.probability)
    cases = lambda x: x[:, 1:].reshape(-1)
    previous = every.entropy[:, :-1].reshape(-1)
    inputs, entropies, losses = [], [], []
    for layer in range(layers):
        limited = [passes(model, tokens, layer, n) for n in range(1, most)] + [every]
        entropies.append([cases(a.entropy - b.entropy) for a, b in itertools.pairwise(limited)])
        losses.append([cases(a.loss - b.loss) for a, b in itertools.pairwise(limited)])
        probability = every.probability[layer][:, 1:].reshape(len(previous), -1)
        computed = features(jnp.asarray(probability), jnp.asarray(previous), most - 1)
        inputs.append(np.asarray(computed).swapaxes(0, 1))
    return Gains(np.stack(inputs), np.array(entropies), np.array(losses), cases(every.entropy))


def fit(gains: Gains, used: np.ndarray | None = None) -> np.ndarray:
    """Weights of the regression of reductions of entropy, float32 `[layers, ranks, 6]`, by least squares.

    Args:
        gains: measured on the texts to fit with.
        used: bool `[6]`, the features that are used; None for all. The others have weight 0.
    """
    layers, ranks, _, width = gains.features.shape
    used = np.ones(width, bool) if used is None else used
    weights = np.zeros((layers, ranks, width), np.float32)
    for layer in range(layers):
        for rank in range(ranks):
            x, y = gains.features[layer, rank][:, used].astype(float), gains.entropy[layer, rank]
            weights[layer, rank, used] = np.linalg.lstsq(x, y.astype(float), rcond=None)[0]
    return weights


def expected(gains: Gains, weights: np.ndarray) -> np.ndarray:
    """The reductions that a regression expects, `[layers, ranks, cases]`."""
    return np.einsum("lrcf,lrf->lrc", gains.features, weights)


def correlations(gains: Gains, weights: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Correlation of what the second expert brings with what may predict it, mean over layers.

    Args:
        gains: measured on texts that the regressions were not fitted with.
        weights: the regressions, by name.
    """
    layers = range(len(gains.features))
    predictors = {
        "weight of the expert, q": gains.features[:, 0, :, 1],
        "entropy of the router": gains.features[:, 0, :, 2],
        "entropy of the output, token before": gains.features[:, 0, :, 3],
        "entropy of the output, same token": np.stack([gains.output_entropy for _ in layers]),
        **{name: expected(gains, w)[:, 0] for name, w in weights.items()},
    }

    def mean(x: np.ndarray, y: np.ndarray) -> float:
        pairs = [(x[i], y[i]) for i in layers if np.ptp(x[i]) > 0 and np.ptp(y[i]) > 0]
        return float(np.mean([np.corrcoef(a, b)[0, 1] for a, b in pairs])) if pairs else float("nan")

    return {
        name: {
            "entropy": mean(values, gains.entropy[:, 0]),
            "|entropy|": mean(values, np.abs(gains.entropy[:, 0])),
            "loss": mean(values, gains.loss[:, 0]),
        }
        for name, values in predictors.items()
    }
