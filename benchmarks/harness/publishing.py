"""Files of raw measurements (`benchmarks/results`) and pages with their tables (`docs/results`)."""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from . import paths
from .provenance import file_slug
from .tables import Table, markdown, print_tables

PAGE_OF = {  # the page that holds the tables of a benchmark
    "ablation": "ablation.md",
    "ablation.certificate": "ablation.md",
    "ablation.second_pass": "ablation.md",
    "ablation.experts": "experts.md",
    "decode": "decoding.md",
    "decode.quantization": "quantization.md",
    "entropy": "entropy.md",
    "kernels": "kernels.md",
    "long_context": "long-context.md",
    "long_context.head_budgets": "long-context.md",
    "optimisers": "training.md",
    "sampling": "sampling.md",
    "sampling.temperature": "sampling.md",
    "scheduling": "scheduling.md",
    "serving": "serving.md",
    "serving.draft_latency": "speculation.md",
    "serving.interference": "serving.md",
    "slices": "slices.md",
    "soak": "soak.md",
    "speculation": "speculation.md",
    "speculation.lengths": "speculation.md",
    "speculation.lossless": "speculation.md",
    "speculation.peers": "speculation.md",
    "speculation.signals": "speculation.md",
    "speculation.tasks": "speculation.md",
    "stability": "stability.md",
    "start_up": "start-up.md",
    "start_up.compilation": "start-up.md",
    "start_up.loading": "start-up.md",
}


def benchmark_parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """A parser of the options that most benchmarks share: `--quick`, `--output`, `--show`, `--document`.

    Args:
        description: the docstring of the command, whose first line the parser prints.
        name: the name of the benchmark.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that everything runs")
    stored = f"benchmarks/results/{name.rpartition('.')[2].replace('_', '-')}-….json"
    parser.add_argument("--output", type=Path, help=f"file of the results ({stored})")
    parser.add_argument("--show", type=Path, metavar="RESULTS", help="print stored results, measure nothing")
    add_document_option(parser, name)
    return parser


def add_document_option(parser: argparse.ArgumentParser, name: str) -> None:
    """Give a benchmark's parser the option `--document`."""
    page = f"docs/results/{PAGE_OF[name]}"
    parser.add_argument("--document", action="store_true", help=f"write the tables into {page}")


def results_file(name: str, device: str, dtype: str = "float32") -> Path:
    """The file of raw measurements of a benchmark on a device.

    Args:
        name: the name of the benchmark.
        device: the name of the device.
        dtype: the dtype of the model; the name of the file says so where it is not float32.
    """
    of_dtype = "" if dtype == "float32" else f"-{dtype}"
    return paths.RESULTS / f"{name}-{file_slug(device)}{of_dtype}.json"


def write_json(file: Path, results: Any) -> None:
    """Store results, making the folder if it is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


def load_or_measure(
    options: argparse.Namespace, name: str, measure: Callable[[], dict[str, Any]], device_field: str
) -> dict[str, Any]:
    """Stored results if `options.show` names some, else fresh ones, which are stored.

    Args:
        options: `show`, a file to read; `output`, a file to write; `quick`, which stores outside the tree.
        name: the name of the benchmark, the first part of the file's name.
        measure: makes the results.
        device_field: the entry of the results that names the device, the second part of the file's name.

    Returns:
        The results.
    """
    if options.show:
        return json.loads(options.show.read_text("utf-8"))
    results = measure()
    stored = results_file(name, results[device_field], results.get("dtype", "float32"))
    output = options.output or (Path(tempfile.gettempdir()) / stored.name if options.quick else stored)
    write_json(output, results)
    Console().print(f"results: {output}")
    return results


class Report(Protocol):
    """Interface of every benchmark's module `report`."""

    def tables(self, results: dict[str, Any]) -> list[Table]:
        """Title, header and rows of each table."""

    def notes(self, results: dict[str, Any]) -> list[str]:
        """Sentences that apply to all tables."""

    def stamps(self, results: dict[str, Any]) -> str | Mapping[str, str]:
        """Date and commit of all tables, or of each by its title."""


def section_text(report: Report, results: dict[str, Any]) -> str:
    """The tables of a benchmark as Markdown."""
    return markdown(report.tables(results), report.notes(results), report.stamps(results))


def publish(name: str, report: Report, results: dict[str, Any], document: bool, console: Console) -> None:
    """Print the tables of a benchmark, and write them into its page if asked to.

    Args:
        name: the name of the benchmark.
        report: its module of that name.
        results: raw measurements.
        document: whether to write the page.
        console: where to print.
    """
    print_tables(report.tables(results), report.notes(results), console)
    if document:
        write_section(paths.PAGES / PAGE_OF[name], name, section_text(report, results))


def measure_and_publish(
    name: str,
    report: Report,
    measure: Callable[[argparse.Namespace, Console], dict[str, Any]],
    options: argparse.Namespace,
    device_field: str = "cpu",
) -> None:
    """The end of most commands: measure or read results, store them, print them, write the page if asked to.

    Results of small sizes are not written into a page.

    Args:
        name: the name of the benchmark, as in `PAGE_OF`.
        report: its module of that name.
        measure: makes the results from the options, reporting its progress on the console.
        options: the parsed options of a `benchmark_parser`.
        device_field: the entry of the results that names the device.
    """
    console = Console()
    file_name = name.rpartition(".")[2].replace("_", "-")
    results = load_or_measure(options, file_name, lambda: measure(options, console), device_field)
    publish(name, report, results, options.document and not options.quick, console)


def section_markers(name: str) -> tuple[str, str]:
    """The lines before and after the section of a page that a benchmark writes."""
    return f"<!-- {name}: written by benchmarks.{name} -->", f"<!-- end of {name} -->"


def write_section(page: Path, name: str, text: str) -> None:
    """Put text between the markers of a section; at the end of the page, with markers, if it has none."""
    begin, end = section_markers(name)
    section = f"{begin}\n\n{text.strip()}\n\n{end}"
    old = page.read_text("utf-8") if page.exists() else ""
    if begin in old and end in old:
        before, _, rest = old.partition(begin)
        new = before + section + rest.partition(end)[2]
    else:
        new = f"{old.rstrip()}\n\n{section}\n".lstrip()
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(new, "utf-8")
