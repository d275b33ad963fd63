"""Tables of the decoding benchmark: tokens per second of each engine, and the copy floor."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from ..harness.provenance import stamp
from ..harness.tables import Table, print_tables

NARROW = ("-half", "-int8", "-int4")  # engines that read fewer bytes than those of float32
MEASURED_CODE = ("entropic_jax", "models")  # every module that a step of decoding runs


FLOOR = ("MB/step", "copy floor", "ours", "of floor", "at median")  # columns of the engine in float32


def rate(value: float) -> str:
    """Tokens per second with three digits or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def floor(cell: dict[str, Any], results: dict[str, Any], kind: str = "best") -> float:
    """Tokens per second at which a step would take as long as copying moves the bytes it must read."""
    return cell["batch"] * results["bandwidth"]["copy"][kind] / cell["bytes_per_step"]


def rates(cell: dict[str, Any], engine: str, kind: str) -> str:
    """Median tokens per second of an engine with the range, or why there are none."""
    result = cell["engines"].get(engine, {})
    measured = result.get(f"{kind}_rate")
    if not measured:
        return "failed" if "error" in result else "–"
    text = f"{rate(measured['median'])} ({rate(measured['min'])}–{rate(measured['max'])})"
    return text + (" then failed" if "error" in result else "")


def ratio(cell: dict[str, Any], engine: str, kind: str) -> str:
    """Ours over an engine, of the medians; in the precision of the engine, if that was measured."""
    _, hyphen, precision = engine.partition("-")
    same = f"ours{hyphen}{precision}"
    name = same if same in cell["engines"] and same != engine else "ours"
    ours, other = (cell["engines"].get(which, {}).get(f"{kind}_rate") for which in (name, engine))
    return f"{ours['median'] / other['median']:.2f}×" if ours and other else "–"


def share(cell: dict[str, Any], engine: str, results: dict[str, Any], kind: str = "best") -> str:
    """The decoding speed of an engine over the floor; nothing for one that reads fewer bytes."""
    measured = cell["engines"].get(engine, {}).get("decode_rate")
    if not measured or engine.endswith(NARROW):
        return ""
    return f"{measured['median'] / floor(cell, results, kind):.0%}"


def tables(results: dict[str, Any]) -> list[Table]:
    """Speed of decoding, speed of prefill, and agreement, as text: one line for a cell."""
    cells = results["cells"]
    engines = [name for name in cells[0]["engines"] if name != "ours"]
    exact = "ours" in cells[0]["engines"]
    rows: dict[str, list[list[str]]] = {"decode": [], "prefill": [], "agreement": []}
    for cell in cells:
        place = [f"{cell['context']}", f"{cell['batch']}"]
        of_floor, speed = [], []
        if exact:
            shares = [share(cell, "ours", results, kind) for kind in ("best", "median")]
            step = [f"{cell['bytes_per_step'] / 1e6:.0f}", rate(floor(cell, results))]
            of_floor = [*step, rates(cell, "ours", "decode"), *shares]
            speed = [rates(cell, "ours", "prefill")]
        rows["decode"].append([*place, *of_floor])
        rows["prefill"].append([*place, *speed])
        for name in engines:
            for kind in ("decode", "prefill"):
                rows[kind][-1].append(f"{rates(cell, name, kind)} {ratio(cell, name, kind)}")
        for name, comparison in cell["agreement"].get("engines", {}).items():
            reference = cell["agreement"]["reference"]
            verdict = "the same" if comparison["first"] is None else f"first differ at {comparison['first']}"
            extent = "" if comparison["first"] is None else f", {comparison['rows']} of {cell['batch']} rows"
            rows["agreement"].append(
                [*place, f"{name} and {reference}", f"{comparison['tokens']}", verdict + extent]
            )
    speeds = [
        (
            "Decoding, tokens/s: median (least–greatest), and ours over it",
            ["context", "batch", *(FLOOR if exact else ()), *engines],
            rows["decode"],
        ),
        (
            "Prefill, tokens/s: median (least–greatest), and ours over it",
            ["context", "batch", *(["ours"] if exact else ()), *engines],
            rows["prefill"],
        ),
    ]
    agreement = ["context", "batch", "engines", "tokens per row", "agreement"]
    return [*speeds, ("Greedy tokens of the float32 engines", agreement, rows["agreement"])][: 2 + exact]


def notes(results: dict[str, Any]) -> list[str]:
    """Where and with what it was measured, what the engines chose, and every failure."""
    copy, read = results["bandwidth"]["copy"], results["bandwidth"]["read"]
    machine = f"{results['cpu']}, {results['threads']} threads for every engine, {results['date']}"
    figures = (f"{x['best'] / 1e9:.1f} GB/s at best, {x['median'] / 1e9:.1f} median" for x in (copy, read))
    lines = [
        f"{machine}, load before the start {results['load_average']:.1f}.",
        "Bandwidth in the same run: copy (read + written) {}; read only {}.".format(*figures),
    ]
    if "ours" in results["cells"][0]["engines"]:
        bandwidth = "the best copy bandwidth, or the median"
        lines.append(f"The floor is the bytes that a step must read over {bandwidth}.")
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
    for name, choices in details.items():
        only = len(choices) == 1
        lines.append(
            f"{name}: "
            + "; ".join(
                choice if only else f"{choice} at {', '.join(places)}" for choice, places in choices.items()
            )
            + "."
        )
    for cell in results["cells"]:
        for name, result in cell["engines"].items():
            if "error" in result and not result.get("decode_rate"):
                lines.append(f"{cell['context']} × {cell['batch']}, {name} failed: {result['error']}")
    return lines


def show(results: dict[str, Any], console: Console) -> None:
    """Print one line for every engine in every cell, the agreement of the tokens, and the notes."""
    table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
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
    print_tables(tables(results)[2:], notes(results), console)


def stamps(results: dict[str, Any]) -> str:
    """Date and commit, the same for all tables."""
    return stamp([results], MEASURED_CODE)
