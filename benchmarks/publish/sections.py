"""Every section of docs/results, made from the stored raw measurements.

The folder of a benchmark has a module `report` (`harness.publishing.Report`) and perhaps `plot`. They are
found by the benchmark's name, so that a new benchmark is one line here.
"""

import importlib
import json
from pathlib import Path
from typing import Any

from ..harness.paths import RESULTS
from ..harness.publishing import section_text

ABLATION = RESULTS / "ablation-amd-epyc.jsonl"
NOT_MEASURED = "Not measured yet."
DECODE = [
    *(RESULTS / f"decode-amd-epyc{part}.json" for part in ("", "-16384", "-narrow")),
    *(RESULTS / f"decode-intel-xeon-processor{part}.json" for part in ("", "-8")),
]
LONG_CONTEXT = RESULTS / "long-context-amd-epyc.json"
FILES: dict[str, str | tuple[str, ...]] = {  # of the sections, one or several
    "ablation.certificate": "certificate-amd-epyc.json",
    "ablation.second_pass": "second-pass-amd-epyc.json",
    "ablation.experts": "experts-amd-epyc.json",
    "decode.quantization": "quantization-amd-epyc.json",
    "entropy": "entropy-amd-epyc.json",
    "kernels": ("kernels-amd-epyc.json", "kernels-intel-xeon-processor.json"),
    "long_context": LONG_CONTEXT.name,
    "long_context.head_budgets": "head-budgets-amd-epyc.json",
    "optimisers": "optimisers.json",
    "sampling": "sampling-amd-epyc.json",
    "sampling.temperature": "temperature-intel-xeon-processor.json",
    "scheduling": "scheduling-simulation.json",
    "serving": "serving-amd-epyc.json",
    "serving.draft_latency": "draft-latency-amd-epyc.json",
    "serving.interference": "interference-amd-epyc.json",
    "slices": "slices-amd-epyc.json",
    "soak": "soak-amd-epyc.json",
    "speculation": ("speculation-amd-epyc.json", "speculation-intel-xeon-processor-bfloat16.json"),
    "speculation.lengths": "lengths-amd-epyc.json",
    "speculation.lossless": "lossless-amd-epyc.json",
    "speculation.peers": "peers-amd-epyc.json",
    "speculation.signals": "signals-amd-epyc.json",
    "speculation.tasks": ("tasks-amd-epyc.json", "tasks-intel-xeon-processor-bfloat16.json"),
    "stability": "stability-intel-xeon-processor.json",
    "start_up": "start-up-intel-xeon-processor.json",
    "start_up.compilation": "compilation-intel-xeon-processor.json",
    "start_up.loading": "loading-intel-xeon-processor.json",
}


def module_of(benchmark: str, name: str) -> Any:
    """The module `report` or `plot` of a benchmark."""
    return importlib.import_module(f"benchmarks.{benchmark}.{name}")


REPORTS = {
    name: (
        module_of(name, "report"),
        [RESULTS / file for file in ([files] if isinstance(files, str) else files)],
    )
    for name, files in FILES.items()
}
ABLATION_REPORT, DECODE_REPORT = module_of("ablation", "report"), module_of("decode", "report")


def read(file: Path) -> dict[str, Any]:
    """Raw measurements of a file."""
    return json.loads(file.read_text("utf-8"))


def sections() -> dict[str, str]:
    """The Markdown of each benchmark's section, by its name."""
    texts = {
        name: "\n\n".join(section_text(report, read(file)) for file in files if file.exists()) or NOT_MEASURED
        for name, (report, files) in REPORTS.items()
    }
    texts["ablation"] = section_text(ABLATION_REPORT, ABLATION_REPORT.load(ABLATION))
    texts["decode"] = "\n\n".join(section_text(DECODE_REPORT, read(file)) for file in DECODE)
    return texts


def draw_plots(folder: Path) -> None:
    """Draw every plot of the pages into a folder."""
    plotted = {
        "ablation": ABLATION_REPORT.load(ABLATION),
        "decode": [read(file) for file in DECODE],
        "long_context": read(LONG_CONTEXT),
    }
    for name, results in plotted.items():
        plot = module_of(name, "plot")
        plot.draw(results, folder / plot.FILE)
