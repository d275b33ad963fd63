"""Tables of the serving benchmark."""

import statistics
from typing import Any

from ..harness.provenance import stamp
from ..harness.tables import Table

Rows = list[dict[str, Any]]
MEASURED_CODE = ("serving", "entropic_jax", "models")
NAMES = {
    "ours, served": "ours, the server",
    "ours, off": "ours, the server with `--preset off`",
    "ours-batched": "ours, `LLM`",
    "ours": "ours, the offline loop in static batches",
    "transformers": "transformers, static batches",
    "transformers-batched": "transformers, continuous batching",
    "openvino-batched": "OpenVINO GenAI, continuous batching",
    "llama_cpp.server": "llama_cpp.server",
}


def spread(values: list[float], form: str = ".3g") -> str:
    """The median with the least and the greatest."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):{form}} ({low:{form}}–{high:{form}})"


def three_digits(rate: float) -> str:
    """A rate with three digits, or all before the point."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def ratios(rows: Rows, base: Rows, field: str) -> list[float]:
    """Ratios of a figure to that of the base, one for each repetition."""
    known = {row["repetition"]: row[field] for row in base}
    return [row[field] / known[row["repetition"]] for row in rows if row["repetition"] in known]


def throughput(rows: Rows) -> Table:
    """Tokens per second by engine, and the server over each."""
    served = [row for row in rows if row["engine"] == "ours, served"]
    lines = []
    for engine, name in NAMES.items():
        selected = [row for row in rows if row["engine"] == engine]
        if selected:
            rates = [row["rate"] for row in selected]
            over = "" if engine == "ours, served" else f"{spread(ratios(served, selected, 'rate'))}×"
            middle, low, high = map(three_digits, (statistics.median(rates), min(rates), max(rates)))
            lines.append([name, f"{middle} ({low}–{high})", over])
    return "64 requests at a time", ["engine", "output tokens/s: median (range)", "the server ÷"], lines


def latency(rows: Rows) -> Table:
    """First token of a lone request, served and bare."""
    lines = []
    for length in dict.fromkeys(row["length"] for row in rows):
        selected = [row for row in rows if row["length"] == length]
        columns = [spread([row[name] for row in selected]) for name in ("served", "bare")]
        lines.append([str(length), *columns, spread([row["served"] / row["bare"] for row in selected])])
    head = ["tokens of the prompt", "served, ms", "bare prefill, ms", "served ÷ bare"]
    return "First token of a lone request, p50", head, lines


def load(rows: Rows) -> Table:
    """Latencies by what limits say and by order of admission."""
    lines = []
    for limits in dict.fromkeys(row["limits"] for row in rows):
        base = [row for row in rows if row["limits"] == limits and row["policy"] == "fcfs"]
        for policy in dict.fromkeys(row["policy"] for row in rows):
            selected = [row for row in rows if row["limits"] == limits and row["policy"] == policy]

            def column(name: str, scale: float = 1.0) -> str:
                return spread([row[name] * scale for row in selected])

            over = (
                ["", ""] if policy == "fcfs" else [spread(ratios(selected, base, n)) for n in ("mean", "p95")]
            )
            lines.append(
                [
                    limits,
                    policy,
                    column("mean", 1e-3),
                    over[0],
                    column("p95", 1e-3),
                    over[1],
                    column("longest_wait", 1e-3),
                    column("within", 100),
                ]
            )
    head = ["`max_tokens`", "schedule", "mean, s", "÷ fcfs", "p95, s", "÷ fcfs", "longest to first token, s"]
    head.append("within the bound, %")
    return "Under load: more sequences than rows", head, lines


TABLES = {"throughput": throughput, "latency": latency, "load": load}


def tables(results: dict[str, Any]) -> list[Table]:
    """A table for each study that was run."""
    return [make(results["studies"][name]) for name, make in TABLES.items() if results["studies"].get(name)]


def notes(results: dict[str, Any]) -> list[str]:
    """Where, with what, and what failed."""
    sentences = [
        f"{results['cpu']}, {results['threads']} threads for every engine, {results['date']}.",
        f"Load before the start {results['load_average']:.1f}. The client runs on the same cores.",
        "The embedded model in float32, greedy; prompts and texts of the first table have 128 tokens each.",
        "All have 256 requests, transformers' continuous batching and llama_cpp.server 64.",
        "OpenVINO GenAI has its default settings, and others were not compared.",
        "Ranges are over repetitions in which the engines take turns; ratios are of the same repetition.",
    ]
    if rows := results["studies"].get("load"):
        sentences += load_notes(rows, results["utilisation"])
    if results.get("versions"):
        sentences.append(
            "; ".join(f"{name}: {version}" for name, version in results["versions"].items()) + "."
        )
    measured = {row["engine"] for row in results["studies"].get("throughput", [])}
    failures = {name: reason for name, reason in results.get("failures", {}).items() if name not in measured}
    sentences += [f"{engine} failed: {reason}" for engine, reason in failures.items()]
    return sentences


def load_notes(rows: Rows, utilisation: float) -> list[str]:
    """The workload of the last table."""
    rates, bounds = (spread([row[name] for row in rows]) for name in ("rate", "bound"))
    lengths = ", ".join(
        f"{spread([row[f'length_{name}'] for row in rows], '.0f')} ({words})"
        for name, words in (("p50", "median"), ("mean", "mean"), ("p99", "99th percentile"))
    )
    equal = min(row["equal"] for row in rows)
    load = f"{rates} requests a second (Poisson), {utilisation:.0%} of what first come, first served sustains"
    return [
        f"Load: {load}. A text ends at an empty line, which the server cannot foresee: tokens {lengths}.",
        f"Bound: end to end within four times the mean at the sustained rate, {bounds} ms.",
        f"In every run under load at least {equal:.1%} of the texts were those of the first run.",
    ]


def stamps(results: dict[str, Any]) -> dict[str, str]:
    """Date and commit of each table: studies are measured in runs of their own."""
    studies = results["studies"]
    return {
        make(studies[name])[0]: stamp([results["runs"][name]], MEASURED_CODE)
        for name, make in TABLES.items()
        if studies.get(name)
    }
