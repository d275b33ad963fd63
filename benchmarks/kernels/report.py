"""Tables of the benchmark of kernels: milliseconds, bandwidth, and that over the copy bandwidth."""

import statistics
from typing import Any

from ..harness.provenance import stamp
from ..harness.tables import Table

MEASURED_CODE = ("entropic_jax/pallas", "entropic_jax/cpu_runtime", "models/experts.py")


def shape_text(shape: dict[str, Any]) -> str:
    """The sizes of a shape; the title of the table names them."""
    return " × ".join(map(str, shape.values()))


def tables(results: dict[str, Any]) -> list[Table]:
    """One table for each part: milliseconds, bytes over seconds, and that over the copy."""
    titles = {
        "attention": "Paged attention of one query per row",
        "prefill": "Causal attention of many queries",
        "choice": "Page selection",
        "topk_entropy": "Top-k and entropies of a batch of logits",
        "experts": "The experts of a mixture",
        "step": "A step of an 8B-shaped model, random weights",
    }
    header = ["shape", "engine", "pages read", "ms", "least–greatest", "GB/s", "of copy", "over dense"]
    tables_made: list[Table] = []
    for part, title in titles.items():
        if part not in results:  # was not measured
            continue
        entries = results[part]
        dense: dict[str, float] = {}
        rows = []
        for entry in entries:
            shape = shape_text(entry["shape"])
            if not entry["seconds"]:
                rows.append([shape, entry["engine"], "", "failed", entry.get("error", ""), "", "", ""])
                continue
            middle = statistics.median(entry["seconds"])
            dense.setdefault(shape, middle)
            rate = entry["bytes"] / middle
            between = f"{1e3 * min(entry['seconds']):.3f}–{1e3 * max(entry['seconds']):.3f}"
            kept = f"{entry['kept']:.3g}" if "kept" in entry else ""
            over = f"{middle / dense[shape]:.3f}"
            share = f"{rate / results['copy']['best']:.0%}"
            rows.append(
                [
                    shape,
                    entry["engine"],
                    kept,
                    f"{1e3 * middle:.3f}",
                    between,
                    f"{rate / 1e9:.1f}",
                    share,
                    over,
                ]
            )
        if entries:
            title += f": {' × '.join(entries[0]['shape'])}"
        tables_made.append((title, header, rows))
    return tables_made


def notes(results: dict[str, Any]) -> list[str]:
    """Where it was measured, and what the columns are."""
    copy, threads = results["copy"], results["threads"]
    device = f"{results['device']}{f', {threads} threads' if threads else ''}, jax {results['jax']}"
    clock = "on the clock" if results["platform"] == "cpu" else "that the device was busy, by its profiler"
    columns = "GB/s count what must be read; *over dense* is the time over that of a shape's first row"
    lines = [
        f"{device}, {results['date']}, load before the start {results['load_average']:.1f}.",
        f"Copy (read + written): {copy['best'] / 1e9:.1f} GB/s at best, {copy['median'] / 1e9:.1f} median.",
        f"Milliseconds are medians of the time {clock}; {columns}.",
    ]
    wrong = [finding for finding in results["checked"] if finding["problem"]]
    lines += [f"{x['operation']} by {x['chosen']} is wrong: {x['problem']}" for x in wrong]
    failed = [case for case in results["cases"] if case["verdict"].startswith("fails")]
    lines += [f"{x['operation']} {x['case']} {x['verdict']}" for x in failed]
    if not wrong:
        serving = ", ".join(f"{x['operation']} {x['chosen']}" for x in results["checked"])
        lines.append(f"Before the measurements every operation agreed with float64: {serving}.")
    return lines


def stamps(results: dict[str, Any]) -> str:
    """Date and commit, the same for all tables."""
    return stamp([results], MEASURED_CODE)
