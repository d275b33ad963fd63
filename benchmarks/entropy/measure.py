"""What each estimator of entropy costs, and how far it is from the exact one.

    python -m benchmarks.entropy [--quick] [--vocabularies 32000,128256,151936] [--ks 16,50,128] [--document]

Errors are against float64 in NumPy, over Zipf–Mandelbrot laws, over normal logits, and over what a model
computes on text that it was not trained on. Times are of one token after another inside one compiled loop,
as when decoding.
"""

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from entropic_jax import entropy, models
from entropic_jax.calibration import pieces, teacher_forced

from . import report
from .worker import ROOT, pin

VOCABULARIES, KS = [32_000, 128_256, 151_936], [16, 50, 128]
LONG_TEXTS = (
    "console",
    "table",
    "text",
    "progress",
    "pretty",
    "syntax",
)  # modules of rich, which is held out
TOKENS_EACH = 256  # read of a text, from its beginning
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
# What a step of decoding asks for, beside the entropy alone.
TIMED: dict[str, Estimator] = {
    "with varentropy": lambda logits, k: entropy.entropy_statistics(logits),
    **ESTIMATORS,
}
HEADLESS = ("with varentropy", "exact", "surrogate")  # k does not matter to them


def exact(logits: np.ndarray) -> np.ndarray:
    """The entropy in float64, one row after another."""
    found = []
    for row in logits:
        z = row.astype(np.float64) - row.max()
        p = np.exp(z) / np.exp(z).sum()
        found.append(np.log(np.exp(z).sum()) - (p * z).sum())
    return np.array(found)


def zipf(vocabulary: int, rows: int) -> np.ndarray:
    """Zipf–Mandelbrot laws, p ∝ (rank + offset)^−s, s in [0.5, 3]; float32 `[rows, vocabulary]`."""
    random = np.random.default_rng(0)
    power, offset = random.uniform(0.5, 3, (rows, 1)), random.exponential(3, (rows, 1))
    return (-power * np.log(1 + random.permutation(vocabulary) + offset)).astype(np.float32)


def normal(vocabulary: int, rows: int) -> np.ndarray:
    """Independent normal logits with deviations from 0.5 to 8."""
    random = np.random.default_rng(1)
    scale = np.geomspace(0.5, 8, rows, dtype=np.float32)[:, None]
    return scale * random.standard_normal((rows, vocabulary), np.float32)


def of_model(directory: Path, texts: list[Path], tokens: int) -> np.ndarray:
    """Logits of a model that reads the beginnings of texts."""
    model = models.load(directory)
    if model.tokenizer is None:
        raise SystemExit(f"--model is {directory}: it has no tokenizer.json; accepted is one with it")
    sequences = [model.tokenizer.encode(path.read_text("utf-8")) for path in texts]
    cut = pieces([sequence[: TOKENS_EACH + 1] for sequence in sequences], TOKENS_EACH, tokens)
    forced = teacher_forced(model.decoder, model.params, cut)
    return np.concatenate([np.asarray(logits)[wanted >= 0] for _, logits, wanted in forced])


def ranks(values: np.ndarray) -> np.ndarray:
    """Places in the order of size; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    """Pearson's; None where one of them does not vary."""
    return float(np.corrcoef(x, y)[0, 1]) if x.std() > 0 and y.std() > 0 else None


def accuracy(family: str, logits: np.ndarray, ks: list[int]) -> Iterator[dict[str, Any]]:
    """One entry for every estimator and k: how far from the exact entropy, and how well it follows it."""
    true, vocabulary = exact(logits), logits.shape[1]
    for name, estimate in ESTIMATORS.items():
        for k in [None] if name in HEADLESS else [k for k in ks if k <= vocabulary]:
            found = np.asarray(jax.jit(estimate, static_argnums=1)(logits, k), np.float64)
            yield {
                "family": family,
                "vocabulary": vocabulary,
                "k": k,
                "estimator": name,
                "rows": len(true),
                "mean_entropy": float(true.mean()),
                "bias": float((found - true).mean()),
                "mean_error": float(np.abs(found - true).mean()),
                "largest_error": float(np.abs(found - true).max()),
                "above_ln_v": float((found > np.log(vocabulary) + 1e-4).mean()),
                "pearson": correlation(found, true),
                "spearman": correlation(ranks(found), ranks(true)),
            }


def timings(vocabulary: int, ks: list[int], repeat: int, tick: Callable[[str], None]) -> list[dict[str, Any]]:
    """Milliseconds a token of every estimator and k; the estimators take turns."""
    logits = jnp.asarray(normal(vocabulary, LOOP))
    programs = {
        (name, k): jax.jit(lambda rows, f=estimate, k=k: jax.lax.map(lambda row: f(row[None], k), rows))
        for name, estimate in TIMED.items()
        for k in ([None] if name in HEADLESS else ks)
    }
    measured: dict[tuple[str, int | None], list[float]] = {key: [] for key in programs}
    for turn in range(-1, repeat):  # the first compiles
        tick(f"{vocabulary} tokens")
        for key, program in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(program(logits))
            if turn >= 0:
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
    results = {**report.machine(console), "threads": options.threads, "jax": jax.__version__}
    pin(options.threads)
    errors: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        total = len(options.vocabularies) * (2 + options.repeat + 1) + 1
        task = progress.add_task("", total=total)
        tick = lambda what: progress.update(task, advance=1, description=what)
        for vocabulary in options.vocabularies:
            for family, make in (("Zipf", zipf), ("normal", normal)):
                tick(f"{vocabulary} tokens, {family}")
                errors += accuracy(family, make(vocabulary, options.rows), options.ks)
            times += timings(vocabulary, options.ks, options.repeat, tick)
        tick("the model's logits")
        logits = of_model(options.model, options.text, options.tokens)
        errors += accuracy(options.model.name, logits, options.ks)
    return {**results, "texts": [path.name for path in options.text], "accuracy": errors, "time": times}


