"""Tables of a run and of a comparison, and a plot of a run over time."""

from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from ..request import RequestError
from .client import Outcome
from .measures import LATENCIES, LEVELS, end_to_end, first_token, pauses


def show(figures: dict[str, Any], console: Console, title: str = "") -> None:
    """Print the figures of one run.

    Args:
        figures: the figures of the run.
        console: to print to.
        title: above the table.
    """
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("milliseconds", style="bold")
    names = ("mean", *(f"p{level}" for level in LEVELS), "max")
    for name in names:
        table.add_column(name, justify="right")
    for key, words in LATENCIES.items():
        if (value := figures[key]) is not None:
            table.add_row(f"{words} ({key})", *(f"{value[name]:.1f}" for name in names))
    console.print(table)
    rates = (
        f"{figures['completed']} of {figures['requests']} requests in {figures['seconds']:.1f} s",
        f"{figures['requests_per_second']:.2f} requests/s",
        f"{figures['output_tokens_per_second']:.0f} output tokens/s",
        f"{figures['total_tokens_per_second']:.0f} tokens/s with prompts",
    )
    console.print(" · ".join(rates))
    if "goodput" in figures:
        bounds = " ".join(f"{name}:{bound:g}" for name, bound in figures["slo"].items())
        share = f"{figures['within_slo']:.1%} of requests"
        console.print(f"goodput under {bounds}: {figures['goodput']:.2f} requests/s, {share}")
    for kind, count in figures["errors"].items():
        console.print(f"[red]{count} × {kind}[/red]: ", end="")
        console.print(figures["error_examples"][kind].strip() or "–", markup=False, soft_wrap=True)
    if figures["short"]:
        console.print(f"{figures['short']} answers were shorter than asked for")
    if figures["late"]["p99"] > 10:
        late = f"{figures['late']['p99']:.0f} ms after they were due at p99"
        console.print(f"[yellow]the client fell behind: requests were sent {late}[/yellow]")


def show_comparison(rows: list[dict[str, Any]], names: tuple[str, str], console: Console) -> None:
    """Print the medians of both servers, and the ratio of the paired runs with its range.

    Args:
        rows: medians and ratios, one row per figure.
        names: the names of the two servers.
        console: to print to.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("median of the runs", style="bold")
    for name in (*names, "ratio", "lowest–highest", ""):
        table.add_column(name, justify="right")
    for row in rows:
        better = row["lowest"] > 1 if row["more_is_better"] else row["highest"] < 1
        worse = row["highest"] < 1 if row["more_is_better"] else row["lowest"] > 1
        table.add_row(
            row["figure"],
            f"{row['first']:.4g}",
            f"{row['second']:.4g}",
            f"{row['ratio']:.3f}",
            f"{row['lowest']:.3f}–{row['highest']:.3f}",
            "better" if better else "worse" if worse else "",
        )
    console.print(table)


def draw(runs: list[tuple[str, list[Outcome]]], path: Path) -> None:
    """Plot the latency distributions, and requests in flight and throughput over time, one colour per run."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise RequestError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(12, 6.5), layout="constrained")
    panels = (
        ("time to first token, ms", lambda o: [v for v in [first_token(o)] if v is not None]),
        ("inter-token latency, ms", pauses),
        ("end to end, ms", lambda o: [end_to_end(o)]),
    )
    for place, (title, values) in zip(axes[0], panels, strict=True):
        for index, (name, outcomes) in enumerate(runs):
            latencies = np.sort([v for o in outcomes if o.error is None for v in values(o)])
            if latencies.size:
                share = (np.arange(latencies.size) + 1) / latencies.size
                place.step(latencies, share, where="post", color=f"C{index}", label=name)
        place.set(xlabel=title, ylabel="share of them at most", ylim=(0, 1.02), xscale="log")
        place.axhline(0.5, color="#999999", lw=0.6)
        place.axhline(0.95, color="#999999", lw=0.6)
    for index, (_, outcomes) in enumerate(runs):
        start = min(o.due for o in outcomes)
        due, ended = ([getattr(o, key) - start for o in outcomes] for key in ("due", "ended"))
        times = np.concatenate([due, ended])
        order = np.argsort(times, kind="stable")
        steps = np.concatenate([np.ones(len(due)), -np.ones(len(ended))])[order]
        axes[1][0].step(times[order], np.cumsum(steps), where="post", color=f"C{index}")
        came = [(when - start, n) for o in outcomes for when, n in o.chunks]
        if came:
            seconds, tokens = np.array(came).T
            width = max(seconds.max() / 60, 1e-3)
            counts, edges = np.histogram(seconds, np.arange(0, seconds.max() + width, width), weights=tokens)
            axes[1][1].stairs(counts / width, edges, color=f"C{index}")
        good = [o for o in outcomes if o.error is None]
        axes[1][2].plot(
            [o.due - start for o in good], [end_to_end(o) / 1000 for o in good], ".", ms=4, color=f"C{index}"
        )
        bad = [o.due - start for o in outcomes if o.error]
        axes[1][2].plot(bad, np.zeros(len(bad)), "x", color="#c03030")
    axes[1][0].set(xlabel="seconds", ylabel="requests in flight")
    axes[1][1].set(xlabel="seconds", ylabel="output tokens per second")
    axes[1][2].set(xlabel="seconds at which it was due", ylabel="end to end, s (× failed)")
    if len(runs) > 1:
        axes[0][0].legend(frameon=False)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise RequestError(f"--plot {path}: {error}") from None
    finally:
        plt.close(figure)
