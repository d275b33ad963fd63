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
from . import model_options, serve, serve_setup
from .config_file import use_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `entropic doctor` takes."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--config",
        dest="server_config",
        metavar="FILE",
        help="YAML file of options of `serve`: show which back end serves each operation of that server here",
    )


def run(options: argparse.Namespace) -> int:
    """Print the report, and return the exit status."""
    report = examine()
    if options.server_config is not None:
        report["server"] = server_of(options.server_config)
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


def server_of(path: str) -> dict[str, Any]:
    """The page size of a server on this machine, and the back ends of its operations; loads no weights.

    Raises RequestError where the options, or the model that they name, cannot be used.
    """
    import jax

    from entropic_jax import models
    from entropic_jax.models.decoder import structure
    from entropic_jax.models.model import read_config
    from entropic_jax.pallas.paged_attention.quantised import bytes_per_number

    from ..engine import kernel_report
    from ..engine.options import sizes
    from ..options.kv_cache import pages_of
    from ..options.model import computing_dtype

    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    use_config(parser, path)
    stated = parser.parse_args([])
    stated.model = stated.path or stated.model
    try:
        options = serve_setup.engine_options_of(stated, serve_setup.settings_of(stated))
        config, dtype = read_config(stated.model), computing_dtype(options.dtype, stated.model)
        like = lambda x: jax.ShapeDtypeStruct(x.shape, dtype)
        params = jax.tree.map(like, structure(config)[1])
        model = models.Model(config, params)
        pages = pages_of(options.kv_cache_dtype, params)
        chosen = sizes(model, options, bytes_per_number(pages, model.decoder.shape.head_dim))
    except (OSError, ValueError, NotImplementedError) as error:
        raise model_options.loading_error(stated, error) from error
    attention = kernel_report.attention_shape(model, options, chosen)
    served = kernel_report.served_operations(model.decoder.shape, attention)
    return {
        "page_size": chosen.page_size,
        "kv_cache_dtype": str(pages),
        "operations": {operation.operation: operation.text for operation in served},
    }


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
    if "server" in report:
        server = report["server"]
        lines += ["", f"server: pages of {server['page_size']} positions of {server['kv_cache_dtype']}"]
        lines += [f"  {name:<28} {text}" for name, text in server["operations"].items()]
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
