"""Table of the benchmark of optimisers."""

from typing import Any

from ..harness.tables import Table

MEASURED_CODE = ("models/train", "models/model.py", "models/decoder.py", "models/layers.py")
NOTES = ["For `adamw` the trainer multiplies the rate by 0.15; `muon` gives its Adam part a fifth of it."]


def tables(runs: list[dict[str, Any]]) -> list[Table]:
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
        for run in sorted(runs, key=lambda run: run["bits_per_byte"])
    ]
    return [("Training from scratch", header, rows)]
