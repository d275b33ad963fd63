"""Measurements of the kernels: checks against float64, then every part and its alternatives."""

import argparse
import statistics
from typing import Any

import jax
from rich.console import Console

from entropic_jax.pallas import self_test

from ..harness.provenance import describe_run, processor_name
from . import attention, checks, experts, prefill, selection, step, topk_entropy
from .report import shape_text
from .timing import copy_bandwidth, on_cpu

PARTS = {
    "attention": attention.measure,
    "prefill": prefill.measure,
    "choice": selection.measure,
    "topk_entropy": topk_entropy.measure,
    "experts": experts.measure,
    "step": step.measure,
}


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Check and measure everything; the results as they are stored."""
    device = jax.local_devices()[0]
    results: dict[str, Any] = {
        **describe_run(console),
        "device": processor_name() if on_cpu() else device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "threads": options.threads if on_cpu() else None,
        "checked": [result._asdict() for result in self_test.run()],
        "cases": list(checks.run()),
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
            console.print(f"{part} {shape_text(entry['shape'])} {entry['engine']}: {took}", highlight=False)
    return results
