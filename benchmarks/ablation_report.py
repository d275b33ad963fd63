"""The tables and the picture of `benchmarks.ablation`."""

import statistics
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from rich.console import Console

from entropic_jax.analysis.ablation import interval

from .report import Grid, machine, markdown, processor, show_grids, slug, write_section
from .worker import ROOT

__all__ = ["document", "machine", "processor", "show", "slug"]

Rows = list[dict[str, Any]]
DOCUMENT = ROOT / "docs" / "results.md"
PICTURE = ROOT / "docs" / "selectors.svg"


def split(rows: Rows, *keys: str) -> Iterable[tuple[tuple[Any, ...], Rows]]:
    """Rows grouped by some of their fields, in the order of their first appearance."""
    order = {tuple(r[k] for k in keys): i for i, r in reversed(list(enumerate(rows)))}
    place = lambda r: order[tuple(r[k] for k in keys)]
    for _, group in groupby(sorted(rows, key=place), key=place):
        mine = list(group)
        yield tuple(mine[0][k] for k in keys), mine


def middle(rows: Rows, field: str) -> float:
    return statistics.median(r[field] for r in rows)


def mean(rows: Rows, field: str) -> float:
    return statistics.fmean(r[field] for r in rows)


def paired(rows: Rows, base: Rows, field: str, *keys: str) -> str:
    """The mean change against the baseline in per cent, with its 95 % interval over pairs."""
    known = {tuple(r[k] for k in keys): r[field] for r in base}
    change = [100 * (r[field] / known[tuple(r[k] for k in keys)] - 1) for r in rows]
    centre, low, high = interval(change)
    return f"{centre:+.2f} ({low:+.2f} … {high:+.2f})"


def quality(rows: Rows) -> Grid:
    lines = []
    for (context,), some in split(rows, "context"):
        base = [r for r in some if r["preset"] == "off"]
        for (name,), mine in split(some, "preset"):
            lines.append(
                [
                    str(context),
                    name,
                    f"{mean(mine, 'bits_per_byte'):.4f}",
                    "" if name == "off" else paired(mine, base, "bits_per_byte", "seed"),
                    f"{mean(mine, 'kept'):.3f}",
                    f"{mean(mine, 'bytes_read') / 1e6:.1f}",
                    f"{mean(mine, 'efficiency') / mean(base, 'efficiency'):.2f}",
                    f"{mean(mine, 'certificate'):.2g}",
                ]
            )
    head = [
        "context",
        "preset",
        "bits/byte",
        "change, % (95 %)",
        "kept",
        "MB/token",
        "dτ/dC ÷ off",
        "certificate",
    ]
    return "Quality under teacher forcing, held-out text", head, lines


def recalled(rows: Rows) -> Grid:
    lines = []
    for (distance,), some in split(rows, "distance"):
        for (name,), mine in split(some, "preset"):
            share, low, high = interval([float(r["right"]) for r in mine])
            lines.append(
                [
                    str(distance),
                    name,
                    f"{100 * share:.1f} ({100 * low:.1f} … {100 * high:.1f})",
                    str(len(mine)),
                    f"{mean(mine, 'kept'):.3f}",
                ]
            )
    return "Recall, % of questions", ["tokens between", "preset", "right (95 %)", "questions", "kept"], lines


def selectors(rows: Rows) -> Grid:
    dense = next(r["bits_per_byte"] for r in rows if r["selector"] == "dense")
    lines = [
        [
            r["selector"],
            f"{r['setting']:g}",
            f"{r['kept']:.3f}",
            f"{r['bits_per_byte']:.4f}",
            f"{100 * (r['bits_per_byte'] / dense - 1):+.2f}",
        ]
        for r in rows
    ]
    head = ["selector", "ε or budget", "kept", "bits/byte", "against dense, %"]
    return "Which pages: quality against the share read", head, lines


