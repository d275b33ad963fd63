"""Tables of the latency of streams with drafts and without."""

import statistics
from typing import Any

from ...harness.provenance import stamp
from ...harness.tables import Table
from .measure import ACCEPTED, DRAFTED, OFF, ON, QUEUE

MEASURED_CODE = ("serving", "entropic_jax", "models")
BAR = 1.1  # the most that the p99 of `meso` may be, as a multiple of that of `off`
KINDS = ("event", "token as it arrives", "token, spread")

Figures = list[float]  # of each repetition


def tables(results: dict[str, Any]) -> list[Table]:
    """The pauses of both servers, and what else they did in the same runs."""
    gaps, runs = [], []
    for cell in results["cells"]:
        for kind in KINDS:
            plain, drafting = (
                {p: [run["gaps"][kind][p] for run in of_preset(cell, preset)] for p in ("p50", "p99")}
                for preset in (OFF, ON)
            )
            gaps.append(
                [
                    f"{cell['context'] // 4}–{cell['context']}",
                    kind,
                    *(spread(figures["p50"], "{:.2f}") for figures in (plain, drafting)),
                    *(spread(figures["p99"], "{:.1f}") for figures in (plain, drafting)),
                    ratio(drafting["p99"], plain["p99"]),
                ]
            )
        for preset in (OFF, ON):
            measured = of_preset(cell, preset)
            drafted, accepted = (sum(run[name] for run in measured) for name in (DRAFTED, ACCEPTED))
            runs.append(
                [
                    f"{cell['context'] // 4}–{cell['context']}",
                    preset,
                    f"{cell['sustained'][preset]:.2f}",
                    f"{cell['rate']:.2f}",
                    spread([run["tokens_per_second"] for run in measured], "{:.0f}"),
                    spread([run["tokens_per_event"] for run in measured], "{:.2f}"),
                    spread([run["first"]["p99"] for run in measured], "{:.0f}"),
                    str(drafted),
                    f"{accepted / drafted:.2f}" if drafted else "–",
                    equal_texts(cell, preset),
                ]
            )
    header = [
        "prompts, tokens",
        "time of a",
        "p50, ms: off",
        "p50, ms: meso",
        "p99, ms: off",
        "p99, ms: meso",
    ]
    header.append("p99, meso ÷ off")
    title = f"Pauses of streams at {results['load']:.0%} of the rate that `off` sustains"
    columns = ["prompts, tokens", "preset", "sustained requests/s", "offered", "tokens/s", "tokens an event"]
    columns += ["first token, p99, ms", "drafted tokens verified", "accepted ÷ verified", "texts of `off`"]
    return [(title, header, gaps), ("The same runs", columns, runs)]


def equal_texts(cell: dict[str, Any], preset: str) -> str:
    """How many texts are those of `off`; in its own row, of `off` under another load."""
    equal = cell.get("control", []) if preset == OFF else cell["equal"]
    return f"{sum(equal)} of {len(equal) * cell['requests']}" if equal else "–"


def of_preset(cell: dict[str, Any], preset: str) -> list[dict[str, Any]]:
    """The runs of a server, in order of their repetitions."""
    return sorted((r for r in cell["runs"] if r["preset"] == preset), key=lambda run: run["repetition"])


def spread(figures: Figures, form: str) -> str:
    """Median and range of the repetitions."""
    numbers = statistics.median(figures), min(figures), max(figures)
    return "{} ({}–{})".format(*map(form.format, numbers))


def ratio(figures: Figures, others: Figures) -> str:
    """Median and range of the ratios of the same repetitions."""
    return spread([a / b for a, b in zip(figures, others, strict=True)], "{:.2f}")


def notes(results: dict[str, Any]) -> list[str]:
    """Where it was measured, and how a token's time is defined."""
    cells = results["cells"]
    low, high = cells[0]["texts"]
    setting = f"{results['cpu']}; model {results['model']}, {results['dtype']}, {results['rows']} rows, "
    setting += f"T {results['temperature']:g}. Client and servers share the cores. A run has "
    setting += f"{cells[0]['requests']} requests with prompts of held-out code and texts of {low} to {high} "
    setting += (
        "tokens, arriving at random (Poisson); prompts, lengths, seeds and times are the same for both."
    )
    event = (
        "An event is one message of a stream, with the tokens of one launch of the engine or fewer. Its time "
    )
    event += (
        "is that since the event before of the same text, as a reader sees it. *Token as it arrives*: the "
    )
    event += (
        "first token of an event has its time, the others 0. *Token, spread*: each token of an event has an "
    )
    event += "equal part of its time. The first event of a text has none of these times."
    rate = f"The sustained rate is that of a closed loop of {QUEUE} requests for each row. Ratios are of the "
    rate += f"same repetition. The bar is a p99 of at most {BAR:g} times that of `off`."
    equal = (
        "*Texts of `off`*: how many texts are those of `off`; in its own row, those of `off` once more, in "
    )
    equal += "the closed loop."
    return [setting, event, rate, equal]


def stamps(results: dict[str, Any]) -> str:
    """Date and commit of the tables."""
    return stamp([results], MEASURED_CODE)