def cells(
    rows: list[dict[str, Any]], names: list[str], write: Callable[[dict[str, Any]], str]
) -> list[list[str]]:
    """One line for every vocabulary and k, one column for every estimator."""
    entry = {(row["vocabulary"], row["k"], row["estimator"]): write(row) for row in rows}
    places = sorted({(row["vocabulary"], row["k"]) for row in rows if row["k"] is not None})
    find = lambda v, k, name: entry.get((v, None if name in HEADLESS else k, name), "–")
    return [[str(v), str(k), *(find(v, k, name) for name in names)] for v, k in places]


def grids(results: dict[str, Any]) -> list[report.Grid]:
    """Times, and for every family of logits errors and correlations, as text."""
    sizes, names, others = ["vocabulary", "k"], list(ESTIMATORS), list(ESTIMATORS)[1:]
    times = cells(results["time"], list(TIMED), lambda row: f"{row['ms']:.3f}")
    found = [("Milliseconds a token, median", [*sizes, *TIMED], times)]
    number = lambda value: "–" if value is None else f"{value:.3f}"
    error = lambda row: "< 1e-4" if row["mean_error"] < 1e-4 else f"{row['mean_error']:.3g}"
    both = lambda row: f"{number(row['pearson'])} {number(row['spearman'])}"
    for family in dict.fromkeys(row["family"] for row in results["accuracy"]):
        rows = [row for row in results["accuracy"] if row["family"] == family]
        mean = statistics.fmean(row["mean_entropy"] for row in rows)
        title = f"{family}, {rows[0]['rows']} distributions of {mean:.2f} nats on average"
        found.append((f"{title}: mean absolute error, nats", [*sizes, *names], cells(rows, names, error)))
        title = f"{family}: correlation with the exact entropy, Pearson and Spearman"
        found.append((title, [*sizes, *others], cells(rows, others, both)))
    return found


def notes(results: dict[str, Any]) -> list[str]:
    """Where it was measured, and what stands in the cells."""
    printed = [row for row in results["accuracy"] if row["estimator"] == "tail-corrected"]
    worst = max(printed, key=lambda row: row["above_ln_v"])
    machine = f"{results['cpu']}, {results['threads']} threads, jax {results['jax']}, {results['date']}"
    excess = f"exceeds ln V for up to {worst['above_ln_v']:.0%} of the distributions"
    where = f"{worst['family']}, {worst['vocabulary']} tokens, k = {worst['k']}"
    return [
        f"{machine}, load before the start {results['load_average']:.1f}.",
        "Exact and surrogate look at no head: k does not matter to them.",
        f"The estimator as printed (tail-corrected) {excess} ({where}).",
        f"Texts of the model: {', '.join(results['texts'])}.",
    ]


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    integers = lambda text: [int(part) for part in text.split(",")]
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that everything runs")
    parser.add_argument("--vocabularies", type=integers, help="sizes (32000,128256,151936)")
    parser.add_argument("--ks", type=integers, help="sizes of the head (16,50,128)")
    parser.add_argument("--rows", type=int, help="distributions of each family (64)")
    parser.add_argument("--tokens", type=int, help="tokens of text that the model reads (1024)")
    parser.add_argument("--repeat", type=int, help="measurements of each time (15)")
    parser.add_argument("--threads", type=int, default=2, help="cores")
    embedded = ROOT / "models" / "embedded"
    parser.add_argument("--model", type=Path, default=embedded, help="directory of the model (embedded)")
    parser.add_argument("--text", type=Path, nargs="+", help="what it reads (modules of rich, held out)")
    parser.add_argument(
        "--output", type=Path, help="file of the results (benchmarks/results/entropy-CPU.json)"
    )
    parser.add_argument("--show", type=Path, metavar="RESULTS", help="print stored results, measure nothing")
    parser.add_argument("--document", action="store_true", help="write the tables into docs/results.md")
    options = parser.parse_args()
    options.vocabularies = options.vocabularies or ([2000, 8000] if options.quick else VOCABULARIES)
    options.ks = options.ks or ([16] if options.quick else KS)
    options.rows = options.rows or (8 if options.quick else 64)
    options.tokens = options.tokens or (64 if options.quick else 1024)
    options.repeat = options.repeat or (2 if options.quick else 15)
    if not options.text:
        (folder,) = importlib.util.find_spec("rich").submodule_search_locations
        options.text = [Path(folder) / f"{name}.py" for name in LONG_TEXTS]

    console = Console()
    results = report.load_or_measure(options, "entropy", lambda: run(options, console), "cpu")
    report.publish(options, "entropy", grids(results), notes(results), console)


if __name__ == "__main__":
    main()
