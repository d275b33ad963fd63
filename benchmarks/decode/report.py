"""Results as tables, in a terminal and in docs/results.md: in common, and of `benchmarks.decode`."""

import argparse
import datetime
import json
import os
import platform
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
Grid = tuple[str, list[str], list[list[str]]]  # title, header, rows


def processor() -> str:
    """The name of this machine's processor, as the operating system gives it."""
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def machine(console: Console) -> dict[str, Any]:
    """When and where it is measured, and how busy that is; warns if it is."""
    load = os.getloadavg()[0]
    if load > 0.5:
        console.print(f"[yellow]the machine is busy (load {load:.1f}): these numbers will mislead[/yellow]")
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": processor(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": load,
    }


def slug(name: str) -> str:
    """A name as part of a file name: `Intel(R) Xeon(R) Processor` becomes `intel-xeon-processor`."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", name.lower())).strip("-")


def rate(value: float) -> str:
    """Tokens per second with three digits or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def floor(cell: dict[str, Any], results: dict[str, Any], kind: str = "best") -> float:
    """Tokens per second at which a step would take as long as copying moves the bytes it must read."""
    return cell["batch"] * results["bandwidth"]["copy"][kind] / cell["bytes_per_step"]


def rates(cell: dict[str, Any], engine: str, kind: str) -> str:
    """Median tokens per second of an engine with the least and the greatest, or why there are none."""
    result = cell["engines"].get(engine, {})
    measured = result.get(f"{kind}_rate")
    if not measured:
        return "failed" if "error" in result else "–"
    text = f"{rate(measured['median'])} ({rate(measured['min'])}–{rate(measured['max'])})"
    return text + (" then failed" if "error" in result else "")


def ratio(cell: dict[str, Any], engine: str, kind: str) -> str:
    """Ours over an engine, of the medians."""
    ours, other = (cell["engines"].get(name, {}).get(f"{kind}_rate") for name in ("ours", engine))
    return f"{ours['median'] / other['median']:.2f}×" if ours and other else "–"


def share(cell: dict[str, Any], engine: str, results: dict[str, Any], kind: str = "best") -> str:
    """The decoding speed of an engine over the floor; nothing for one that reads fewer bytes."""
    measured = cell["engines"].get(engine, {}).get("decode_rate")
    if not measured or "-half" in engine:
        return ""
    return f"{measured['median'] / floor(cell, results, kind):.0%}"


def grids(results: dict[str, Any]) -> list[Grid]:
    """Speed of decoding, speed of prefill, and agreement, as text: one line for a cell."""
    cells = results["cells"]
    engines = [name for name in cells[0]["engines"] if name != "ours"]
    named: Callable[[dict[str, Any]], list[str]] = lambda cell: [f"{cell['context']}", f"{cell['batch']}"]
    rows: dict[str, list[list[str]]] = {"decode": [], "prefill": [], "agreement": []}
    for cell in cells:
        row = [*named(cell), f"{cell['bytes_per_step'] / 1e6:.0f}", rate(floor(cell, results))]
        shares = [share(cell, "ours", results, kind) for kind in ("best", "median")]
        rows["decode"].append([*row, rates(cell, "ours", "decode"), *shares])
        rows["prefill"].append([*named(cell), rates(cell, "ours", "prefill")])
        for name in engines:
            for kind in ("decode", "prefill"):
                rows[kind][-1].append(f"{rates(cell, name, kind)} {ratio(cell, name, kind)}")
        for name, found in cell["agreement"].get("engines", {}).items():
            reference = cell["agreement"]["reference"]
            verdict = "the same" if found["first"] is None else f"first differ at {found['first']}"
            where = "" if found["first"] is None else f", {found['rows']} of {cell['batch']} rows"
            rows["agreement"].append(
                [*named(cell), f"{name} and {reference}", f"{found['tokens']}", verdict + where]
            )
    return [
        (
            "Decoding, tokens/s: median (least–greatest), and ours over it",
            ["context", "batch", "MB/step", "copy floor", "ours", "of floor", "at median", *engines],
            rows["decode"],
        ),
        (
            "Prefill, tokens/s: median (least–greatest), and ours over it",
            ["context", "batch", "ours", *engines],
            rows["prefill"],
        ),
        (
            "Greedy tokens of the float32 engines",
            ["context", "batch", "engines", "tokens per row", "agreement"],
            rows["agreement"],
        ),
    ]


