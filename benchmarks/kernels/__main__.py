"""How fast the kernels are on the device at hand: attention, prefill, choice of pages, entropies, a step.

    python -m benchmarks.kernels [--quick] [--show RESULTS] [--document]

One call measures whatever the default device has. Seconds are those that the device was busy, by JAX's
profiler; on a CPU, those on the clock. On an accelerator every kernel is first compared with float64 on the
small cases of its tests; `python -m tests.pallas.table --show` then enters that into docs/kernels.md.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from entropic_jax.pallas import self_test

from . import (
    kernels_attention,
    kernels_checks,
    kernels_choice,
    kernels_prefill,
    kernels_step,
    kernels_topk,
    report,
)
from .kernels_timing import copy_bandwidth, on_cpu
from .worker import pin

PARTS = {
    "attention": kernels_attention.measure,
    "prefill": kernels_prefill.measure,
    "choice": kernels_choice.measure,
    "topk_entropy": kernels_topk.measure,
    "step": kernels_step.measure,
}


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Check and measure everything; the results as they are stored."""
    device = jax.local_devices()[0]
    results: dict[str, Any] = {
        **report.machine(console),
        "device": report.processor() if on_cpu() else device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "threads": options.threads if on_cpu() else None,
        "checked": [finding._asdict() for finding in self_test.run()],
        "cases": list(kernels_checks.run()),
        "copy": copy_bandwidth(options.quick),
    }
    for finding in results["checked"]:
        console.print(f"{finding['operation']}: {finding['chosen']}, {finding['problem'] or 'agrees'}")
    for case in results["cases"]:
        console.print(f"{case['operation']} {case['case']}: {case['verdict']}", highlight=False)
    for part in options.parts:
        results[part] = []
        for entry in PARTS[part](options.quick, options.repeat):
            results[part].append(entry)
            took = f"{1e3 * statistics.median(entry['seconds']):.3f} ms" if entry["seconds"] else "failed"
            console.print(f"{part} {name_of(entry['shape'])} {entry['engine']}: {took}", highlight=False)
    return results


def name_of(shape: dict[str, Any]) -> str:
    """A shape as numbers; what they are is in the title."""
    return " × ".join(map(str, shape.values()))


def grids(results: dict[str, Any]) -> list[report.Grid]:
    """One table for each part: milliseconds, bytes over seconds, and that over the copy."""
    titles = {
        "attention": "Paged attention of one query per row",
        "prefill": "Causal attention of many queries",
        "choice": "The choice of pages",
        "topk_entropy": "Top-k and entropies of a batch of logits",
        "step": "A step of an 8B-shaped model, random weights",
    }
    header = ["shape", "engine", "pages read", "ms", "least–greatest", "GB/s", "of copy", "over dense"]
    found = []
    for part, title in titles.items():
        entries = results.get(part, [])
        dense: dict[str, float] = {}
        rows = []
        for entry in entries:
            shape = name_of(entry["shape"])
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
        found.append((title, header, rows))
    return found


def notes(results: dict[str, Any]) -> list[str]:
    """Where it was measured, and what the columns are."""
    copy, threads = results["copy"], results["threads"]
    where = f"{results['device']}{f', {threads} threads' if threads else ''}, jax {results['jax']}"
    clock = "on the clock" if results["platform"] == "cpu" else "that the device was busy, by its profiler"
    columns = "GB/s are of what must be read; «over dense» is the time over that of the first line of a shape"
    lines = [
        f"{where}, {results['date']}, load before the start {results['load_average']:.1f}.",
        f"Copy (read + written): {copy['best'] / 1e9:.1f} GB/s at best, {copy['median'] / 1e9:.1f} median.",
        f"Milliseconds are medians of the time {clock}; {columns}.",
    ]
    wrong = [finding for finding in results["checked"] if finding["problem"]]
    lines += [f"{x['operation']} by {x['chosen']} is wrong: {x['problem']}" for x in wrong]
    failed = [case for case in results["cases"] if case["verdict"].startswith("fails")]
    lines += [f"{x['operation']} {x['case']} {x['verdict']}" for x in failed]
    if not wrong:
        served = ", ".join(f"{x['operation']} {x['chosen']}" for x in results["checked"])
        lines.append(f"Before, every operation agreed with float64: {served}.")
    return lines


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that everything runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(all)")
    parser.add_argument("--repeat", type=int, help="measurements of each time (10)")
    parser.add_argument("--threads", type=int, default=2, help="cores, on a CPU")
    parser.add_argument("--output", type=Path, help="file of the results (benchmarks/results/kernels-….json)")
    parser.add_argument("--show", type=Path, metavar="RESULTS", help="print stored results, measure nothing")
    parser.add_argument("--document", action="store_true", help="write the tables into docs/results.md")
    options = parser.parse_args()
    options.repeat = options.repeat or (2 if options.quick else 10)
    console = Console()
    if on_cpu() and not options.show:
        pin(options.threads)
    results = report.load_or_measure(options, "kernels", lambda: run(options, console), "device")
    report.publish(options, "kernels", grids(results), notes(results), console)


if __name__ == "__main__":
    main()
