"""Serving benchmark: the server, other servers, its own offline loop, and its schedules under load.

    python -m benchmarks.serving [--studies throughput,latency,load] [--quick] [--document]
    LLAMACPP_PYTHON=… OPENVINO_PYTHON=… python -m benchmarks.serving  # interpreters that have these libraries

`throughput`: 64 requests at a time, every engine on the same prompts and weights, taking turns. `latency`:
time to the first token of a lone request, and of a bare prefill. `load`: more sequences than rows, by order
of admission, with limits that are loose. Prompts are cut from text that the model was not trained on.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from entropic_jax.serving.options.model import EMBEDDED

from ..harness.provenance import describe_run, processor_name
from ..harness.publishing import add_document_option, publish, results_file, write_json
from . import report
from .measure import STUDIES, ServingBenchmark


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--studies", type=lambda text: text.split(","), default=list(STUDIES))
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each kind")
    parser.add_argument("--threads", type=int, default=2, help="of every engine")
    parser.add_argument("--limit", type=float, default=600.0, help="most seconds of one call of an engine")
    parser.add_argument(
        "--utilisation", type=float, default=1.25, help="load, as a share of what FCFS can do"
    )
    for library in ("llamacpp", "openvino"):
        variable = f"{library.upper()}_PYTHON"
        default = os.environ.get(variable, sys.executable)
        parser.add_argument(f"--{library}-python", default=default, help=f"its interpreter (${variable})")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "entropic-serving")
    parser.add_argument("--quick", action="store_true", help="shows that everything runs, not how fast")
    parser.add_argument("--show", type=Path, metavar="RESULTS", help="print stored results, measure nothing")
    add_document_option(parser, "serving")
    options = parser.parse_args()
    unknown = [name for name in options.studies if name not in STUDIES]
    if unknown:
        parser.error(f"--studies must be among {', '.join(STUDIES)}; got {unknown[0]}")
    console = Console()
    results = json.loads(options.show.read_text("utf-8")) if options.show else measure(options, console)
    document = options.document and not options.quick
    publish("serving", report, results, document, console)


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run the studies that were asked for; stored results of the others are kept."""
    stored = results_file("serving", processor_name())
    file = options.work / stored.name if options.quick else stored
    results = json.loads(file.read_text("utf-8")) if file.exists() else {"studies": {}, "runs": {}}
    description = describe_run(console)
    results |= description | {"threads": options.threads, "utilisation": options.utilisation}
    benchmark = ServingBenchmark(options, options.work)
    try:
        for name in options.studies:
            results["studies"][name] = getattr(benchmark, name)()
            results["runs"][name] = {key: description[key] for key in ("date", "commit")}
    finally:
        benchmark.engines.close()
    if "throughput" in options.studies or "versions" not in results:
        results |= {"versions": benchmark.engines.versions, "failures": benchmark.failures}
    write_json(file, results)
    console.print(f"stored in {file}")
    return results


if __name__ == "__main__":
    main()
