"""Benchmark of kernels on the default device: attention, prefill, page selection, entropies, a decoding step.

    python -m benchmarks.kernels [--quick] [--show RESULTS] [--document]

One call measures whatever the default device has. Seconds are those that the device was busy, by JAX's
profiler; on a CPU, those on the clock. On an accelerator every kernel is first compared with float64 on the
small cases of its tests; `python -m tests.pallas.table --show` then enters that into docs/kernels.md.
"""

import argparse
from pathlib import Path

from rich.console import Console

from ..harness.cores import pin_to_cores
from ..harness.publishing import add_document_option, load_or_measure, publish
from . import report
from .measure import PARTS, run
from .timing import on_cpu


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that everything runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(all)")
    parser.add_argument("--repeat", type=int, help="measurements of each time (10)")
    parser.add_argument("--threads", type=int, default=2, help="cores, on a CPU")
    parser.add_argument("--output", type=Path, help="file of the results (benchmarks/results/kernels-….json)")
    parser.add_argument("--show", type=Path, metavar="RESULTS", help="print stored results, measure nothing")
    add_document_option(parser, "kernels")
    options = parser.parse_args()
    options.repeat = options.repeat or (2 if options.quick else 10)
    console = Console()
    if on_cpu() and not options.show:
        pin_to_cores(options.threads)
    results = load_or_measure(options, "kernels", lambda: run(options, console), "device")
    publish("kernels", report, results, options.document, console)


if __name__ == "__main__":
    main()
