"""Check what this machine can run: devices, versions, and every kernel against the exact result.

Each operation of the loop is compiled for the default device by the back end that would serve it, and run
on a small case whose result is known in float64. The exit status is 1 if something is wrong.
"""

import argparse
import json
import os
import platform
import time
from typing import Any

from ..engine.installation import devices, versions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `entropic doctor` takes."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Print the report, and return the exit status."""
    report = examine()
    print(json.dumps(report, indent=1) if options.json else "\n".join(describe(report)))
    return 1 if report["problems"] else 0


def examine() -> dict[str, Any]:
    """Everything that is found out, as JSON has it."""
    report: dict[str, Any] = {
        "versions": versions(),
        "system": platform.platform(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if _matters(name)},
        "devices": [],
        "operations": [],
        "seconds": 0.0,
        "problems": [],
    }
    begin = time.perf_counter()
    try:
        report["devices"] = devices()
    except RuntimeError as error:
        report["problems"].append(f"JAX finds no device: {error}")
        return report
    from entropic_jax.pallas import self_test

    results = self_test.run()
    report["operations"] = [result._asdict() for result in results]
    report["problems"] += [f"{x.operation}: {x.problem}" for x in results if x.problem]
    report["seconds"] = time.perf_counter() - begin
    return report


def _matters(name: str) -> bool:
    return name.startswith(("ENTROPIC_", "JAX_", "XLA_", "LIBTPU_", "TPU_", "CUDA_", "NUMBA_"))


def describe(report: dict[str, Any]) -> list[str]:
    """The report as lines for a person."""
    lines = ["versions"]
    lines += [f"  {name:<18} {version or 'not installed'}" for name, version in report["versions"].items()]
    lines += ["", "devices"]
    for device in report["devices"]:
        size, capability = device["memory_bytes"], device["compute_capability"]
        memory = f", {size / 2**30:.1f} GiB" if size else ""
        known = f", compute capability {capability}" if capability else ""
        lines.append(f"  {device['platform']:<18} {device['kind']}{memory}{known}")
    if report["environment"]:
        lines += ["", "environment"]
        lines += [f"  {name}={value}" for name, value in report["environment"].items()]
    lines += ["", "operations"]
    for operation in report["operations"]:
        lines.append(f"  {operation['operation']:<28} {_verdict(operation)}")
        lines += [f"    {name:<12} declines: {reason}" for name, reason in operation["declined"].items()]
    lines += ["", *(f"problem: {problem}" for problem in report["problems"])]
    summary = f"{len(report['problems'])} problems" if report["problems"] else "all is well"
    return [*lines, f"{summary}, {report['seconds']:.1f} s"]


def _verdict(operation: dict[str, Any]) -> str:
    if operation["problem"]:
        return f"{operation['chosen'] or 'none'}: {operation['problem']}"
    return (
        f"{operation['chosen']}: compiled in {operation['compile_seconds']:.1f} s, "
        f"off by {operation['error']:.1g} (accepted {operation['tolerance']:g})"
    )
