"""Benchmark of start-up: from the start of a process to its first token, or to its exit.

    python -m benchmarks.start_up [--repeat 5] [--document]

`generate` writes 20 tokens and exits; `serve` answers a streamed request that waits for it, and its memory is
read once all programs are there. Each runs once with empty caches and then with those of that run. A control
has every cache but that of compiled programs (`ENTROPIC_PROGRAM_CACHE=`), so that it traces programs and
finds them in JAX's cache.
"""

import argparse
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console

from ..harness.provenance import describe_run
from ..harness.publishing import benchmark_parser, measure_and_publish
from . import measure, report


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = benchmark_parser(__doc__, "start_up")
    parser.add_argument("--repeat", type=int, default=5, help="starts with filled caches, of each kind")
    options = parser.parse_args()
    measure_and_publish("start_up", report, run, options)


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Every command with every preset, cold and warm."""
    description = describe_run(console)
    commands, repeat = (("generate",), 1) if options.quick else (tuple(measure.COMMANDS), options.repeat)
    return {**description, "starts": measure.measure(commands, repeat, console)}


if __name__ == "__main__":
    main()
