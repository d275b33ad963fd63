"""Benchmark of second passes: a step that reads few pages first, and more where that pass is uncertain.

python -m benchmarks.ablation.second_pass [--model DIRECTORY] [--quick] [--document]
"""

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console

from entropic_jax.serving.options.compilation_cache import remember_compilations
from entropic_jax.serving.options.model import EMBEDDED

from ...harness.provenance import describe_run
from ...harness.publishing import benchmark_parser, measure_and_publish
from . import measure, report


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = benchmark_parser(__doc__, "ablation.second_pass")
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    measure_and_publish("ablation.second_pass", report, run, parser.parse_args())


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Every context, with the description of the run."""
    description = describe_run(Console(quiet=True))  # nothing is timed: a busy machine does not matter
    remember_compilations()
    model = "the embedded model" if options.model == EMBEDDED else options.model.name
    return {**description, "model": model, **measure.measure(options.model, options.quick, console)}


if __name__ == "__main__":
    main()
