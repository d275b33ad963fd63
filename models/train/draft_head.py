"""Train a draft head for a model: `python -m entropic_jax.models.train.draft_head --text DIR --output DIR`.

The head learns the model's own distributions. At every position of a text, the next few tokens are drafted
from the model's hidden state and the text's tokens, and the cost is KL(model ‖ draft), summed over the drafts
with weights 1, γ, γ², … The first draft reads the model's hidden state, each later one the head's own, as in
decoding. Files that are held out say how often drafts are accepted, by their entropy; the head's directory
keeps that.

The same command goes on from the head in `--output`, if there is one. What every round of training cost and
reached is kept beside it, in `training.json`.
"""

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .. import draft_head, draft_head_files
from ..config import ModelError
from ..decoder import Params
from ..model import load
from . import corpus, history
from .head_forward import (
    OBJECTIVES,
    Target,
    Taught,
    draft_cost,
    drafted_features,
    in_product_dtype,
    teach,
)

SKIPPED = 8  # positions at the start of a window, where the head has next to nothing to read
LATER = 0.7  # γ
EDGES = (0.3, 1.5, 2.7)  # nats, between the bins of the table of acceptance
HELD_OUT_BATCHES = 8
KEPT = 24  # batches for which the model runs before the head learns from them
RECENT = 50  # steps whose mean cost is recorded
RECORD = "training.json"


def make_step(
    head: draft_head.DraftHead, rule: optax.GradientTransformation, depth: int, objective: str = "divergence"
) -> Any:
    """The update of weights and optimiser by a batch of windows; also returns the cost of a draft.

    Args:
        head: the head's functions.
        rule: the optimiser.
        depth: drafts from every position.
        objective: what a draft costs, see `head_forward.draft_cost`.

    Returns:
        `step(weights, optimiser state, parameters of the model, tokens [rows, n], Taught)`.
    """

    def cost(weights: Params, params: Params, tokens: jax.Array, taught: Taught) -> jax.Array:
        target, (rows, n) = Target(head.target, params), tokens.shape
        total, hidden = jnp.float32(0), taught.hidden.reshape(rows * n, -1)
        for number, drafted in enumerate(drafted_features(head, target, weights, tokens, taught, depth)):
            # Those of a shorter window stand where the model computed the same token.
            shifted = jnp.pad(drafted, ((0, 0), (number, 0), (0, 0))).reshape(hidden.shape)
            counted = jnp.broadcast_to(jnp.arange(n) >= SKIPPED + number, (rows, n)).astype(jnp.float32)
            of_drafts = draft_cost(
                target.decoder, objective, target.params, shifted, hidden, counted.reshape(-1)
            )
            total += LATER**number * of_drafts / counted.sum()
        return total / sum(LATER**number for number in range(depth))

    @jax.jit
    def step(weights: Params, state: Any, params: Params, tokens: jax.Array, taught: Taught) -> Any:
        mean_cost, gradient = jax.value_and_grad(cost)(weights, params, tokens, taught)
        updates, state = rule.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, mean_cost

    return step


def make_measure(head: draft_head.DraftHead, depth: int) -> Any:
    """Entropy of drafts, and how often the model draws the same token, on windows that were held out.

    At temperature 1, of two distributions with common noise at least (1 − d) / (1 + d) and about 1 − d, for
    their total variation d; 1 − d is returned.

    Args:
        head: the head's functions.
        depth: drafts from every position.

    Returns:
        `measure(weights, parameters of the model, which tokens may be drafted, tokens [rows, n])`.
    """

    @jax.jit
    def measure(weights: Params, params: Params, drafted: jax.Array, tokens: jax.Array) -> Any:
        target = Target(head.target, params)
        taught = teach(target, head.layer, tokens)
        model = jax.nn.softmax(target.decoder.logits(params, taught.hidden))
        result = []
        for number, features in enumerate(drafted_features(head, target, weights, tokens, taught, depth)):
            logits = jnp.where(drafted, target.decoder.logits(params, features), -jnp.inf)
            logprobs = jax.nn.log_softmax(logits)
            probs = jnp.exp(logprobs)
            entropy = -jnp.where(probs > 0, probs * logprobs, 0.0).sum(-1)
            overlap = jnp.minimum(probs, model[:, number:]).sum(-1)
            result.append((entropy[:, SKIPPED:].reshape(-1), overlap[:, SKIPPED:].reshape(-1)))
        return result

    return measure


