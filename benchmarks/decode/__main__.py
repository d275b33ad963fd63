"""Decoding benchmark: the speed of a decoding step on a CPU, of other engines, and by the memory bandwidth.

    python -m benchmarks.decode [--quick] [--engines ours,transformers,...] [--contexts ...] [--batches ...]

All engines load the same float32 weights, read the same random prompts and decode greedily, each in a process
of its own on the same cores. They take turns: after every measurement of one comes one of the next.
`benchmarks/README.md` says how to install the other engines; one that cannot run is reported as such.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from ..harness.baselines.engines import ENGINES
from ..harness.paths import PAGES
from ..harness.publishing import (
    PAGE_OF,
    add_document_option,
    results_file,
    section_text,
    write_json,
    write_section,
)
from . import measure, report

OPTIONAL = ("torch-compile", "ours-batched", "transformers-batched", "openvino-batched")
DEFAULT = [name for name, (_, kind) in ENGINES.items() if name not in OPTIONAL and not kind.startswith("int")]


def comma_separated_integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="a few tokens: shows that everything runs, not how fast"
    )
    parser.add_argument("--engines", type=lambda text: text.split(","), help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--contexts", type=comma_separated_integers, help="prompt lengths (512,4096,16384)")
    parser.add_argument("--batches", type=comma_separated_integers, help="batch sizes (1,8)")
    parser.add_argument("--repeat", type=int, help="measurements of each kind (3)")
    parser.add_argument("--threads", type=int, default=2, help="cores and threads of every engine")
    parser.add_argument("--limit", type=float, default=240.0, help="most seconds of one call of an engine")
    for name in ("openvino", "llamacpp"):
        variable = f"{name.upper()}_PYTHON"
        default = os.environ.get(variable, sys.executable)
        parser.add_argument(f"--{name}-python", default=default, help=f"its interpreter (${variable})")
    folder = Path(tempfile.gettempdir()) / "entropic-decode"
    parser.add_argument(
        "--work", type=Path, default=folder, help="keeps the weights in the form of each engine"
    )
    parser.add_argument(
        "--output", type=Path, help="file of the results (benchmarks/results/decode-CPU.json)"
    )
    parser.add_argument(
        "--show", type=Path, nargs="+", metavar="RESULTS", help="print stored runs, measure nothing"
    )
    add_document_option(parser, "decode")
    options = parser.parse_args()
    options.contexts = options.contexts or ([64, 256] if options.quick else [512, 4096, 16384])
    options.batches = options.batches or ([1, 2] if options.quick else [1, 8])
    options.repeat = options.repeat or (1 if options.quick else 3)
    options.engines = options.engines or DEFAULT
    unknown = [name for name in options.engines if name not in ENGINES]
    if unknown:
        parser.error(f"--engines must be among {', '.join(ENGINES)}; got {unknown[0]}")

    console = Console()
    if options.show:
        runs = [json.loads(path.read_text()) for path in options.show]
    else:
        runs = [results := measure.run(options, console)]
        stored = options.work / "quick.json" if options.quick else results_file("decode", results["cpu"])
        write_json(output := options.output or stored, results)
        console.print(f"results: {output}")
    for results in runs:
        report.show(results, console)
    if options.document:
        sections = [section_text(report, results) for results in runs]
        write_section(PAGES / PAGE_OF["decode"], "decode", "\n\n".join(sections))


if __name__ == "__main__":
    main()
