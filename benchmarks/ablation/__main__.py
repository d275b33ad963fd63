"""Ablation: what each scale of control (micro, meso, macro) brings, and what it costs.

    python -m benchmarks.ablation [--studies quality,recall,…] [--quick] [--document]

Every study compares configurations in one run, taking turns, on text that the model was not trained on: the
source of `rich`, a held-out package that is installed with this one. An interrupted run continues where it
stopped: every measured cell is kept as a line of JSON.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console

from entropic_jax.serving.options.compilation_cache import remember_compilations
from entropic_jax.serving.options.model import EMBEDDED

from ..harness import paths
from ..harness.held_out_text import module_texts
from ..harness.provenance import describe_run, file_slug
from ..harness.publishing import publish
from . import plot, report
from .measure import STUDIES, Run
from .workload import load_workload


def main() -> None:
    """Run the requested studies, store and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--studies", type=lambda text: text.split(","), default=list(STUDIES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small: shows that everything runs")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument(
        "--engines",
        type=lambda text: [name for name in text.split(",") if name],
        default=["openvino", "openvino-half"],
        help="of benchmarks.decode, for the larger shape (openvino,openvino-half)",
    )
    default = os.environ.get("OPENVINO_PYTHON", sys.executable)
    parser.add_argument("--openvino-python", default=default, help="its interpreter ($OPENVINO_PYTHON)")
    parser.add_argument("--limit", type=float, default=240.0, help="most seconds of one call of an engine")
    folder = Path(tempfile.gettempdir()) / "entropic-decode"
    parser.add_argument("--work", type=Path, default=folder, help="keeps the weights of other engines")
    parser.add_argument("--output", type=Path, help="benchmarks/results/ablation-CPU.jsonl")
    parser.add_argument("--show", type=Path, metavar="RESULTS", help="print stored results, measure nothing")
    parser.add_argument("--document", action="store_true", help="write tables and plot into docs/results/")
    options = parser.parse_args()
    unknown = [s for s in options.studies if s not in STUDIES]
    if unknown:
        parser.error(f"--studies must be among {', '.join(STUDIES)}; got {unknown[0]}")
    console = Console()
    if not options.show:
        description = describe_run(console)
        stored = paths.RESULTS / f"ablation-{file_slug(description['cpu'])}.jsonl"
        options.show = options.output or (options.work / "quick.jsonl" if options.quick else stored)
        if options.fresh or (options.quick and not options.output):
            options.show.unlink(missing_ok=True)
        remember_compilations()
        texts = module_texts(longer_than=2000)
        workload = load_workload(options.model, texts)
        run = Run(options, workload, texts, options.show, description)
        if not run.rows:
            gains = run.workload.gains.asdict()
            run.keep({**description, "gains": gains})
        run.measure(console)
        console.print(f"results: {options.show}")
    results = report.load(options.show)
    publish("ablation", report, results, options.document, console)
    if options.document and results["studies"].get("selectors"):
        plot.draw(results, paths.PAGES / plot.FILE)


if __name__ == "__main__":
    main()
