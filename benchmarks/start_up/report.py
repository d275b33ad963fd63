"""Tables of the benchmark of start-up."""

import statistics
from typing import Any

from ..harness.provenance import stamp
from ..harness.tables import Table
from .measure import COMMANDS, PRESETS

CACHE_KINDS = (("all", True), ("all", False), ("no programs", False))  # caches, and whether they were empty
RESIDENT = 700  # MiB of `serve` that are the target
MEASURED_CODE = ("serving", "entropic_jax", "models")
BARS = {("generate", "exit"): "4", ("serve", "first token"): "6"}  # seconds, with filled caches


def tables(results: dict[str, Any]) -> list[Table]:
    """Seconds of each command, cold and warm, and the memory of those that go on."""
    header = ["command", "preset", "until", "empty caches", "filled", "filled, no programs", "target"]
    rows = []
    for command in COMMANDS:
        for preset in PRESETS:
            starts = [r for r in results["starts"] if (r["command"], r["preset"]) == (command, preset)]
            for until in starts[0]["seconds"] if starts else ():
                cells = [
                    spread([r["seconds"][until] for r in starts if (r["caches"], r["cold"]) == kind])
                    for kind in CACHE_KINDS
                ]
                rows.append([command, preset, until, *cells, BARS.get((command, until), "")])
    title = "Resident memory of a server after its warm-up, MiB"
    return [("Seconds from the start of a process", header, rows), (title, *memory(results["starts"]))]


def memory(starts: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table of memory; no rows where none was measured."""
    measured = [r for r in starts if r.get("resident") is not None]
    rows = []
    for preset in PRESETS:
        if of_preset := [r for r in measured if r["preset"] == preset]:
            kinds = [
                [r["resident"] for r in of_preset if (r["caches"], r["cold"]) == kind] for kind in CACHE_KINDS
            ]
            rows.append([preset, *(spread(values, 0) for values in kinds), f"{RESIDENT}"])
    return ["preset", "empty caches", "filled", "filled, no programs", "target"], rows


def spread(values: list[float], digits: int = 1) -> str:
    """The median, and the range if there are several.

    Args:
        values: what was measured.
        digits: the number of digits after the point.
    """
    middle, low, high = (
        f"{number:.{digits}f}" for number in (statistics.median(values), min(values), max(values))
    )
    return middle if len(values) == 1 else f"{middle} ({low}–{high})"


def notes(results: dict[str, Any]) -> list[str]:
    """The machine, and what the columns are."""
    lines = [
        f"{results['cpu']}, {results['date']}. With filled caches: medians and ranges, the kinds in turn.",
        "*Filled, no programs*: every cache but that of compiled programs.",
    ]
    _, rows = memory(results["starts"])
    return [*lines, "Without that cache, no program leaves memory."] if rows else lines


def stamps(results: dict[str, Any]) -> str:
    """Date and commit, the same for all tables."""
    return stamp([results], MEASURED_CODE)
