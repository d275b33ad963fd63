"""The tables of `benchmarks.sampling`."""

from typing import Any

from entropic_jax.analysis.statistics import split
from entropic_jax.models.train.recall import interval

from .report import Grid

Rows = list[dict[str, Any]]


def solved(rows: Rows) -> list[float]:
    return [float(x) for row in rows for x in row["solved"]]


def per_cent(values: list[float]) -> str:
    low, high = interval(int(sum(values)), len(values))
    return f"{100 * sum(values) / len(values):.1f} ({100 * low:.1f} … {100 * high:.1f})"


def overall(results: dict[str, Any]) -> Grid:
    """Quality and cost in one table."""
    base = next((r["way"] for r in results["tasks"]), None)
    lines = []
    cost = lambda rows: sum(r["seconds"] for r in rows)
    first = cost([r for r in results["tasks"] if r["way"] == base])
    for (name,), mine in split(results["tasks"], "way"):
        right = sum(solved(mine))
        free = [r for r in results["texts"] if r["way"] == name]
        each = lambda total: f"{total / right:.3g}" if right else "—"
        line = [
            name,
            per_cent(solved(mine)),
            each(sum(r["tokens"] for r in mine)),
            each(cost(mine)),
            f"{cost(mine) / first:.2f}",
        ]
        if free:
            line += [
                f"{sum(r['distinct_4'] for r in free) / len(free):.3f}",
                f"{100 * sum(sum(r['loops']) for r in free) / sum(len(r['loops']) for r in free):.0f}",
                f"{1e3 * cost(free) / sum(r['tokens'] for r in free):.2f}",
            ]
        lines.append([*line, *[""] * (8 - len(line))])
    head = ["sampler", "pass@1, % (95 %)", "tokens/solved", "s/solved", f"time ÷ {base}"]
    return "Quality and cost", [*head, "distinct-4", "loops, %", "ms/token, free text"], lines


def by_kind(results: dict[str, Any]) -> Grid:
    """Where it is solved."""
    kinds = [kind for (kind,), _ in split(results["tasks"], "kind")]
    lines = []
    for (name,), mine in split(results["tasks"], "way"):
        shares = []
        for kind in kinds:
            values = solved([r for r in mine if r["kind"] == kind])
            shares.append(f"{100 * sum(values) / len(values):.0f}" if values else "")
        lines.append([name, *shares])
    return "Solved, %, by kind of task", ["sampler", *kinds], lines


def notes(results: dict[str, Any]) -> list[str]:
    counted = [r for r in results["tasks"] if r["way"] == results["tasks"][0]["way"]]
    tasks = sum(len(r["solved"]) for r in counted)
    settings = results["settings"]
    where = f"{results['cpu']}, {results['date']}, load before the start {results['load_average']:.1f}"
    found = f"""{where}; {tasks} tasks for each sampler, {settings["rows"]} at a time, the same for all.
Recall (key_value, needle, variable, definition): a fact among six, then source, then the question.
Assertions (assignment, lookup): what is written is parsed, not executed.
Tokens: all that were computed, those taken back and those of branches left included.
Seconds: on the clock, reading the prompts included, compilation not.
Free text: after 128 tokens of held-out source; a loop repeats up to 40 tokens three times at the end."""
    return found.split("\n")


def grids(results: dict[str, Any]) -> list[Grid]:
    """The tables."""
    return [overall(results), by_kind(results)]
