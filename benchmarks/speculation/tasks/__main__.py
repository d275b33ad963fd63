"""Benchmark of speculation on tasks: edits of given code, JSON by schema, and tool calls.

    python -m benchmarks.speculation.tasks [--quick] [--contexts 512,2048] [--parts edits] [--document]

The answer of an edit is imposed on the model, which cannot follow instructions: see `imposed`. JSON and tool
calls are the model's texts, as far as the grammar leaves it a choice.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "1")  # threads of XLA, as in `entropic generate` and `entropic serve`

from rich.console import Console

from ...harness.paths import ROOT
from ...harness.publishing import benchmark_parser, measure_and_publish, results_file
from ..measure import DTYPES
from . import measure, report

NAME = "speculation.tasks"


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = benchmark_parser(__doc__, NAME)
    parser.add_argument("--parts", help=f"what to measure ({','.join(measure.PARTS)})")
    parser.add_argument("--contexts", help="tokens of the prompts of edits (512,2048)")
    parser.add_argument("--temperatures", help="of the edits (0.0,0.7)")
    parser.add_argument("--edits", type=int, help="edits of each kind (12)")
    parser.add_argument("--requests", type=int, help="requests of each schema and tool in a round (6)")
    parser.add_argument("--rows", help="requests of JSON and tool calls at a time (1,8)")
    parser.add_argument("--rounds", type=int, help="measurements of JSON and tool calls (7)")
    parser.add_argument("--tokens", type=int, help="tokens of JSON or a tool call, at most (768)")
    parser.add_argument("--threads", type=int, default=2, help="cores")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the model and its KV cache")
    embedded = ROOT / "models" / "embedded"
    parser.add_argument("--model", type=Path, default=embedded, help="directory of the model (embedded)")
    options = parser.parse_args()
    quick = options.quick
    options.parts = (options.parts or ",".join(measure.PARTS)).split(",")
    options.contexts = [int(n) for n in (options.contexts or ("512" if quick else "512,2048")).split(",")]
    options.temperatures = [
        float(t) for t in (options.temperatures or ("0.7" if quick else "0.0,0.7")).split(",")
    ]
    options.edits = options.edits or (1 if quick else 12)
    options.requests = options.requests or (1 if quick else 6)
    options.rows = [int(n) for n in (options.rows or ("1,2" if quick else "1,8")).split(",")]
    options.rounds = options.rounds or (1 if quick else 7)
    options.tokens = options.tokens or (64 if quick else 768)
    measure_and_publish(NAME, report, measured, options)


def measured(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The results of the parts that the options name, and what is stored of the others.

    Args:
        options: the options of the command.
        console: where progress is shown.
    """
    results = measure.run(options, console)
    file = results_file("tasks", results["cpu"], options.dtype)
    if options.quick or options.output or not file.exists():
        return results
    return measure.with_stored_parts(results, json.loads(file.read_text("utf-8")))


if __name__ == "__main__":
    main()
