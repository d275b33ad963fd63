"""Measurements of the benchmark of tasks: edits in the offline loop, structured output through the engine."""

import argparse
from collections.abc import Callable
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from entropic_jax.parameter_tables.speculation_names import AUTO, OFF

from ...harness.cores import pin_to_cores
from .. import measure as decoding
from ..workload import arms
from . import edits, structured
from .imposed import impose, unaware
from .schemas import KINDS

EDITS, STRUCTURED = "edits", "structured"
PARTS = (EDITS, STRUCTURED)
ARMS = (OFF, "suffix", AUTO)
COMPILED_TOKENS = 4  # of the texts that compile the programs of a context


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure the parts that the options name.

    Args:
        options: the options of the command.
        console: where progress is shown.
    """
    pin_to_cores(options.threads)
    results: dict[str, Any] = decoding.describe(options, console)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        cells = len(options.contexts) * len(options.temperatures) * len(edits.KINDS)
        total = {EDITS: cells, STRUCTURED: len(options.rows) * len(KINDS)}
        task = progress.add_task("", total=sum(total[part] for part in options.parts))

        def advance() -> None:
            progress.advance(task)

        if EDITS in options.parts:
            progress.update(task, description="edits")
            results |= measure_edits(options, advance)
        if STRUCTURED in options.parts:
            progress.update(task, description="structured output")
            results[STRUCTURED] = structured.measure(options, advance)
    results["runs"] = {part: {key: results[key] for key in ("date", "commit")} for part in options.parts}
    return results


def with_stored_parts(results: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    """Results, with the parts of stored results that were not measured again.

    Args:
        results: what `run` has measured now.
        stored: results of an earlier run with the same options but for its parts.
    """
    runs = {part: stored.get("runs", {}).get(part, stored) for part in PARTS if part in stored}
    kept = {key: value for key, value in stored.items() if key not in results}
    stamps = {part: {key: run[key] for key in ("date", "commit")} for part, run in runs.items()}
    return {**results, **kept, "runs": stamps | results["runs"]}


def measure_edits(options: argparse.Namespace, advance: Callable[[], None]) -> dict[str, Any]:
    """The rates of every arm on every edit, and the costs that the draft-length law has.

    Args:
        options: the options of the command.
        advance: called after each cell: a context, a temperature and a kind of edits.
    """
    model, tokenizer = decoding.load(options.model, options.dtype), options.model / "tokenizer.json"
    costs = decoding.pass_costs(model, max(options.contexts))
    entries: list[dict[str, Any]] = []

    def speculators() -> dict[str, Any]:
        by_name = arms(costs, decoding.has_head(model), ARMS)
        return {name: unaware(speculator) for name, speculator in by_name.items()}

    for context in options.contexts:
        tasks = {kind: edits.tasks(kind, tokenizer, context, options.edits) for kind in edits.KINDS}
        for temperature in options.temperatures:
            for kind, of_kind in tasks.items():
                for number, (prompt, answer) in enumerate(of_kind):
                    imposed = impose(model, prompt, answer)
                    if number == 0:  # compile
                        decoding.compare(imposed, prompt, COMPILED_TOKENS, temperature, speculators(), 0)
                    entry = {"kind": kind, "context": context, "temperature": temperature, "task": number}
                    compared = decoding.compare(
                        imposed, prompt, len(answer), temperature, speculators(), number, answer
                    )
                    entries.append(entry | {"answer": len(answer)} | compared)
                advance()
    jax.clear_caches()  # the programs of the engines that follow need the memory
    return {"law": costs._asdict(), "edits": entries}
