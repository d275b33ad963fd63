"""Tables of the benchmark of samplers."""

from typing import Any

from entropic_jax.analysis.statistics import split
from entropic_jax.models.train.recall import interval

from ..harness.preset_names import NOTE, with_current_names
from ..harness.provenance import stamp
from ..harness.tables import Table

MEASURED_CODE = ("entropic_jax", "models")
Rows = list[dict[str, Any]]


def solved(rows: Rows) -> list[float]:
    return [float(x) for row in rows for x in row["solved"]]


def per_cent(values: list[float]) -> str:
    low, high = interval(int(sum(values)), len(values))
    return f"{100 * sum(values) / len(values):.1f} ({100 * low:.1f} … {100 * high:.1f})"


def overall(results: dict[str, Any]) -> Table:
    """Quality and cost in one table."""
    base = next((r["sampler"] for r in results["tasks"]), None)
    lines = []
    cost = lambda rows: sum(r["seconds"] for r in rows)
    first = cost([r for r in results["tasks"] if r["sampler"] == base])
    for (name,), selected in split(results["tasks"], "sampler"):
        right = sum(solved(selected))
        free_texts = [r for r in results["texts"] if r["sampler"] == name]
        each = lambda total: f"{total / right:.3g}" if right else "—"
        line = [
            name,
            per_cent(solved(selected)),
            each(sum(r["tokens"] for r in selected)),
            each(cost(selected)),
            f"{cost(selected) / first:.2f}",
        ]
        if free_texts:
            loops = [loop for r in free_texts for loop in r["loops"]]
            line += [
                f"{sum(r['distinct_4'] for r in free_texts) / len(free_texts):.3f}",
                f"{100 * sum(loops) / len(loops):.0f}",
                f"{1e3 * cost(free_texts) / sum(r['tokens'] for r in free_texts):.2f}",
            ]
        lines.append([*line, *[""] * (8 - len(line))])
    head = ["sampler", "pass@1, % (95 %)", "tokens/solved", "s/solved", f"time ÷ {base}"]
    return "Quality and cost", [*head, "distinct-4", "loops, %", "ms/token, free text"], lines


def by_kind(results: dict[str, Any]) -> Table:
    """Share of tasks solved, by kind."""
    kinds = [kind for (kind,), _ in split(results["tasks"], "kind")]
    lines = []
    for (name,), selected in split(results["tasks"], "sampler"):
        shares = []
        for kind in kinds:
            values = solved([r for r in selected if r["kind"] == kind])
            shares.append(f"{100 * sum(values) / len(values):.0f}" if values else "")
        lines.append([name, *shares])
    return "Solved, %, by kind of task", ["sampler", *kinds], lines


def notes(results: dict[str, Any]) -> list[str]:
    counted = [r for r in results["tasks"] if r["sampler"] == results["tasks"][0]["sampler"]]
    tasks = sum(len(r["solved"]) for r in counted)
    settings = results["settings"]
    run = f"{results['cpu']}, {results['date']}, load before the start {results['load_average']:.1f}"
    sentences = f"""{run}; {tasks} tasks for each sampler, {settings["rows"]} at a time, the same for all.
Recall (key_value, needle, variable, definition): a fact among six, then source, then the question.
Assertions (assignment, lookup): the text is parsed and evaluated, never executed.
Tokens: all that were computed, including those of discarded branches.
Seconds: wall-clock time, prefill included, compilation excluded.
Free text: after 128 tokens of held-out source; a loop repeats up to 40 tokens three times at the end."""
    return [*sentences.split("\n"), NOTE]


def tables(results: dict[str, Any]) -> list[Table]:
    """The tables."""
    named = {study: with_current_names(results[study], "sampler") for study in ("tasks", "texts")}
    results = {**results, **named}
    return [overall(results), by_kind(results)]


def stamps(results: dict[str, Any]) -> str:
    """Date and commit, the same for all tables."""
    return stamp([results], MEASURED_CODE)
