"""Tables of `benchmarks.long_context`."""

import statistics
from typing import Any

from entropic_jax.analysis.statistics import split
from entropic_jax.models.train.recall import interval

from ..harness.preset_names import NOTE, with_current_names
from ..harness.provenance import stamp
from ..harness.tables import Table

MEASURED_CODE = ("entropic_jax", "models")
WITHDRAWN = (
    (
        "Withdrawn, `criti-prefill`: measured without the dense lowest layer that the release has. Its FLOPs "
        "(0.21; about 0.34 with that layer) and its speed (3.30×; about 2.5×) are artefacts of that."
    ),
    (
        "Withdrawn, `entropy-prefill` and `entropy-matched`: no budget left its base, so both are "
        "`uniform-prefill` under other names, and their agreement with it says nothing of entropy."
    ),
)
QUESTIONS, CAPABLE = 100, 0.8  # of a cell with power: questions asked first, and what dense attains
Rows = list[dict[str, Any]]


def right(answers: Rows) -> str:
    """Per cent of questions answered, with the 95 % interval of Wilson."""
    if not answers:
        return "–"
    correct = sum(a["right"] for a in answers)
    low, high = interval(correct, len(answers))
    return f"{100 * correct / len(answers):.0f} ({100 * low:.0f} … {100 * high:.0f})"


def nats(answers: Rows) -> float:
    return statistics.fmean(a["surprisal"] for a in answers)


def quality(rows: Rows) -> Table:
    lines = []
    for (context,), selected in split(rows, "context"):
        dense = next((r for r in selected if r["method"] == "dense"), None)
        for (budget, name), (cell, *_) in split(selected, "budget", "method"):
            answers = cell["answers"]
            first, later = ([a for a in answers if a["asked"] == when] for when in ("first", "later"))

            def part(field, cell=cell, dense=dense):
                return f"{cell[field] / dense[field]:.2f}" if dense else "–"

            lines.append(
                [
                    str(context),
                    "" if budget is None else str(budget),
                    name,
                    right(first),
                    right(later),
                    f"{nats(answers):.3f}",
                    *(part(f) for f in ("prefill_flops", "prefill_bytes", "step_bytes", "held_bytes")),
                ]
            )
    head = ["context", "budget", "method", "asked first, %", "asked later, %", "nats/token"]
    head += ["prefill FLOPs", "prefill bytes", "bytes/step", "held"]
    return "Questions answered, and attention's cost as a part of dense", head, lines


def by_task(rows: Rows) -> Table:
    longest = max((r["context"] for r in rows), default=0)
    selected = [r for r in rows if r["context"] == longest]
    names = list(dict.fromkeys(a["task"] for r in selected for a in r["answers"]))
    lines = []
    for (budget, method), (cell, *_) in split(selected, "budget", "method"):
        cells = []
        for task in names:
            answers = [a for a in cell["answers"] if a["task"] == task]
            share = statistics.fmean(a["right"] for a in answers)
            cells.append(f"{100 * share:.0f} · {nats(answers):.2f}")
        lines.append(["" if budget is None else str(budget), method, *cells])
    return f"By task at {longest} tokens: % answered · nats per token", ["budget", "method", *names], lines


def speed(rows: Rows) -> Table:
    lines = []
    for (context,), selected in split(rows, "context"):
        times = {name: [r["seconds"] for r in runs] for (name,), runs in split(selected, "method")}
        for (name,), runs in split(selected, "method"):

            def middle(field, runs=runs):
                return statistics.median(r[field] for r in runs)

            over = statistics.median(times["dense"]) / middle("seconds") if "dense" in times else None
            lines.append(
                [
                    str(context),
                    name,
                    f"{middle('prompt_seconds'):.2f}",
                    f"{middle('token_seconds'):.2f}",
                    "–" if over is None else f"{over:.2f}×",
                    f"{middle('held_bytes') / 1e6:.0f}",
                    str(len(runs)),
                ]
            )
    head = ["context", "method", "prompt, s", "128 tokens, s", "dense ÷ it, all", "MB held", "runs"]
    return "Time end to end, 25M parameters with random weights, one sequence", head, lines


def files(cells: dict[str, Any]) -> Table:
    lines = []
    for key, cell in cells.items():
        if key.startswith("files/"):
            _, name, budget, method = key.split("/", 3)
            lines.append([name, budget, method, f"{cell['score']:.3f}", str(cell["items"])])
    return "Files", ["file", "budget", "method", "score", "items"], lines


def tables(results: dict[str, Any]) -> list[Table]:
    cells = results["cells"]

    def of(study):
        return with_current_names([c for c in cells.values() if c.get("study") == study], "method")

    tables_made = []
    if of("quality"):
        tables_made += [quality(of("quality")), by_task(of("quality"))]
    if of("speed"):
        tables_made.append(speed(of("speed")))
    return [*tables_made, files(cells)]


NOTES = """
Quality: the embedded model, float32; budget: tokens per KV head, of a segment's reading and of the cache
alike; sparse above an eighth of the context. Asked first: the question ends the prompt, as SnapKV and AdaKV
expect; asked later: after the cache was compressed.

An answer is right if every token of it has more than half of the probability, teacher-forced.

Costs count attention: products with the keys read, and scoring of pages. What ranks the entries of a
compression is not counted; H2O and the oracle compute the whole attention once more.

`entropy-matched`, `criti-prefill`, `uniform-prefill` and `oracle-prefill` have the same budget, which no
budget of `entropy-prefill` exceeded.

Speed: published budgets; random weights attend evenly, which says nothing of quality.
"""


SHARED = (
    "`budgeted-prefill`: one budget for all sparse layers and KV heads, with the total of `uniform-prefill`, "
    "shared by the needs of the heads in the source of `jax`; `× exp(E)`: times the entropy factor of the "
    "segment before."
)


def power(results: dict[str, Any]) -> list[str]:
    """How many questions the cells have, and the tasks that dense attention cannot do."""
    cells = [cell for cell in results["cells"].values() if cell.get("study") == "quality"]
    dense = [answer for cell in cells if cell["method"] == "dense" for answer in cell["answers"]]
    if not dense:
        return []
    fewest = min(sum(answer["asked"] == "first" for answer in cell["answers"]) for cell in cells)
    weak = [
        task
        for (task,), answers in split(dense, "task")
        if statistics.fmean(answer["right"] for answer in answers) < CAPABLE
    ]
    enough = "" if fewest >= QUESTIONS else f", fewer than the {QUESTIONS} that a comparison needs"
    lines = [f"Power: {fewest} questions asked first in the smallest cell{enough}."]
    if weak:
        lines.append(
            f"Dense attention answers less than {CAPABLE:.0%} of {', '.join(weak)}: those columns say "
            "nothing of a method, and they lower every share of the first table."
        )
    return lines


def notes(results: dict[str, Any]) -> list[str]:
    run = f"{results['cpu']}, {results['date']}, load before the start {results['load_average']:.1f}."
    notes = [" ".join(part.split()) for part in NOTES.split("\n\n")]
    if any("budgeted-prefill" in cell.get("method", "") for cell in results["cells"].values()):
        notes.append(SHARED)
    return [run, *power(results), *WITHDRAWN, NOTE, *notes]


def stamps(results: dict[str, Any]) -> str:
    """Date and commit, the same for all tables."""
    return stamp([results], MEASURED_CODE)
