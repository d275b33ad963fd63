"""Tables of the benchmark of speculation."""

import statistics
from typing import Any

from ..harness.provenance import stamp
from ..harness.tables import Table
from .workload import WIDTHS

MEASURED_CODE = (
    "entropic_jax/speculation",
    "entropic_jax/loop.py",
    "entropic_jax/pallas",
    "models/layers.py",
    "serving/engine",
    "models/embedded",
)
COUNTS = ("tokens", "passes", "drafted", "accepted")
ARM_HEADER = ("speed ÷ off, median (range)", "tokens a pass", "accepted ÷ verified")


def tables(results: dict[str, Any]) -> list[Table]:
    """Cost of a pass, and for every context and temperature the rate of each arm."""
    rows = []
    for entry in results["costs"]:
        seconds, plain = entry["seconds"], entry["seconds"]["0"]
        ratios = [f"{seconds[str(width)] / plain:.2f}" for width in WIDTHS]
        rows.append([str(entry["context"]), f"{1e3 * plain:.2f}", *ratios])
    header = ["tokens of context", "decode step, ms", *(f"{width} tokens" for width in WIDTHS)]
    suffix = of_dtype(results)
    result_tables: list[Table] = [(f"A verification pass ÷ a decode step, median{suffix}", header, rows)]
    rows = []

    def cell_of(entry):
        return (entry["text"], entry["context"], entry["temperature"])

    for cell in dict.fromkeys(map(cell_of, results["rates"])):
        entries = [entry for entry in results["rates"] if cell_of(entry) == cell]
        greedy = cell[2] == 0  # most greedy texts loop
        kept = [entry for entry in entries if greedy or not entry["loops"]] or entries
        for name in kept[0]["arms"]:
            compared = sum(e["arms"][name]["equal"] for e in entries)
            equal = sum(e["arms"][name]["equal"] >= e["arms"]["off"]["tokens"] for e in entries)
            rows.append(
                [
                    *map(str, cell),
                    name,
                    *arm_columns(kept, name),
                    f"{equal} of {len(entries)} ({compared} tokens)",
                    f"{len(entries) - len(kept)}",
                ]
            )
    header = [
        "text",
        "context",
        "T",
        "drafts",
        *ARM_HEADER,
        "texts equal to off",
        "looped, left out",
    ]
    result_tables.append((f"Decoding, one sequence{suffix}", header, rows))
    if results.get("batches"):
        title, header, rows = _batches(results["batches"])
        result_tables.append((title + suffix, header, rows))
    return result_tables


def of_dtype(results: dict[str, Any]) -> str:
    """Suffix of a table's title for the dtype of the model: none for float32."""
    dtype = results.get("dtype", "float32")
    return "" if dtype == "float32" else f", {dtype}"


def arm_columns(entries: list[dict[str, Any]], name: str) -> list[str]:
    """Columns of `ARM_HEADER` for an arm: speed, tokens of a pass, and acceptance.

    Args:
        entries: texts, as `measure.compare` returns them.
        name: the name of the arm.
    """
    arms = [entry["arms"][name] for entry in entries]
    ratios = [e["arms"]["off"]["seconds"] / arm["seconds"] for e, arm in zip(entries, arms, strict=True)]
    return [spread(ratios), *pass_columns(arms)]


def spread(ratios: list[float]) -> str:
    """The median of ratios, and their range."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def pass_columns(counts: list[dict[str, Any]]) -> list[str]:
    """Tokens a pass, and the share of the verified drafts that were accepted.

    Args:
        counts: the `COUNTS` of each text.
    """
    total = {key: sum(count[key] for count in counts) for key in COUNTS}
    accepted = f"{total['accepted'] / total['drafted']:.2f}" if total["drafted"] else "–"
    return [f"{total['tokens'] / max(1, total['passes']):.2f}", accepted]


def _batches(cells: list[dict[str, Any]]) -> Table:
    """The table of the batches that the serving engine decodes."""
    rows = []
    for cell in cells:
        plain, drafts = cell["rates"]["off"], cell["rates"]["auto"]
        ratios = [a / b for a, b in zip(drafts, plain, strict=True)]
        rows.append(
            [
                *(str(cell[key]) for key in ("text", "rows", "context", "temperature")),
                f"{statistics.median(plain):.0f}",
                spread(ratios),
                f"{cell['equal']} of {cell['texts']}",
                f"{cell['loops']}",
            ]
        )
    header = [
        "text",
        "rows",
        "context",
        "T",
        "off, tokens/s",
        "auto ÷ off, median (range)",
        "texts equal",
        "looped",
    ]
    return "Decoding, batches, through the engine", header, rows


def stamps(results: dict[str, Any]) -> str:
    """Date and commit."""
    return stamp([results], MEASURED_CODE)


def notes(results: dict[str, Any]) -> list[str]:
    """Where it was measured, and what the columns mean."""
    machine = f"{results['cpu']}, {results['threads']} threads, jax {results['jax']}"
    if xla_threads := results.get("xla_threads"):
        machine += f", NPROC={xla_threads}"
    ratio = (
        "All arms decode the same prompt and seed, launch by launch in turn. Prompts are not timed. "
        "A text that differs from `off` is compared up to its first tie."
    )
    texts = (
        "`held-out`: code from modules that the model has not seen; `copy`: such code, and its first third "
        "once more; `random`: tokens drawn uniformly."
    )
    return [f"{machine}; model {results['model']}, {results['dtype']}.", ratio, texts]
