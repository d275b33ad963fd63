"""Benchmark of optimisers: AdamW and Muon, each at several learning rates, on the same batches.

    python -m benchmarks.optimisers --work DIR --document

Every run is `models.train` from the same first weights over the same tokens, in windows of 1024 and with the
rate of any run: constant after its warm-up, falling in the last fifth. The score is the loss on the training
batches of the last tenth of the run, which no run has seen before (one pass over the text), and the seconds
are those of the steps alone. All runs are kept in `benchmarks/results/optimisers.json`.
"""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from ..harness.paths import RESULTS
from ..harness.provenance import describe_run
from ..harness.publishing import add_document_option, publish, write_json
from . import report
from .measure import RATES, prepare_corpus, run


def main() -> None:
    """Train every configuration, store and print the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimisers", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the corpus and the runs")
    parser.add_argument("--tokens", type=float, default=1.6e6)
    add_document_option(parser, "optimisers")
    options = parser.parse_args()
    console = Console()
    corpus = options.work / "corpus"
    prepare_corpus(corpus)
    results: dict[str, Any] = {**describe_run(console), "runs": []}
    for name, rates in RATES.items():
        for rate in rates:
            work = options.work / f"{name}-{rate:g}"
            results["runs"].append(run(corpus, work, name, rate, options.tokens))
            write_json(RESULTS / "optimisers.json", results)
            publish("optimisers", report, results, False, console)
    publish("optimisers", report, results, options.document, console)


if __name__ == "__main__":
    main()
