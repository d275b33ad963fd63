"""Benchmark of stability: contraction along real text, and hysteresis of the closed loop in generation.

    python -m benchmarks.stability [--quick] [--rows 12] [--document]

The set-point H* and the budget ε_max are swept up and then down during one generation, and as a control up
and then up again. Every row is a repetition with its own prompt and seed.
"""

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console

from entropic_jax.serving.options.model import EMBEDDED

from ..harness.provenance import describe_run
from ..harness.publishing import benchmark_parser, measure_and_publish
from . import measure, report


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = benchmark_parser(__doc__, "stability")
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--rows", type=int, default=12, help="repetitions of every sweep")
    options = parser.parse_args()
    measure_and_publish("stability", report, run, options)


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Contraction along a text, then the sweeps."""
    description = describe_run(Console(quiet=True))  # nothing is timed: a busy machine does not matter
    rows, steps = (2, 4) if options.quick else (options.rows, measure.STEPS)
    return {**description, **measure.measure(options.model, rows, steps, console)}


if __name__ == "__main__":
    main()