def acceptance_table(entropy: np.ndarray, overlap: np.ndarray) -> dict[str, Any]:
    """Fields of a `HeadConfig`: P(accepted) by the entropy of the draft, and its mean.

    Args:
        entropy: entropies of drafts, nats.
        overlap: P(accepted) of each.
    """
    places = np.searchsorted(EDGES, entropy)
    mean = float(np.clip(overlap.mean(), 0.01, 0.99))
    bins = [overlap[places == n] for n in range(len(EDGES) + 1)]
    table = [float(np.clip(x.mean(), 0.01, 0.99)) if len(x) else mean for x in bins]
    return {"entropy_edges": EDGES, "acceptance": tuple(table), "mean_acceptance": mean}


def windows(tokens: np.ndarray, rows: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """Batches of windows `[rows, length]` from random places of a stream of tokens.

    Args:
        tokens: the stream, longer than a window.
        rows: windows of a batch.
        length: tokens of a window.
        seed: the seed of the places.
    """
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(tokens) - length, rows)
        yield np.stack([tokens[start : start + length] for start in starts])


def streams(tokenizer: Any, text: Path, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the files of a folder, and of those of them that are held out.

    Args:
        tokenizer: the model's tokenizer.
        text: the folder.
        length: tokens of a window.

    Raises:
        ModelError: there is not enough text for a window of each.
    """
    documents, held_out, _ = corpus.collect_text(text)
    result = []
    for name, files in (("training", documents), ("held-out", held_out)):
        encoded = tokenizer.backend.encode_batch_fast([file.text for file in files])
        ids = [np.asarray(e.ids, np.int32) for e in encoded]
        tokens = np.concatenate(ids) if ids else np.zeros(0, np.int32)
        if len(tokens) <= length:
            raise ModelError(f"--text must hold more than {length} {name} tokens; {text} has {len(tokens)}")
        result.append(tokens)
    return result[0], result[1]


def lessons(
    target: Target, layer: int | None, batches: Iterator[np.ndarray], reuse: int, seed: int
) -> Iterator[tuple[jax.Array, Taught]]:
    """Batches with what the model computes for them, each of them several times, in random order.

    Args:
        target: the model.
        layer: whose keys and values the head reads, if any.
        batches: tokens `[rows, n]` of each.
        reuse: how often each batch is given.
        seed: the seed of the order.
    """
    random, taught = (
        np.random.default_rng((seed, 1)),
        jax.jit(lambda p, t: teach(target._replace(params=p), layer, t)),
    )
    while True:
        known = []
        for _ in range(KEPT):
            tokens = jnp.asarray(next(batches))
            known.append((tokens, taught(target.params, tokens)))
        for _ in range(reuse):
            for place in random.permutation(len(known)):
                yield known[place]


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    result = argparse.ArgumentParser(
        prog="python -m entropic_jax.models.train.draft_head", description=__doc__
    )
    result.add_argument("--model", type=Path, help="directory of the model; by default the embedded one")
    result.add_argument("--text", type=Path, required=True, help="folder of text to train on")
    result.add_argument("--output", type=Path, required=True, help="directory of the head")
    result.add_argument("--tokens", type=float, default=4e6, help="tokens to train on")
    result.add_argument("--rows", type=int, default=8, help="windows of a batch")
    result.add_argument("--length", type=int, default=512, help="tokens of a window")
    result.add_argument(
        "--drafted-tokens", type=int, help="draft only so many tokens, the most common ones of the text (all)"
    )
    result.add_argument("--depth", type=int, default=2, help="drafts from every position")
    layer = lambda text: None if text == "none" else int(text)
    result.add_argument(
        "--layer", type=layer, default=-1, help="layer whose keys it reads, or none (-1: the last full one)"
    )
    result.add_argument("--intermediate-size", type=int, help="by default three times the hidden size")
    result.add_argument("--learning-rate", type=float, default=0.1)
    result.add_argument(
        "--objective",
        choices=tuple(OBJECTIVES),
        default="divergence",
        help="cost of a draft: its divergence from the model, or how often it is rejected",
    )
    result.add_argument("--reuse", type=int, default=3, help="steps on every window")
    result.add_argument("--minutes", type=float, default=math.inf, help="write the head and stop after this")
    result.add_argument("--seed", type=int, default=0)
    return result


def main() -> None:
    command = parser()
    arguments = command.parse_args()
    try:
        train(arguments)
    except (ValueError, OSError) as error:
        command.error(str(error))


def train(arguments: argparse.Namespace) -> draft_head.HeadConfig:
    """Train a head as the arguments say, and write it."""
    model = load(arguments.model)
    if model.tokenizer is None:
        raise ModelError("--model must be a directory with a tokenizer")
    training, held_out = streams(model.tokenizer, arguments.text, arguments.length)
    head, weights = _first_weights(arguments, Target(model.decoder, model.params))
    steps = max(1, round(arguments.tokens / (arguments.rows * arguments.length)))
    schedule = optax.warmup_cosine_decay_schedule(0, arguments.learning_rate, max(1, steps // 40), steps + 2)
    rule = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(schedule, adam_learning_rate=lambda s: 0.1 * schedule(s), weight_decay=0.01),
    )
    state, step = rule.init(weights), make_step(head, rule, arguments.depth, arguments.objective)
    batches = windows(training, arguments.rows, arguments.length, arguments.seed)
    target = Target(model.decoder, in_product_dtype(model.params))
    taught = lessons(target, head.layer, batches, arguments.reuse, arguments.seed)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    began, costs = time.monotonic(), []
    with Progress(*columns) as progress:
        bar = progress.add_task("training", total=steps)
        for _ in range(steps):
            weights, state, of_step = step(weights, state, target.params, *next(taught))
            costs.append(float(of_step))
            progress.update(bar, advance=1, description=f"{arguments.objective} {costs[-1]:.3f}")
            if time.monotonic() - began > 60 * arguments.minutes:
                break
    common = None
    if (number := arguments.drafted_tokens) is not None:
        common = most_common(training, min(number, head.config.vocab_size), head.config.vocab_size)
    drafted = jnp.ones(head.config.vocab_size, bool)
    drafted = drafted if common is None else jnp.zeros_like(drafted).at[common].set(True)
    measure, results = make_measure(head, arguments.depth), []
    batches = windows(held_out, arguments.rows, arguments.length, 0)
    for _ in range(HELD_OUT_BATCHES):
        results.append(jax.device_get(measure(weights, model.params, drafted, jnp.asarray(next(batches)))))
    accepted = [float(np.mean([r[number][1].mean() for r in results])) for number in range(arguments.depth)]
    for number, overlap in enumerate(accepted):
        print(f"draft {number + 1}: accepted with probability {overlap:.3f}")
    entropy, overlap = (np.concatenate([d[i] for r in results for d in r]) for i in (0, 1))
    config = dataclasses.replace(head.config, **acceptance_table(entropy, overlap))
    head = dataclasses.replace(head, config=config)
    draft_head_files.save(arguments.output, *draft_head.with_list(head, weights, common))
    done = len(costs) * arguments.rows * arguments.length
    cost = {"objective": arguments.objective, "cost": float(np.mean(costs[-RECENT:]))}
    _add_round(arguments.output, {**history.stamp(), "tokens": done, **cost, "accepted": accepted})
    return config


def most_common(tokens: np.ndarray, number: int, vocabulary: int) -> np.ndarray:
    """The tokens that occur most often, ascending.

    Args:
        tokens: the text.
        number: how many of them.
        vocabulary: number of tokens of the model.

    >>> most_common(np.array([3, 1, 1, 0, 3]), 2, 5).tolist()
    [1, 3]
    """
    counts = np.bincount(tokens, minlength=vocabulary)
    return np.sort(np.argsort(-counts, kind="stable")[:number]).astype(np.int32)


def _add_round(folder: Path, entry: dict[str, Any]) -> None:
    """Add a round to the record of the training, `training.json`.

    Args:
        folder: the directory of the head.
        entry: tokens, the cost of the last steps, and P(accepted) of each draft.
    """
    file = folder / RECORD
    rounds = json.loads(file.read_text("utf-8")) if file.exists() else []
    file.write_text(json.dumps([*rounds, entry], indent=1) + "\n", "utf-8")


def _first_weights(arguments: argparse.Namespace, target: Target) -> tuple[draft_head.DraftHead, Params]:
    """The head in the output directory, or a new one.

    Args:
        arguments: the parsed command line.
        target: the model.
    """
    if draft_head_files.is_draft_head(arguments.output):
        head, weights = draft_head_files.load(arguments.output, target.decoder)
        head, weights = draft_head.with_list(head, weights, None)
        return head, jax.tree.map(lambda x: x.astype(jnp.float32), weights)
    shape, layer = target.decoder.shape, arguments.layer
    layer = draft_head.last_full_layer(target.decoder.config) if layer == -1 else layer
    draft_head.attention_of(target.decoder.config, layer)
    inner = arguments.intermediate_size or 3 * shape.hidden
    # It sees no more positions than in training: more cost time, and no draft is known to gain by them.
    sizes = shape.hidden, shape.vocabulary, shape.layers, layer, inner
    config = draft_head.HeadConfig(*sizes, window=None if layer is None else arguments.length)
    head = draft_head.DraftHead(target.decoder, config)
    return head, draft_head.initialise(head, target.params, arguments.seed)


if __name__ == "__main__":
    main()
