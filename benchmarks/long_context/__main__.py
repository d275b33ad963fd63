"""Long-context benchmark: sparse prefill and KV-cache compression, quality at equal budgets, and time.

    python -m benchmarks.long_context [--studies quality,speed] [--document]
    python -m benchmarks.long_context --files path/to/longbench/*.jsonl [--model DIR]

Every cell (a study, a context, a budget, a method) is stored as soon as it is measured; an interrupted run
continues where it stopped.
"""

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console

from entropic_jax.serving.options.model import EMBEDDED

from ..harness.publishing import add_document_option, publish
from . import report
from .measure import CASES, QUALITY, STUDIES, measure


def main() -> None:
    """Measure the cells that are missing, store and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    numbers = lambda text: [int(x) for x in text.split(",")]
    words = lambda text: text.split(",")
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--studies", type=words, default=list(STUDIES))
    parser.add_argument("--methods", type=words, help=f"of {', '.join(QUALITY)}")
    parser.add_argument("--contexts", type=numbers, default=[7800], help="tokens, for quality")
    parser.add_argument(
        "--budgets", type=numbers, default=[64, 128, 256, 512, 1024], help="tokens, for quality"
    )
    parser.add_argument("--speed-contexts", type=numbers, default=[2048, 32768, 65536])
    parser.add_argument(
        "--cases",
        type=int,
        default=CASES,
        help=f"documents per cell, each with a question per task (default: {CASES})",
    )
    parser.add_argument(
        "--files", type=Path, nargs="+", help="LongBench, LongBench v2, InfiniteBench or RULER files, instead"
    )
    parser.add_argument("--output", type=Path, help="benchmarks/results/long-context-CPU.json")
    parser.add_argument("--show", type=Path, metavar="RESULTS", help="print stored results, measure nothing")
    add_document_option(parser, "long_context")
    options = parser.parse_args()
    for argument, values, choices in (
        ("--studies", options.studies, STUDIES),
        ("--methods", options.methods or (), QUALITY),
    ):
        if unknown := [x for x in values if x not in choices]:
            parser.error(f"{argument} must be among {', '.join(choices)}; got {unknown[0]}")
    console = Console()
    if options.show:
        results = json.loads(options.show.read_text())
    else:
        results = measure(options, console)
    publish("long_context", report, results, options.document, console)


if __name__ == "__main__":
    main()
