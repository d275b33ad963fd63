"""Benchmark of head budgets: attention missed by rules that share one prefill budget over layers and heads.

python -m benchmarks.long_context.head_budgets [--quick] [--document]
"""

import argparse
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console

from ...harness.provenance import describe_run
from ...harness.publishing import benchmark_parser, measure_and_publish
from . import measure, report


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = benchmark_parser(__doc__, "long_context.head_budgets")
    measure_and_publish("long_context.head_budgets", report, run, parser.parse_args())


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Every budget, with the description of the run."""
    description = describe_run(Console(quiet=True))  # nothing is timed: a busy machine does not matter
    return {**description, **measure.measure(options.quick)}


if __name__ == "__main__":
    main()
