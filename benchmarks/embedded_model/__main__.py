"""Benchmark of a trained model against the bars that the embedded model is to meet.

    python -m benchmarks.embedded_model [--model DIR] [--held-out WORK/held_out.json] [--quick]

prints a table and, with `--output`, writes the figures as JSON: held-out bits per byte; recall of generated
facts at 2048 and 7500 tokens; whether texts from plain prompts hold templates or words of the tasks that the
model was trained on; how many greedy texts loop. The held-out text is that of a training folder, or the
modules of `rich`.
"""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from entropic_jax.serving.options.model import EMBEDDED

from . import bars, measure


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--held-out", type=Path, help="held_out.json of a training folder; none takes rich")
    parser.add_argument("--files", type=int, default=60, help="held-out files, for bits per byte")
    parser.add_argument("--cases", type=int, default=25, help="recall cases of each kind and distance")
    parser.add_argument("--texts", type=int, default=200, help="sampled texts")
    parser.add_argument("--greedy", type=int, default=20, help="greedy texts")
    parser.add_argument("--parts", default=",".join(measure.PARTS), help="which to measure")
    parser.add_argument("--quick", action="store_true", help="little of each: shows that everything runs")
    parser.add_argument("--output", type=Path, help="JSON file of the figures")
    options = parser.parse_args()
    if options.quick:
        options.files, options.cases, options.texts, options.greedy = 2, 2, 8, 4
    figures = measure.measure(options)
    table = Table("what", "figure", "bar", "met")
    for row in bars.rows(figures):
        table.add_row(row.what, row.figure, row.bar, "yes" if row.met else "no")
    Console().print(table)
    if options.output:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
