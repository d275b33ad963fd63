"""Benchmark of temperature laws: the default and a relative one beside plain sampling, min-p and controls.

    python -m benchmarks.sampling.temperature [--quick] [--tasks 1152] [--document]

Every sampler answers the same tasks and continues the same texts, so differences are paired.
"""

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console

from entropic_jax.serving.options.model import EMBEDDED

from ...harness.provenance import describe_run
from ...harness.publishing import benchmark_parser, measure_and_publish
from ..samplers import SamplerBenchmark
from . import measure, report


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = benchmark_parser(__doc__, "sampling.temperature")
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--tasks", type=int, default=1152)
    options = parser.parse_args()
    measure_and_publish("sampling.temperature", report, run, options)


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The answers and texts of every sampler."""
    description = describe_run(Console(quiet=True))  # nothing is timed: a busy machine does not matter
    benchmark = SamplerBenchmark(options.model, context=1024)
    count = measure.ROWS if options.quick else options.tasks
    return {**description, **measure.measure(benchmark, count, console)}


if __name__ == "__main__":
    main()
