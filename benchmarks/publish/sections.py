"""Every section of docs/results, made from the stored raw measurements."""

import json
from pathlib import Path
from typing import Any

from ..ablation import plot as ablation_plot
from ..ablation import report as ablation
from ..decode import plot as decode_plot
from ..decode import report as decode
from ..entropy import report as entropy
from ..harness.paths import RESULTS
from ..harness.publishing import section_text
from ..kernels import report as kernels
from ..long_context import plot as long_context_plot
from ..long_context import report as long_context
from ..optimisers import report as optimisers
from ..sampling import report as sampling
from ..scheduling import report as scheduling
from ..serving import report as serving
from ..soak import report as soak
from ..speculation import report as speculation
from ..stability import report as stability
from ..temperature import report as temperature

ABLATION = RESULTS / "ablation-amd-epyc.jsonl"
DECODE = [RESULTS / f"decode-amd-epyc{part}.json" for part in ("", "-16384", "-16384-8")]
LONG_CONTEXT = RESULTS / "long-context-amd-epyc.json"
REPORTS = {  # benchmarks whose section comes from one file
    "entropy": (entropy, RESULTS / "entropy-amd-epyc.json"),
    "kernels": (kernels, RESULTS / "kernels-amd-epyc.json"),
    "long_context": (long_context, LONG_CONTEXT),
    "optimisers": (optimisers, RESULTS / "optimisers.json"),
    "sampling": (sampling, RESULTS / "sampling-amd-epyc.json"),
    "scheduling": (scheduling, RESULTS / "scheduling-simulation.json"),
    "serving": (serving, RESULTS / "serving-amd-epyc.json"),
    "soak": (soak, RESULTS / "soak-amd-epyc.json"),
    "speculation": (speculation, RESULTS / "speculation-intel-xeon-processor.json"),
    "stability": (stability, RESULTS / "stability-intel-xeon-processor.json"),
    "temperature": (temperature, RESULTS / "temperature-intel-xeon-processor.json"),
}


def read(file: Path) -> dict[str, Any]:
    """Raw measurements of a file."""
    return json.loads(file.read_text("utf-8"))


def sections() -> dict[str, str]:
    """The Markdown of each benchmark's section, by its name."""
    texts = {name: section_text(report, read(file)) for name, (report, file) in REPORTS.items()}
    texts["ablation"] = section_text(ablation, ablation.load(ABLATION))
    texts["decode"] = "\n\n".join(section_text(decode, read(file)) for file in DECODE)
    return texts


def draw_plots(folder: Path) -> None:
    """Draw every plot of the pages into a folder."""
    ablation_plot.draw(ablation.load(ABLATION), folder / ablation_plot.FILE)
    decode_plot.draw([read(file) for file in DECODE], folder / decode_plot.FILE)
    long_context_plot.draw(read(LONG_CONTEXT), folder / long_context_plot.FILE)
