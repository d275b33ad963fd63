"""Tables of the benchmark of start-up."""

import statistics
from typing import Any

from ..harness.provenance import stamp
from ..harness.tables import Table
from .measure import COMMANDS, PRESETS

MEASURED_CODE = ("serving", "entropic_jax", "models")
BARS = {("generate", "exit"): "4", ("serve", "first token"): "6"}  # seconds, with filled caches


def tables(results: dict[str, Any]) -> list[Table]:
    """Seconds of each command, cold and warm."""
    header = ["command", "preset", "until", "empty caches", "filled", "filled, no programs", "target"]
    rows = []
    for command in COMMANDS:
        for preset in PRESETS:
            starts = [r for r in results["starts"] if (r["command"], r["preset"]) == (command, preset)]
            for until in starts[0]["seconds"] if starts else ():
                cells = [
                    spread([r["seconds"][until] for r in starts if (r["caches"], r["cold"]) == kind])
                    for kind in (("all", True), ("all", False), ("no programs", False))
                ]
                rows.append([command, preset, until, *cells, BARS.get((command, until), "")])
    return [("Seconds from the start of a process", header, rows)]


def spread(seconds: list[float]) -> str:
    """The median, and the range if there are several."""
    middle = f"{statistics.median(seconds):.1f}"
    return middle if len(seconds) == 1 else f"{middle} ({min(seconds):.1f}–{max(seconds):.1f})"


def notes(results: dict[str, Any]) -> list[str]:
    """The machine, and what the columns are."""
    return [
        f"{results['cpu']}, {results['date']}. With filled caches: medians and ranges, the kinds in turn.",
        "*Filled, no programs*: every cache but that of compiled programs.",
    ]


def stamps(results: dict[str, Any]) -> str:
    """Date and commit, the same for all tables."""
    return stamp([results], MEASURED_CODE)
