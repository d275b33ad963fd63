"""Measurements of entropy estimators: error against float64, and milliseconds a token."""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from entropic_jax import entropy

from ..harness.cores import pin_to_cores
from ..harness.provenance import describe_run
from .workload import model_logits, normal, zipf

LOOP = 16  # tokens of a timed launch

Estimator = Callable[[jax.Array, int], Any]
ESTIMATORS: dict[str, Estimator] = {
    "exact": lambda logits, k: entropy.entropy_statistics(logits).entropy,
    "surrogate": lambda logits, k: entropy.surrogate(logits),
    "truncated": lambda logits, k: entropy.truncated(entropy.top_k_summary(logits, k)),
    "tail-corrected": lambda logits, k: entropy.tail_corrected(entropy.top_k_summary(logits, k)),
    "upper": lambda logits, k: entropy.upper_bound(entropy.top_k_summary(logits, k)),
    "lower": lambda logits, k: entropy.lower_bound(entropy.top_k_summary(logits, k)),
    "midpoint": lambda logits, k: entropy.midpoint(entropy.top_k_summary(logits, k)).entropy,
}
# What a step of decoding measures, and the entropy alone.
TIMED: dict[str, Callable[..., Any]] = {
    "with varentropy": lambda logits, k: entropy.entropy_statistics(logits),
    **ESTIMATORS,
}
WITHOUT_TOP_K = ("with varentropy", "exact", "surrogate")  # k does not matter to them


def exact(logits: np.ndarray) -> np.ndarray:
    """The entropy in float64, one row after another."""
    entropies = []
    for row in logits:
        z = row.astype(np.float64) - row.max()
        p = np.exp(z) / np.exp(z).sum()
        entropies.append(np.log(np.exp(z).sum()) - (p * z).sum())
    return np.array(entropies)


def ranks(values: np.ndarray) -> np.ndarray:
    """Places in the order of size; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    """Pearson's; None where one of them does not vary."""
    return float(np.corrcoef(x, y)[0, 1]) if x.std() > 0 and y.std() > 0 else None


def accuracy(family: str, logits: np.ndarray, ks: list[int]) -> Iterator[dict[str, Any]]:
    """Errors of every estimator.

    Args:
        family: the name of the logits.
        logits: float32 `[rows, vocabulary]`.
        ks: numbers of the largest logits that an estimator sees.

    Yields:
        An entry for every estimator and k: its error, and its correlation with the exact entropy.
    """
    true, vocabulary = exact(logits), logits.shape[1]
    for name, estimate in ESTIMATORS.items():
        for k in [None] if name in WITHOUT_TOP_K else [k for k in ks if k <= vocabulary]:
            estimates = np.asarray(jax.jit(estimate, static_argnums=1)(logits, k), np.float64)
            yield {
                "family": family,
                "vocabulary": vocabulary,
                "k": k,
                "estimator": name,
                "rows": len(true),
                "mean_entropy": float(true.mean()),
                "bias": float((estimates - true).mean()),
                "mean_error": float(np.abs(estimates - true).mean()),
                "largest_error": float(np.abs(estimates - true).max()),
                "above_ln_v": float((estimates > np.log(vocabulary) + 1e-4).mean()),
                "pearson": correlation(estimates, true),
                "spearman": correlation(ranks(estimates), ranks(true)),
            }


def timings(vocabulary: int, ks: list[int], repeat: int, tick: Callable[[str], None]) -> list[dict[str, Any]]:
    """Milliseconds a token of every estimator and k; the estimators take turns.

    Args:
        vocabulary: size of the logits.
        ks: numbers of the largest logits that an estimator sees.
        repeat: measurements of each.
        tick: called with a description before every measurement.

    Returns:
        An entry for every estimator and k, with all its measurements.
    """
    logits = jnp.asarray(normal(vocabulary, LOOP))
    programs = {
        (name, k): jax.jit(lambda rows, f=estimate, k=k: jax.lax.map(lambda row: f(row[None], k), rows))
        for name, estimate in TIMED.items()
        for k in ([None] if name in WITHOUT_TOP_K else ks)
    }
    measured: dict[tuple[str, int | None], list[float]] = {key: [] for key in programs}
    for repetition in range(-1, repeat):  # the first compiles
        tick(f"{vocabulary} tokens")
        for key, program in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(program(logits))
            if repetition >= 0:
                measured[key].append(1e3 * (time.perf_counter() - begin) / LOOP)
    return [
        {
            "vocabulary": vocabulary,
            "k": k,
            "estimator": name,
            "ms": statistics.median(times),
            "least": min(times),
            "greatest": max(times),
            "measured": times,
        }
        for (name, k), times in measured.items()
    ]


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure everything; the results as they are stored."""
    results = {**describe_run(console), "threads": options.threads, "jax": jax.__version__}
    pin_to_cores(options.threads)
    errors: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        total = len(options.vocabularies) * (2 + options.repeat + 1) + 1
        task = progress.add_task("", total=total)

        def tick(description: str) -> None:
            progress.update(task, advance=1, description=description)

        for vocabulary in options.vocabularies:
            for family, make in (("Zipf", zipf), ("normal", normal)):
                tick(f"{vocabulary} tokens, {family}")
                errors += accuracy(family, make(vocabulary, options.rows), options.ks)
            times += timings(vocabulary, options.ks, options.repeat, tick)
        tick("the model's logits")
        logits = model_logits(options.model, options.text, options.tokens)
        errors += accuracy(options.model.name, logits, options.ks)
    return {**results, "texts": [path.name for path in options.text], "accuracy": errors, "time": times}
