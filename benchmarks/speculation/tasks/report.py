"""Tables of the benchmark of tasks."""

import statistics
from typing import Any

from ...harness.provenance import stamp
from ...harness.tables import Table
from ..report import ARM_HEADER, MEASURED_CODE, arm_columns, of_dtype, pass_columns, spread
from .schemas import UNBOUNDED

CELL = ("kind", "context", "temperature")
ALL = "all"  # the tasks of a kind together


def tables(results: dict[str, Any]) -> list[Table]:
    """Edits, for every kind, context, temperature and arm; JSON and tool calls, for every task."""
    return [table for _, table in _parts(results)]


def _parts(results: dict[str, Any]) -> list[tuple[str, Table]]:
    """The table of each part that was measured."""
    measured = []
    for part, table_of in (("edits", _edits), ("structured", _structured)):
        title, header, rows = table_of(results.get(part, []))
        if rows:
            measured.append((part, (title + of_dtype(results), header, rows)))
    return measured


def _edits(entries: list[dict[str, Any]]) -> Table:
    rows = []
    for cell in dict.fromkeys(tuple(entry[key] for key in CELL) for entry in entries):
        tasks = [entry for entry in entries if tuple(entry[key] for key in CELL) == cell]
        for name in tasks[0]["arms"]:
            equal = sum(task["arms"][name]["equal"] == task["answer"] for task in tasks)
            length = statistics.median(task["answer"] for task in tasks)
            rows.append(
                [
                    *map(str, cell),
                    name,
                    *arm_columns(tasks, name),
                    f"{length:.0f}",
                    f"{equal} of {len(tasks)}",
                ]
            )
    header = ["edit", "context", "T", "drafts", *ARM_HEADER, "tokens of an answer", "texts as imposed"]
    return "Edits of given code, one sequence, the answer imposed", header, rows


def _structured(cells: list[dict[str, Any]]) -> Table:
    rows = []
    for kind, at_once in dict.fromkeys((cell["kind"], cell["rows"]) for cell in cells):
        group = [cell for cell in cells if (cell["kind"], cell["rows"]) == (kind, at_once)]
        rows += [_structured_row(cell) for cell in (group if len(group) == 1 else [*group, _together(group)])]
    header = ["output", "task", "at once", "off, tokens/s", "auto ÷ off, median (range)", "tokens a pass"]
    header += ["accepted ÷ verified", "tokens of a text", "texts equal", "complete"]
    return "JSON by schema and tool calls, through the engine", header, rows


def _together(group: list[dict[str, Any]]) -> dict[str, Any]:
    """The tasks of a kind that ran one after another, as a cell: the sums of every round."""
    first = group[0]
    counts = {
        name: {key: sum(cell["counts"][name][key] for cell in group) for key in of_first}
        for name, of_first in first["counts"].items()
    }
    rounds = {
        name: [tuple(map(sum, zip(*x, strict=True))) for x in _rounds(group, name)]
        for name in first["rounds"]
    }
    sums = {key: sum(cell[key] for cell in group) for key in ("texts", "equal", "ended")}
    return {
        "kind": first["kind"],
        "task": ALL,
        "rows": first["rows"],
        "rounds": rounds,
        "counts": counts,
    } | sums


def _rounds(group: list[dict[str, Any]], name: str) -> list[tuple[Any, ...]]:
    """Tokens and seconds of an arm's tasks, round by round."""
    return list(zip(*(cell["rounds"][name] for cell in group), strict=True))


def _structured_row(cell: dict[str, Any]) -> list[str]:
    plain, drafts = (
        [tokens / seconds for tokens, seconds in cell["rounds"][name]] for name in ("off", "auto")
    )
    ratios = [a / b for a, b in zip(drafts, plain, strict=True)]
    return [
        *(str(cell[key]) for key in ("kind", "task", "rows")),
        f"{statistics.median(plain):.0f}",
        spread(ratios),
        *pass_columns([cell["counts"]["auto"]]),
        f"{cell['counts']['off']['tokens'] / cell['texts']:.0f}",
        f"{cell['equal']} of {cell['texts']}",
        f"{cell['ended']} of {cell['texts']}",
    ]


def stamps(results: dict[str, Any]) -> dict[str, str]:
    """Date and commit of each table: the parts may have been measured in runs of their own."""
    code = (*MEASURED_CODE, "serving/engine/grammar_forms.py", "serving/engine/text_grammar.py")
    runs = results.get("runs", {})
    return {title: stamp([runs.get(part, results)], code) for part, (title, _, _) in _parts(results)}


def notes(results: dict[str, Any]) -> list[str]:
    """Where it was measured, what was imposed, and what the columns mean."""
    machine = f"{results['cpu']}, {results['threads']} threads, jax {results['jax']}"
    if xla_threads := results.get("xla_threads"):
        machine += f", NPROC={xla_threads}"
    imposed = (
        "Edits: the model cannot follow instructions, so the answer is imposed. The model runs in full, with "
        "its own noise, and at each position the logit of the answer's token is raised until it is drawn: "
        "the rate is that of a model that gives exactly this answer. Drafters do not see the answer. The "
        "draft head and few pages therefore propose what this model would have written, and would be "
        "accepted more often with a model that gives the answer by itself. Arms take turns launch by launch; "
        "prompts are not timed. Target: 3."
    )
    edits = (
        "*rename*: one identifier of a function; *type hints*: those of its signature, which the prompt does "
        "not have; *reorder a table*: 12 functions of a module, listed by line, by name. Each after held-out "
        "code."
    )
    structured = (
        "JSON and tool calls: texts of the model at T 0.7, as far as the grammar leaves it a choice. Both "
        "engines take turns, round by round; the prompts, which show the schema or the tools, are in the "
        "prefix cache. *at once* 1: each request begins when the one before it has ended; *all*: the tasks "
        "of a kind together. *complete*: the text ended before its limit of tokens. Target: 1.5."
    )
    if any(cell["kind"] == UNBOUNDED for cell in results.get("structured", ())):
        structured += (
            " *strings without bounds*: the same schemas without the longest lengths of strings, as most "
            "clients state them."
        )
    measured = {"edits": [imposed, edits], "structured": [structured]}
    of_parts = [note for part, its in measured.items() if results.get(part) for note in its]
    return [f"{machine}; model {results['model']}, {results['dtype']}.", *of_parts]
