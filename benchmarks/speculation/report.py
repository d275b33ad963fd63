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
)


def tables(results: dict[str, Any]) -> list[Table]:
    """Cost of a pass, and for every context and temperature the rate of each arm."""
    rows = []
    for entry in results["costs"]:
        seconds, plain = entry["seconds"], entry["seconds"]["0"]
        ratios = [f"{seconds[str(width)] / plain:.2f}" for width in WIDTHS]
        rows.append([str(entry["context"]), f"{1e3 * plain:.2f}", *ratios])
    header = ["tokens of context", "decode step, ms", *(f"{width} tokens" for width in WIDTHS)]
    result_tables: list[Table] = [("A verification pass ÷ a decode step, median", header, rows)]
    rows = []
    cells = dict.fromkeys((entry["context"], entry["temperature"]) for entry in results["rates"])
    for context, temperature in cells:
        entries = [e for e in results["rates"] if (e["context"], e["temperature"]) == (context, temperature)]
        kept = [entry for entry in entries if not entry["loops"]] or entries
        for name in kept[0]["arms"]:
            ratios = [e["arms"]["off"]["seconds"] / e["arms"][name]["seconds"] for e in kept]
            total = {
                key: sum(e["arms"][name][key] for e in kept)
                for key in ("tokens", "passes", "drafted", "accepted")
            }
            compared = sum(e["arms"][name]["equal"] for e in entries)
            equal = sum(e["arms"][name]["equal"] >= e["arms"]["off"]["tokens"] for e in entries)
            rows.append(
                [
                    str(context),
                    str(temperature),
                    name,
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})",
                    f"{total['tokens'] / max(1, total['passes']):.2f}",
                    f"{total['accepted'] / total['drafted']:.2f}" if total["drafted"] else "–",
                    f"{equal} of {len(entries)} ({compared} tokens)",
                    f"{len(entries) - len(kept)}",
                ]
            )
    header = ["context", "T", "drafts", "speed ÷ off, median (range)", "tokens a pass", "accepted ÷ verified"]
    header += ["texts equal to off", "looped, left out"]
    result_tables.append(("Decoding held-out text, one sequence", header, rows))
    return result_tables


def stamps(results: dict[str, Any]) -> str:
    """Date and commit."""
    return stamp([results], MEASURED_CODE)


def notes(results: dict[str, Any]) -> list[str]:
    """Where it was measured, and what the columns mean."""
    machine = f"{results['cpu']}, {results['threads']} threads, jax {results['jax']}"
    ratio = (
        "Both arms of a ratio decode the same prompt with the same seed, in turn. Prompts are not timed. "
        "A text that differs from `off` is compared up to its first tie."
    )
    return [f"{machine}; model {results['model']}, {results['dtype']}.", ratio]