def timed(title: str) -> Callable[[Rows], Grid]:
    def grid(rows: Rows) -> Grid:
        lines = []
        for (context,), some in split(rows, "context"):
            base = middle([r for r in some if r["preset"] == "off"], "milliseconds")
            for (name,), mine in split(some, "preset"):
                times = sorted(r["milliseconds"] for r in mine)
                lines.append(
                    [
                        str(context),
                        name,
                        f"{statistics.median(times):.2f} ({times[0]:.2f}–{times[-1]:.2f})",
                        f"{statistics.median(times) / base:.2f}",
                        f"{base / statistics.median(times):.2f}",
                        f"{mean(mine, 'kept'):.3f}",
                    ]
                )
        head = ["context", "preset", "ms/token: median (range)", "latency ÷ off", "throughput ÷ off", "kept"]
        return title, head, lines

    return grid


def loaded(rows: Rows) -> Grid:
    base = [r for r in rows if r["preset"] == "off"]
    lines = [
        [
            "fcfs" if name == "off" else name,
            f"{mean(mine, 'completion'):.2f}",
            "" if name == "off" else paired(mine, base, "completion", "seed"),
            f"{mean(mine, 'completion_p95'):.2f}",
            f"{mean(mine, 'tokens_per_second'):.0f}",
        ]
        for (name,), mine in split(rows, "preset")
    ]
    head = ["preset", "completion, s", "change, % (95 %)", "p95, s", "tokens/s"]
    return "Under load: more sequences than rows", head, lines


def written(rows: Rows) -> Grid:
    fields = ("entropy_variance", "error", "clipped", "temperature", "fall", "distinct_4", "divergence")
    lines = [
        [name, *(f"{mean(mine, field):.3f}" for field in fields)] for (name,), mine in split(rows, "preset")
    ]
    head = ["preset", "Var H_T", "|H_T − H*|", "at a clip", "T", "E[ΔH⁺]", "distinct 4-grams", "bigram JS"]
    return "Free generation", head, lines


GRIDS: dict[str, Callable[[Rows], Grid]] = {
    "quality": quality,
    "recall": recalled,
    "selectors": selectors,
    "speed": timed("Speed of the embedded model, one sequence"),
    "shape": timed("Speed of the 25M shape, the share read imposed"),
    "load": loaded,
    "writing": written,
}


def grids(results: dict[str, Any]) -> list[Grid]:
    return [make(results["studies"][name]) for name, make in GRIDS.items() if results["studies"].get(name)]


def notes(results: dict[str, Any]) -> list[str]:
    gains = ", ".join(
        f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in results["gains"].items()
    )
    found = [
        f"{results['cpu']}, {results['date']}, load before the start {results['load_average']:.1f}.",
        f"Gains: {gains}; entropies in nats.",
        "`off`: plain sampling, everything read. `paper`: every law as printed.",
        "dτ/dC: nats of entropic time per roofline second (25 GB/s); kept: share of keys and values read.",
        "The certificate bounds the change of any head's output; median over tokens.",
    ]
    if "imposed" in results:
        found.append(
            "25M shape: random weights attend to everything, so that each layer but the first reads "
            f"{results['imposed']:.2f} is imposed, as measured on the trained model; the cache holds random "
            "numbers. Speed only."
        )
    return found


def show(results: dict[str, Any], console: Console) -> None:
    show_grids(grids(results), notes(results), console)


def document(results: dict[str, Any]) -> None:
    """Write the tables into docs/results.md, and the picture of the selectors beside it."""
    write_section(DOCUMENT, "ablation", markdown(grids(results), notes(results)))
    if results["studies"].get("selectors"):
        draw(results["studies"]["selectors"])


def draw(rows: Rows) -> None:
    """Bits per byte over the share of keys and values read, a line for each selector."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    dense = next(r["bits_per_byte"] for r in rows if r["selector"] == "dense")
    figure, axes = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
    for (name,), mine in split([r for r in rows if r["selector"] != "dense"], "selector"):
        mine = sorted(mine, key=lambda r: r["kept"])
        strong = dict(lw=2.2, color="#c03030", zorder=3) if name == "entropy" else dict(lw=1.2)
        change = [100 * (r["bits_per_byte"] / dense - 1) for r in mine]
        axes.plot([100 * r["kept"] for r in mine], change, "o-", ms=4, label=name, **strong)
    axes.axhline(0, color="#888888", lw=0.8)
    axes.set(xlabel="keys and values read, %", ylabel="bits per byte above dense, %")
    axes.set_yscale("symlog", linthresh=1)
    axes.legend(frameon=False)
    figure.savefig(PICTURE)
    plt.close(figure)
