"""Benchmark of the certificate: how far the bound of the dropped mass is from the mass, and what tightens it.

python -m benchmarks.ablation.certificate [--quick] [--document]
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
    parser = benchmark_parser(__doc__, "ablation.certificate")
    measure_and_publish("ablation.certificate", report, run, parser.parse_args())


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Every context, with the description of the run."""
    description = describe_run(Console(quiet=True))  # nothing is timed: a busy machine does not matter
    return {**description, **measure.measure(options.quick)}


if __name__ == "__main__":
    main()
