"""Benchmark of samplers: tasks with checkable answers and free text, with what each sampler spends.

    python -m benchmarks.sampling [--quick] [--cases 24] [--seeds 2] [--document]
    python -m benchmarks.sampling --gsm8k FILE --humaneval FILE --model DIRECTORY

Samplers take turns, batch by batch. An interrupted run continues where it stopped. The first batch of every
shape is run twice and counted once: compilation is not measured.
"""

import json
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console

from entropic_jax.serving.options.model import EMBEDDED

from ..harness.publishing import benchmark_parser, publish
from . import report
from .measure import measure


def main() -> None:
    """Measure what is missing, store and print it."""
    parser = benchmark_parser(__doc__, "sampling")
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--cases", type=int, default=24, help="tasks of a kind and seed")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024, help="positions of a sequence")
    parser.add_argument(
        "--samplers", "--ways", type=lambda text: text.split(";"), help="some of the samplers, by ;"
    )
    parser.add_argument("--gsm8k", type=Path, metavar="FILE", help="JSON lines, in place of generated tasks")
    parser.add_argument("--humaneval", type=Path, metavar="FILE", help="the same")
    options = parser.parse_args()
    console = Console()
    if options.show:
        results = json.loads(options.show.read_text())
    else:
        results = measure(options, console)
    publish("sampling", report, results, options.document, console)


if __name__ == "__main__":
    main()
