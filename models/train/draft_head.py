"""Train a draft head for a model: `python -m entropic_jax.models.train.draft_head --text DIR --output DIR`.

The head learns the model's own distributions. At every position of a text, the next few tokens are drafted
from the model's hidden state and the text's tokens, and the cost is KL(model ‖ draft), summed over the drafts
with weights 1, γ, γ², … The first draft reads the model's hidden state, each later one the head's own, as in
decoding. Files that are held out say how often drafts are accepted, by their entropy; the head's directory
keeps that.

The same command goes on from the head in `--output`, if there is one.
"""

import argparse
import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .. import draft_head
from ..config import ModelError
from ..decoder import Decoder, Params
from ..model import load
from . import corpus

SKIPPED = 8  # positions at the start of a window, where the head has next to nothing to read
LATER = 0.7  # γ
EDGES = (0.3, 1.5, 2.7)  # nats, between the bins of the table of acceptance
HELD_OUT_BATCHES = 8


class Target(NamedTuple):
    """A model whose head is trained."""

    decoder: Decoder
    params: Params


class Taught(NamedTuple):
    """What the model computes for a window, which the head reads and learns."""

    hidden: jax.Array  # [rows, n, hidden]
    keys: jax.Array  # [rows, n, kv_heads, head_dim], of the layer that the head reads
    values: jax.Array
    logprobs: jax.Array  # float32 [rows, n, vocabulary], of the token after each position


def dense_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, **options: Any
) -> jax.Array:
    """Attention of q `[rows, m, heads, head_dim]` to k and v `[rows, n, kv_heads, head_dim]`, as q.

    Args:
        q: the queries.
        k: the keys.
        v: the values.
        visible: bool `[m, n]`, the keys that each query sees.
        options: `soft_cap` and `sink` as in `attention.attend.read`.
    """
    rows, m, heads, size = q.shape
    grouped = q.reshape(rows, m, k.shape[2], -1, size)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, k, preferred_element_type=jnp.float32) / math.sqrt(size)
    if (cap := options.get("soft_cap")) is not None:
        scores = cap * jnp.tanh(scores / cap)
    scores = jnp.where(visible, scores, -1e30)
    if (sink := options.get("sink")) is not None:
        wide = sink.astype(jnp.float32).reshape(1, k.shape[2], -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(wide, (*scores.shape[:-1], 1))], -1)
    weights = jax.nn.softmax(scores, -1)[..., : k.shape[1]].astype(v.dtype)
    return jnp.einsum("bkgqs,bskd->bqkgd", weights, v).reshape(rows, m, heads, -1)


def teach(target: Target, layer: int, tokens: jax.Array) -> Taught:
    """Runs the model over windows of text, without a cache.

    Args:
        target: the model.
        layer: whose keys and values the head reads.
        tokens: int32 `[rows, n]`.
    """
    positions = jnp.arange(tokens.shape[1])

    def attend(q, k, v, _, *, window=None, chunk=None, **options):
        visible = positions[:, None] >= positions
        if window is not None:
            visible &= positions > positions[:, None] - window
        if chunk is not None:
            visible &= positions // chunk == positions[:, None] // chunk
        return dense_attention(q, k, v, visible, **options), (k, v)

    (decoder, params), layers = target, (None,) * target.decoder.shape.layers
    everywhere = jnp.broadcast_to(positions, tokens.shape)
    hidden, written = decoder.hidden(params, tokens, everywhere, layers, attend)
    keys, values = written[layer]
    return Taught(hidden, keys, values, jax.nn.log_softmax(decoder.logits(params, hidden)))


