"""Table of the benchmark of optimisers."""

from typing import Any

from ..harness.provenance import stamp
from ..harness.tables import Table

MEASURED_CODE = ("models/train", "models/model.py", "models/decoder.py", "models/layers.py")


def tables(results: dict[str, Any]) -> list[Table]:
    """The runs, best first."""
    header = ["optimiser", "`--learning-rate`", "bits per byte at the end", "tokens/s", "seconds"]
    rows = [
        [
            run["optimiser"],
            f"{run['learning_rate']:g}",
            f"{run['bits_per_byte']:.3f}",
            f"{run['tokens_per_second']:.0f}",
            f"{run['seconds']:.0f}",
        ]
        for run in sorted(results["runs"], key=lambda run: run["bits_per_byte"])
    ]
    return [("Training from scratch", header, rows)]


def notes(results: dict[str, Any]) -> list[str]:
    """How the learning rates of the two compare."""
    return ["For `adamw` the trainer multiplies the rate by 0.15; `muon` gives its Adam part a fifth of it."]


def stamps(results: dict[str, Any]) -> str:
    """Dates and commits of all runs."""
    return stamp([results, *results["runs"]], MEASURED_CODE)
