"""Bits per byte of held-out text and experts read under every policy, token by token in the decode loop.

Every file is replayed from its first token, all files in one batch, so that a policy sees the entropies
that the model has under the policy. Two controls repeat a law with a signal that belongs to other tokens:
the numbers of experts that it read, those of a token in all layers given to another token, so that
exactly as many are read; and the entropy of the token before, exchanged between tokens, with the routers'
probabilities left in place.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from entropic_jax import allocate, chain, models, start
from entropic_jax.loop import replay
from entropic_jax.methods.expert_selection import ExpectedReductionExperts, FixedExperts, TopPExperts
from entropic_jax.models.train import evaluate
from entropic_jax.state import Measured
from entropic_jax.state.pytree import pytree

from ...harness.held_out_text import module_files
from ...harness.provenance import describe_run
from . import gains

MASSES = (0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85)
LAW, ROUTER_ONLY = "expected reduction", "expected reduction, router alone"
COUNTS, ENTROPY = "numbers exchanged between tokens", "entropy exchanged between tokens"


class Texts(NamedTuple):
    """Equally long beginnings of files, and the bytes of the tokens that are predicted."""

    names: list[str]
    tokens: np.ndarray  # int32 [files, time + 1]
    sizes: np.ndarray  # int [files]


class Replay(NamedTuple):
    """A run over all texts under a policy."""

    nats: np.ndarray  # [files]
    counts: np.ndarray  # int [time, files, layers]
    entropy: np.ndarray  # [time, files], of the output
    flops: np.ndarray  # [files], by the ledger


@pytree
class ImposedCounts:
    """Reads the numbers of experts of a table.

    Args:
        counts: int32 `[time, rows, layers]`.
    """

    counts: Any

    def num_experts(
        self, probability: jax.Array, layer: int, signal: Measured, length: jax.Array
    ) -> jax.Array:
        """See `ExpertPolicy`."""
        return self.counts[length, jnp.arange(length.shape[0]), layer]


@pytree
class ImposedEntropy:
    """A policy that sees entropies of a table in place of those of the token before.

    Args:
        policy: the policy.
        entropy: nats, `[time, rows]`.
    """

    policy: Any
    entropy: Any

    def num_experts(
        self, probability: jax.Array, layer: int, signal: Measured, length: jax.Array
    ) -> jax.Array:
        """See `ExpertPolicy`."""
        imposed = self.entropy[length, jnp.arange(length.shape[0])]
        return self.policy.num_experts(probability, layer, signal._replace(entropy=imposed), length)


def documents(held_out: Path | None) -> list[dict[str, str]]:
    """Package, path and text of held-out files; None takes the modules of rich, each as a package."""
    if held_out:
        return json.loads(held_out.read_text())
    return [{"package": f.name, "path": f.name, "text": f.read_text("utf-8")} for f in module_files()]


def split(files: list[evaluate.File], length: int, measured: int, fitted: int) -> tuple[Texts, Texts]:
    """Texts to measure on, and texts of other packages to fit with.

    Args:
        files: held out, in a random order.
        length: tokens of a text.
        measured: files to measure on, at most.
        fitted: files to fit with, at most.
    """
    files = [f for f in files if len(f.tokens) > length]
    packages = sorted({f.package for f in files})
    order = np.random.default_rng(0).permutation(len(packages))
    for_fitting = {packages[i] for i in order[: max(1, len(packages) // 2)]}

    def texts(chosen: list[evaluate.File], count: int) -> Texts:
        chosen = chosen[:count]
        if not chosen:
            raise ValueError(f"--tokens must leave files of two packages; got {length}")
        tokens = np.stack([f.tokens[: length + 1] for f in chosen]).astype(np.int32)
        sizes = np.array([f.sizes[1 : length + 1].sum() for f in chosen])
        return Texts([f"{f.package}/{f.path}" for f in chosen], tokens, sizes)

    return (
        texts([f for f in files if f.package not in for_fitting], measured),
        texts([f for f in files if f.package in for_fitting], fitted),
    )


def run_policy(model: Any, texts: Texts, policy: Any) -> Replay:
    """Replays all texts under a policy.

    Args:
        model: the mixture.
        texts: the texts.
        policy: an `ExpertPolicy`.
    """
    rows, length = len(texts.tokens), texts.tokens.shape[1] - 1
    cache = allocate(model.decoder.shape, rows, length + 1)
    prompts = texts.tokens[:, :1].tolist()
    policy = jax.tree.map(jnp.asarray, policy)
    state = start(
        model.decoder,
        model.params,
        chain(),
        cache,
        prompts,
        key=jax.random.key(0),
        max_tokens=length,
        expert_policy=policy,
    )
    following = jnp.asarray(texts.tokens[:, 1:])
    state, trace = replay(model.decoder, model.params, chain(), state, following)
    nats, entropy = np.asarray(trace.surprisal, float), np.asarray(trace.entropy)
    return Replay(nats.sum(0), np.asarray(trace.experts_read), entropy, np.asarray(state.ledger.flops))


def exchanged(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Values `[time, files, …]` in another order of the tokens of all files."""
    flat = values.reshape(values.shape[0] * values.shape[1], -1)
    return flat[rng.permutation(len(flat))].reshape(values.shape)


