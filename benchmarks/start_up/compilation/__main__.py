"""Compilation benchmark: seconds to compile a decode step for TPUs that are not here, by form of layers.

    pip install libtpu
    python -m benchmarks.start_up.compilation [--topology v6e:4x4] [--shape 70b] [--rows 32] [--document]

Layers are unrolled and scanned. Each step is traced, lowered and compiled once, in a process of its own; the
persistent cache is off. No weights exist, and nothing runs: libtpu compiles shapes for a topology by its
name. Temporaries and code are those that it reports for one chip.
"""

import argparse
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console

from ...harness.provenance import describe_run
from ...harness.publishing import benchmark_parser, measure_and_publish
from . import report
from .measure import SHAPES, compiled

NAME = "start_up.compilation"


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = benchmark_parser(__doc__, NAME)
    parser.add_argument("--topology", help="of the TPUs (default: v6e:4x4)")
    parser.add_argument("--shape", choices=SHAPES, help="of the model (default: 70b)")
    parser.add_argument("--rows", type=int, default=32, help="sequences of the step (default: 32)")
    options = parser.parse_args()
    options.topology = options.topology or ("v5e:2x2" if options.quick else "v6e:4x4")
    options.shape = options.shape or ("tiny" if options.quick else "70b")
    if options.rows < 1:
        parser.error(f"--rows must be at least 1; got {options.rows}")
    measure_and_publish(NAME, report, run, options)


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measures how long compiling each form of the step takes."""
    description = describe_run(console)
    sizes = {"topology": options.topology, "shape": options.shape, "rows": options.rows}
    forms = {}
    for form in report.FORMS:
        console.print(f"compiling with layers {form}")
        forms[form] = compiled(**sizes, form=form)
    return {**description, **sizes, "forms": forms}


if __name__ == "__main__":
    main()