def drafts(
    head: draft_head.DraftHead, target: Target, weights: Params, tokens: jax.Array, taught: Taught, depth: int
) -> list[jax.Array]:
    """Log-probabilities of drafts of every position; the i-th array is of the i-th draft from each start.

    Args:
        head: the head's functions.
        target: the model.
        weights: the parameters of the head.
        tokens: int32 `[rows, n]`.
        taught: what the model computed for them.
        depth: drafts from every start.

    Returns:
        Arrays `[rows, n − i, vocabulary]`; entry `[r, s]` of the i-th is of the token after position s + i.
    """
    n, result = tokens.shape[1], []
    features = jnp.pad(taught.hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
    for number in range(depth):
        starts = jnp.arange(n - number)
        # A round that starts with the token at s reads the keys of the positions before it.
        visible = jnp.arange(n) < jnp.maximum(starts, 1)[:, None]

        def read(q, visible=visible):
            return dense_attention(q, taught.keys, taught.values, visible)

        positions = jnp.broadcast_to(starts + number, (len(tokens), n - number))
        features = head.hidden(
            target.params, weights, features[:, : n - number], tokens[:, number:], positions, read
        )
        result.append(jax.nn.log_softmax(target.decoder.logits(target.params, features)))
    return result


def make_step(head: draft_head.DraftHead, rule: optax.GradientTransformation, depth: int) -> Any:
    """The update of weights and optimiser by a batch of windows; also returns the cost in nats a draft.

    Args:
        head: the head's functions.
        rule: the optimiser.
        depth: drafts from every position.
    """

    def cost(weights: Params, params: Params, tokens: jax.Array) -> jax.Array:
        target = Target(head.target, params)
        taught = jax.lax.stop_gradient(teach(target, head.layer, tokens))
        total = jnp.float32(0)
        for number, drafted in enumerate(drafts(head, target, weights, tokens, taught, depth)):
            logprobs = taught.logprobs[:, number:]
            divergence = (jnp.exp(logprobs) * (logprobs - drafted)).sum(-1)[:, SKIPPED:]
            total += LATER**number * divergence.mean()
        return total / sum(LATER**number for number in range(depth))

    @jax.jit
    def step(weights: Params, state: Any, params: Params, tokens: jax.Array) -> Any:
        nats, gradient = jax.value_and_grad(cost)(weights, params, tokens)
        updates, state = rule.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, nats

    return step


def make_measure(head: draft_head.DraftHead, depth: int) -> Any:
    """Entropy of drafts, and how often the model draws the same token, on windows that were held out.

    At temperature 1, of two distributions with common noise at least (1 − d) / (1 + d) and about 1 − d, for
    their total variation d; 1 − d is returned.

    Args:
        head: the head's functions.
        depth: drafts from every position.
    """

    @jax.jit
    def measure(weights: Params, params: Params, tokens: jax.Array) -> Any:
        target = Target(head.target, params)
        taught = teach(target, head.layer, tokens)
        result = []
        for number, drafted in enumerate(drafts(head, target, weights, tokens, taught, depth)):
            probs = jnp.exp(drafted)
            entropy = -(probs * drafted).sum(-1)
            overlap = jnp.minimum(probs, jnp.exp(taught.logprobs[:, number:])).sum(-1)
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
    result.add_argument("--depth", type=int, default=2, help="drafts from every position")
    result.add_argument("--layer", type=int, help="layer whose keys it reads; by default the last full one")
    result.add_argument("--intermediate-size", type=int, help="by default three times the hidden size")
    result.add_argument("--learning-rate", type=float, default=0.01)
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
    state, step = rule.init(weights), make_step(head, rule, arguments.depth)
    batches = windows(training, arguments.rows, arguments.length, arguments.seed)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    began = time.monotonic()
    with Progress(*columns) as progress:
        bar = progress.add_task("training", total=steps)
        for _ in range(steps):
            weights, state, nats = step(weights, state, model.params, jnp.asarray(next(batches)))
            progress.update(bar, advance=1, description=f"{float(nats):.3f} nats a draft")
            if time.monotonic() - began > 60 * arguments.minutes:
                break
    measure, results = make_measure(head, arguments.depth), []
    batches = windows(held_out, arguments.rows, arguments.length, 0)
    for _ in range(HELD_OUT_BATCHES):
        results.append(jax.device_get(measure(weights, model.params, jnp.asarray(next(batches)))))
    for number in range(arguments.depth):
        overlap = np.mean([result[number][1].mean() for result in results])
        print(f"draft {number + 1}: accepted with probability {overlap:.3f}")
    entropy, overlap = (np.concatenate([d[i] for r in results for d in r]) for i in (0, 1))
    config = dataclasses.replace(head.config, **acceptance_table(entropy, overlap))
    draft_head.save(arguments.output, dataclasses.replace(head, config=config), weights)
    return config


def _first_weights(arguments: argparse.Namespace, target: Target) -> tuple[draft_head.DraftHead, Params]:
    """The head in the output directory, or a new one.

    Args:
        arguments: the parsed command line.
        target: the model.
    """
    if draft_head.is_draft_head(arguments.output):
        return draft_head.load(arguments.output, target.decoder)
    shape, layer = target.decoder.shape, arguments.layer
    layer = draft_head.last_full_layer(target.decoder.config) if layer is None else layer
    draft_head.attention_of(target.decoder.config, layer)
    inner = arguments.intermediate_size or 3 * shape.hidden
    config = draft_head.HeadConfig(shape.hidden, shape.vocabulary, shape.layers, layer, inner)
    head = draft_head.DraftHead(target.decoder, config)
    return head, draft_head.initialise(head, target.params, arguments.seed)


if __name__ == "__main__":
    main()