def notes(results: dict[str, Any]) -> list[str]:
    """Where and with what it was measured, what the engines chose, and every failure."""
    copy, read = results["bandwidth"]["copy"], results["bandwidth"]["read"]
    machine = f"{results['cpu']}, {results['threads']} threads for every engine, {results['date']}"
    figures = (f"{x['best'] / 1e9:.1f} GB/s at best, {x['median'] / 1e9:.1f} median" for x in (copy, read))
    lines = [
        f"{machine}, load before the start {results['load_average']:.1f}.",
        "Bandwidth in the same run: copy (read + written) {}; read only {}.".format(*figures),
        "The floor is the bytes that a step must read over the best copy bandwidth, or the median.",
    ]
    if results["versions"]:
        lines.append("; ".join(f"{name}: {version}" for name, version in results["versions"].items()) + ".")
    if results["environment"]:
        lines.append("Environment: " + ", ".join(f"{k}={v}" for k, v in results["environment"].items()) + ".")
    details: dict[str, dict[str, list[str]]] = {}
    for cell in results["cells"]:
        place = f"{cell['context']} × {cell['batch']}"
        for name, result in cell["engines"].items():
            if result.get("detail"):
                details.setdefault(name, {}).setdefault(result["detail"], []).append(place)
        if cell["shared_prompt"]:
            copied = [
                name
                for name, result in cell["engines"].items()
                if result["prefill"] and result["prefill"][0]["tokens"] < cell["context"] * cell["batch"]
            ]
            if copied:
                lines.append(
                    f"{place}: all rows have the same prompt; {', '.join(copied)} read it once and copied "
                    "its keys and values, so their prefill is that of one row."
                )
    for name, ways in details.items():
        only = len(ways) == 1
        lines.append(
            f"{name}: "
            + "; ".join(way if only else f"{way} at {', '.join(at)}" for way, at in ways.items())
            + "."
        )
    for cell in results["cells"]:
        for name, result in cell["engines"].items():
            if "error" in result:
                lines.append(f"{cell['context']} × {cell['batch']}, {name} failed: {result['error']}")
    return lines


def show(results: dict[str, Any], console: Console) -> None:
    """Print one line for every engine in every cell, the agreement of the tokens, and the notes."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    names = ("tokens/s", "engine", "decode", "least–most", "floor", "ours ÷", "prefill", "ours ÷")
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < 2 else "right", no_wrap=True)
    for cell in results["cells"]:
        table.add_section()
        table.add_row(
            f"{cell['context']} × {cell['batch']}", "copy floor", rate(floor(cell, results)), style="dim"
        )
        for name in cell["engines"]:
            decode, _, between = rates(cell, name, "decode").partition(" (")
            prefill = rates(cell, name, "prefill").partition(" (")[0]
            over = ["" if name == "ours" else ratio(cell, name, kind) for kind in ("decode", "prefill")]
            row = "", name, decode, between.rstrip(")"), share(cell, name, results), over[0], prefill, over[1]
            table.add_row(*row, style="bold" if name == "ours" else "")
    console.print(table)
    show_grids(grids(results)[-1:], notes(results), console)


def show_grids(grids: list[Grid], notes: list[str], console: Console) -> None:
    """Print tables that have rows, and the notes under them."""
    for title, header, rows in grids:
        if rows:
            table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, header_style="bold")
            for name in header:
                table.add_column(name, overflow="fold")
            for row in rows:
                table.add_row(*row)
            console.print(table)
    for line in notes:
        console.print(line, highlight=False, markup=False)


def markdown(grids: list[Grid], notes: list[str]) -> str:
    """The same for a document."""
    parts = []
    for title, header, rows in grids:
        if rows:
            lines = [header, ["---:"] * len(header), *rows]
            cells = ((cell.replace("|", "\\|") for cell in line) for line in lines)
            parts.append(f"**{title}**\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in cells))
    parts.append("\n".join(f"- {line}" for line in notes))
    return "\n\n".join(parts)


def load_or_measure(
    options: argparse.Namespace, name: str, measure: Callable[[], dict[str, Any]], place: str
) -> dict[str, Any]:
    """The results that `options.show` names, or those that are measured now and stored, small ones elsewhere.

    `place` is the entry of the results that says where it was measured.
    """
    if options.show:
        return json.loads(options.show.read_text())
    results = measure()
    folder = Path(tempfile.gettempdir()) if options.quick else ROOT / "benchmarks" / "results"
    output = options.output or folder / f"{name}-{slug(results[place])}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n")
    Console().print(f"results: {output}")
    return results


def publish(
    options: argparse.Namespace, name: str, grids: list[Grid], notes: list[str], console: Console
) -> None:
    """Print tables, and put them into docs/results.md if `options.document`."""
    show_grids(grids, notes, console)
    if options.document:
        write_section(ROOT / "docs" / "results.md", name, markdown(grids, notes))


def write_section(document: Path, name: str, text: str) -> None:
    """Put text between the markers of a section of a document; at its end, with markers, if it has none."""
    begin, end = f"<!-- {name}: written by benchmarks.{name} -->", f"<!-- end of {name} -->"
    section = f"{begin}\n\n{text.strip()}\n\n{end}"
    old = document.read_text("utf-8") if document.exists() else ""
    if begin in old and end in old:
        before, _, rest = old.partition(begin)
        new = before + section + rest.partition(end)[2]
    else:
        new = f"{old.rstrip()}\n\n{section}\n".lstrip()
    document.parent.mkdir(parents=True, exist_ok=True)
    document.write_text(new, "utf-8")
