"""The tables of `benchmarks.serving`."""

import statistics
from typing import Any

from rich.console import Console

from .report import Grid, markdown, rate, show_grids, write_section
from .worker import ROOT

Rows = list[dict[str, Any]]
DOCUMENT = ROOT / "docs" / "results.md"
NAMES = {
    "ours, served": "ours, the server",
    "ours": "ours, the bare loop in static batches",
    "transformers": "transformers, static batches",
    "transformers-batched": "transformers, continuous batching",
    "llama_cpp.server": "llama_cpp.server",
}


def spread(values: list[float], form: str = ".3g") -> str:
    """The median with the least and the greatest."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):{form}} ({low:{form}}–{high:{form}})"


def ratios(rows: Rows, base: Rows, field: str) -> list[float]:
    """Of each repetition, the figure over that of the base."""
    known = {row["repetition"]: row[field] for row in base}
    return [row[field] / known[row["repetition"]] for row in rows if row["repetition"] in known]


def throughput(rows: Rows) -> Grid:
    """Tokens per second by engine, and the server over each."""
    served = [row for row in rows if row["engine"] == "ours, served"]
    lines = []
    for engine, name in NAMES.items():
        mine = [row for row in rows if row["engine"] == engine]
        if mine:
            rates = [row["rate"] for row in mine]
            over = "" if engine == "ours, served" else f"{spread(ratios(served, mine, 'rate'))}×"
            measured = f"{rate(statistics.median(rates))} ({rate(min(rates))}–{rate(max(rates))})"
            lines.append([name, measured, over])
    return "64 requests at a time", ["engine", "output tokens/s: median (range)", "the server ÷"], lines


def latency(rows: Rows) -> Grid:
    """First token of a lone request, served and bare."""
    lines = []
    for length in dict.fromkeys(row["length"] for row in rows):
        mine = [row for row in rows if row["length"] == length]
        columns = [spread([row[name] for row in mine]) for name in ("served", "bare")]
        lines.append([str(length), *columns, spread([row["served"] / row["bare"] for row in mine])])
    head = ["tokens of the prompt", "served, ms", "bare prefill, ms", "served ÷ bare"]
    return "First token of a lone request, p50", head, lines


def load(rows: Rows) -> Grid:
    """Our schedule against first come, first served."""
    lines = []
    for trace in dict.fromkeys(row["trace"] for row in rows):
        base = [row for row in rows if row["trace"] == trace and row["policy"] == "fcfs"]
        for policy in ("fcfs", "entropic"):
            mine = [row for row in rows if row["trace"] == trace and row["policy"] == policy]
            column = lambda name, scale=1.0: spread([row[name] * scale for row in mine])
            over = "" if policy == "fcfs" else spread(ratios(mine, base, "mean"))
            lines.append(
                [
                    trace,
                    f"{mine[0]['rate']:.2f}",
                    policy,
                    column("mean", 1e-3),
                    over,
                    column("p95", 1e-3),
                    column("longest_wait", 1e-3),
                    f"{max(row['rounds'] for row in mine):.1f} ({min(row['allowed'] for row in mine):.0f})",
                    column("within", 100),
                ]
            )
    head = ["trace", "requests/s", "schedule", "mean, s", "÷ fcfs", "p95, s", "longest to first token, s"]
    head += ["longest wait, rounds (bound)", "within SLO, %"]
    return "Under load: more sequences than rows", head, lines


GRIDS = {"throughput": throughput, "latency": latency, "load": load}


def grids(results: dict[str, Any]) -> list[Grid]:
    """A table for each study that was run."""
    return [make(results["studies"][name]) for name, make in GRIDS.items() if results["studies"].get(name)]


def notes(results: dict[str, Any]) -> list[str]:
    """Where, with what, and what failed."""
    found = [
        f"{results['cpu']}, {results['threads']} threads for every engine, {results['date']}.",
        f"Load before the start {results['load_average']:.1f}. The client runs on the same cores.",
        "The embedded model in float32, greedy; prompts and texts of the first table have 128 tokens each.",
        "Ranges are over repetitions in which the engines take turns; ratios are of the same repetition.",
    ]
    if rows := results["studies"].get("load"):
        first = [row for row in rows if row["repetition"] == 0 and row["policy"] == "fcfs"]
        bounds = ", ".join(f"{r['slo'] / 1e3:.2f} s ({r['trace']})" for r in first)
        found.append(
            f"Load: arrivals and lengths with the trace's published statistics, scaled to the model, at "
            f"{results['utilisation']:.0%} of the rate that first come, first served sustains. Both servers "
            f"run the preset `full`; SLO: end to end within four times the mean at that rate, {bounds}."
        )
    if results.get("versions"):
        found.append("; ".join(f"{name}: {version}" for name, version in results["versions"].items()) + ".")
    found += [f"{engine} failed: {reason}" for engine, reason in results.get("failures", {}).items()]
    return found


def show(results: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    show_grids(grids(results), notes(results), console)


def document(results: dict[str, Any]) -> None:
    """Write the tables into docs/results.md."""
    write_section(DOCUMENT, "serving", markdown(grids(results), notes(results)))
