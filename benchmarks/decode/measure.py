"""Measurements of decoding: every engine takes turns on the same prompts, one batch shape after another."""

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..harness.baselines.engines import ENGINES
from ..harness.baselines.pool import EngineError, EnginePool
from ..harness.baselines.reference_model import SHARED_PROMPT_FROM, prepare_weights, write_prompts
from ..harness.baselines.weights import CONFIG
from ..harness.paths import ROOT
from ..harness.provenance import describe_run

WARM_STEPS = 8
PREFILL_SECONDS = 15.0  # a prefill is repeated until all of them together took this long
KV_BYTES = 2 * 4 * CONFIG["num_hidden_layers"] * CONFIG["num_key_value_heads"] * CONFIG["head_dim"]


def spread(rates: list[float]) -> dict[str, float]:
    """Median, least and greatest of a list of rates."""
    return {"median": statistics.median(rates), "min": min(rates), "max": max(rates)}


def copy_rates(options: argparse.Namespace) -> dict[str, Any]:
    """Bandwidths as `benchmarks.harness.bandwidth` prints them."""
    megabytes, repeat = ("64", "2") if options.quick else ("512", "5")
    size = ["--threads", str(options.threads), "--megabytes", megabytes, "--repeat", repeat]
    command = [sys.executable, "-m", "benchmarks.harness.bandwidth", *size]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)


def measure_cell(
    engines: EnginePool, options: argparse.Namespace, context: int, batch: int, tick: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All engines at one context and batch: the entry of the results, and the bandwidths measured between."""
    steps = 8 if options.quick else min(128, max(32, 262144 // context))
    total = 1 + WARM_STEPS + options.repeat * steps
    prompts, start = write_prompts(engines.directory, batch, context)
    results: dict[str, Any] = {name: {"prefill": [], "decode": []} for name in options.engines}
    tokens: dict[str, list[np.ndarray]] = {}
    bandwidths = []

    def call(name: str, method: str, *arguments: int | str) -> dict[str, Any] | None:
        """The answer of an engine; None once it has failed in this cell, which is recorded."""
        tick(f"{context} × {batch}  {name} {method}")
        if "error" in results[name]:
            return None
        try:
            return engines.call(name, method, *arguments)
        except EngineError as error:
            results[name]["error"] = f"{method}: {error}"
            return None

    for name in options.engines:
        call(name, "open", batch, context + total + WARM_STEPS)
        call(name, "prefill", start)
    for _ in range(options.repeat):
        for name in options.engines:
            done = results[name]["prefill"]
            if sum(x["seconds"] for x in done) < PREFILL_SECONDS and (
                answer := call(name, "prefill", prompts)
            ):
                done.append({"seconds": answer["seconds"], "tokens": answer["read"]})
                tokens[name] = [np.array(answer["tokens"])[:, None]]
    for repetition in range(-1, options.repeat):
        method, count = ("warm", WARM_STEPS) if repetition < 0 else ("decode", steps)
        first = max(repetition, 0) % len(options.engines)
        for name in options.engines[first:] + options.engines[:first]:
            if answer := call(name, method, count):
                tokens[name].append(np.array(answer["tokens"]))
                if repetition >= 0:
                    results[name]["decode"].append({"seconds": answer["seconds"], "tokens": batch * steps})
                    results[name]["detail"] = answer["detail"]
        if repetition >= 0:
            bandwidths.append(copy_rates(options))
    for result in results.values():
        for kind in ("prefill", "decode"):
            if result[kind]:
                result[f"{kind}_rate"] = spread([x["tokens"] / x["seconds"] for x in result[kind]])
    exact = [name for name in tokens if ENGINES[name][1] == "float32"]
    generated = {name: np.concatenate(tokens[name], 1) for name in exact}
    # A step reads every weight once (the tied embedding as the head) and the keys and values up to itself.
    length = context + 1 + WARM_STEPS + options.repeat * steps / 2
    weights = (engines.directory / "huggingface" / "model.safetensors").stat().st_size
    cell = {
        "context": context,
        "batch": batch,
        "steps": steps,
        "shared_prompt": batch * context > SHARED_PROMPT_FROM,
        "bytes_per_step": weights + batch * length * KV_BYTES,
        "engines": results,
        "agreement": compare({n: x for n, x in generated.items() if x.shape[1] == total}),
    }
    return cell, bandwidths


def compare(tokens: dict[str, np.ndarray]) -> dict[str, Any]:
    """Where the greedy tokens `[rows, n]` of float32 engines first differ from those of transformers.

    The reference is the first engine where transformers is not among them. Of each other one: the smallest
    index at which a row differs (None: nowhere), how many rows do, and the number of tokens compared.
    """
    if len(tokens) < 2:
        return {}
    reference = "transformers" if "transformers" in tokens else next(iter(tokens))
    comparisons = {}
    for name, other in tokens.items():
        if name != reference:
            rows, places = np.nonzero(other != tokens[reference])
            first = int(places.min()) if places.size else None
            comparisons[name] = {"first": first, "rows": len(set(rows.tolist())), "tokens": other.shape[1]}
    return {"reference": reference, "engines": comparisons}


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure every cell; the results as they are stored."""
    directory = prepare_weights(options.work)
    description = describe_run(console)
    interpreters = {"openvino": options.openvino_python, "llamacpp": options.llamacpp_python}
    engines, cells, rates = EnginePool(directory, options.threads, options.limit, interpreters), [], []
    grid = [(context, batch) for context in options.contexts for batch in options.batches]
    calls = len(options.engines) * (3 + 2 * options.repeat)  # of a cell, at most
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(grid) * calls)

        def tick(description: str) -> None:
            progress.update(task, advance=1, description=description)

        try:
            for context, batch in grid:
                cell, bandwidths = measure_cell(engines, options, context, batch, tick)
                cells.append(cell)
                rates += bandwidths
                progress.update(task, completed=len(cells) * calls)
        finally:
            engines.close()
    bandwidth = {
        kind: {
            "best": max(rate[kind]["best"] for rate in rates),
            "median": statistics.median(rate[kind]["median"] for rate in rates),
        }
        for kind in ("copy", "read")
    }
    variables = ("GLIBC_TUNABLES", "GOMP_", "KMP_", "OMP_", "XLA_FLAGS", "MALLOC_", "LD_PRELOAD")
    return {
        **description,
        "threads": options.threads,
        "environment": {name: value for name, value in os.environ.items() if name.startswith(variables)},
        "versions": engines.versions,
        "model": CONFIG,
        "bandwidth": bandwidth,
        "bandwidth_measured": rates,
        "cells": cells,
    }