def with_controls(model: Any, texts: Texts, policy: Any, seed: int) -> dict[str, Replay]:
    """A law and its two controls, by name.

    Args:
        model: the mixture.
        texts: the texts.
        policy: the law.
        seed: the seed of the exchanges.
    """
    rng, law = np.random.default_rng(seed), run_policy(model, texts, policy)
    before = np.concatenate([np.zeros_like(law.entropy[:1]), law.entropy[:-1]])
    counts = ImposedCounts(exchanged(law.counts, rng).astype(np.int32))
    entropy = ImposedEntropy(policy, exchanged(before, rng))
    return {
        LAW: law,
        f"{LAW}, {COUNTS}": run_policy(model, texts, counts),
        f"{LAW}, {ENTROPY}": run_policy(model, texts, entropy),
    }


def prices(expected: np.ndarray, number: int) -> list[float]:
    """Prices at evenly spaced quantiles of the expected reductions."""
    levels = (np.arange(number) + 0.5) / number
    return [float(x) for x in np.quantile(expected, levels)]


def row(setting: str, replayed: Replay) -> dict[str, Any]:
    """A run as it is stored: nats, mean experts read and FLOPs of each file."""
    return {
        "setting": setting,
        "nats": replayed.nats.tolist(),
        "experts": replayed.counts.mean((0, 2)).tolist(),
        "flops": replayed.flops.astype(float).tolist(),
    }


def measure_policies(
    model: Any,
    texts: Texts,
    weights: dict[str, np.ndarray],
    price_lists: dict[str, list[float]],
    console: Console,
) -> dict[str, list[dict[str, Any]]]:
    """Every policy at every setting.

    Args:
        model: the mixture.
        texts: the texts to measure on.
        weights: the regressions of the two laws, by name.
        price_lists: the prices of each.
        console: reports progress.
    """
    results: dict[str, list[dict[str, Any]]] = {}

    def add(name: str, setting: str, replayed: Replay) -> None:
        results.setdefault(name, []).append(row(setting, replayed))
        stored = results[name][-1]
        bits = sum(stored["nats"]) / np.log(2) / texts.sizes.sum()
        console.print(f"{name} {setting}: {np.mean(stored['experts']):.3f} experts, {bits:.4f} bits/byte")

    for count in range(1, model.config.num_experts_per_tok + 1):
        add("fixed", f"{count}", run_policy(model, texts, FixedExperts(count)))
    for mass in MASSES:
        add("top-p", f"{mass:g}", run_policy(model, texts, TopPExperts(mass)))
    for seed, price in enumerate(price_lists[LAW]):
        law = ExpectedReductionExperts(weights[LAW], price)
        for name, replayed in with_controls(model, texts, law, seed).items():
            add(name, f"{price:.2g}", replayed)
    for price in price_lists[ROUTER_ONLY]:
        law = ExpectedReductionExperts(weights[ROUTER_ONLY], price)
        add(ROUTER_ONLY, f"{price:.2g}", run_policy(model, texts, law))
    return results


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The results of the benchmark."""
    description = describe_run(Console(quiet=True))  # nothing is timed: a busy machine does not matter
    model = models.load(options.model, "float32", progress=False)
    if not model.decoder.shape.expert_weights:
        raise ValueError(f"--model must be a mixture of experts; got {options.model}")
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    files = evaluate.encoded(documents(options.held_out), tokenizer, 0)
    texts, to_fit = split(files, options.tokens, options.files, options.calibration_files)
    calibration, held_out = gains.measure(model, to_fit.tokens), gains.measure(model, texts.tokens)
    weights = {LAW: gains.fit(calibration), ROUTER_ONLY: gains.fit(calibration, gains.ROUTER)}
    price_lists = {n: prices(gains.expected(calibration, w), options.prices) for n, w in weights.items()}
    config = model.config
    return {
        **description,
        "model": {
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "inner": config.intermediate_size,
            "experts": config.num_local_experts,
            "most": config.num_experts_per_tok,
            "weights": model.decoder.shape.weights,
            "expert_weights": model.decoder.shape.expert_weights,
        },
        "training": training_of(options.model),
        "tokens": options.tokens,
        "files": texts.names,
        "bytes": texts.sizes.tolist(),
        "calibration_files": len(to_fit.names),
        "mean_gain": {
            "entropy": held_out.entropy.mean((0, 2)).tolist(),
            "loss": held_out.loss.mean((0, 2)).tolist(),
        },
        "correlations": gains.correlations(held_out, weights),
        "policies": measure_policies(model, texts, weights, price_lists, console),
    }


def training_of(directory: Path) -> list[dict[str, Any]]:
    """The rounds of training behind a model, if its folder tells them."""
    file = directory / "training.json"
    return json.loads(file.read_text()) if file.exists() else []
