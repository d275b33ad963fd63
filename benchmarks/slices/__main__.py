"""Benchmark of slices: which models fit on which TPU slices or GPU hosts, and what their programs exchange.

    pip install -e '.[kernels]'
    python -m benchmarks.slices [--models 'Llama 3.1 8B'] [--slices v5e:2x4] [--limit 1800]
                                [--resume RESULTS] [--document]

Nothing runs on a TPU or GPU and no weights exist: libtpu and the CUDA plugin of JAX compile shapes for a
topology by its name, whole models, two programs at a time, each in a process of its own. Programs that are
not begun within --limit are left out; --resume continues with them.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console

from ..harness.provenance import describe_run
from ..harness.publishing import benchmark_parser, measure_and_publish
from . import measure, report
from .workload import MODELS, PROGRAMS, QUICK, SLICES


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = benchmark_parser(__doc__, "slices")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=tuple(MODELS), help="(default: all)")
    parser.add_argument("--slices", nargs="+", choices=SLICES, default=SLICES, help="(default: all)")
    parser.add_argument("--limit", type=float, default=3600, help="seconds in which programs are begun")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="RESULTS",
        help="compile what these lack; the tables say which commits programs are of",
    )
    options = parser.parse_args()
    measure_and_publish("slices", report, run, options)


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Every model on every slice."""
    description = describe_run(console)
    before = {"cases": []} if options.resume is None else json.loads(options.resume.read_text("utf-8"))
    cases = QUICK if options.quick else (tuple(options.models), tuple(options.slices), PROGRAMS)
    return {**description, **measure.measure(*cases, options.limit, console, before, description)}


if __name__ == "__main__":
    main()
