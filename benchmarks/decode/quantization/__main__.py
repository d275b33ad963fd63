"""Benchmark of weight quantisation: bits per byte of held-out text, and tokens decoded a second.

    python -m benchmarks.decode.quantization [--studies quality,speed] [--document]

The embedded model in every precision that `--dtype` and `--quantization` name. Studies that are left out keep
the figures that are stored.
"""

import argparse
import json
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console

from ...harness.provenance import describe_run, processor_name
from ...harness.publishing import benchmark_parser, measure_and_publish, results_file
from . import measure, report


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = benchmark_parser(__doc__, "decode.quantization")
    parser.add_argument(
        "--studies", default=",".join(measure.STUDIES), help="what to measure (default: both)"
    )
    options = parser.parse_args()
    unknown = set(options.studies.split(",")) - set(measure.STUDIES)
    if unknown:
        parser.error(f"studies must be of {', '.join(measure.STUDIES)}; got {options.studies}")
    measure_and_publish("decode.quantization", report, run, options)


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The studies asked for, each with its date and commit, and those that are stored."""
    stored = options.output or results_file("quantization", processor_name())
    keeps = stored.exists() and not options.quick
    studies = json.loads(stored.read_text("utf-8"))["studies"] if keeps else {}
    workload = measure.load_workload()
    for name in options.studies.split(","):
        description = describe_run(console)
        rows = measure.STUDIES[name](workload, options.quick, console)
        studies[name] = {**description, "rows": rows}
    return {"cpu": processor_name(), "studies": studies}


if __name__ == "__main__":
    main()
