"""How fast a step of decoding is on a CPU, beside other engines and beside the bandwidth of the memory.

    python -m benchmarks.decode [--quick] [--engines ours,transformers,...] [--contexts ...] [--batches ...]

All engines load the same float32 weights, read the same random prompts and decode greedily, each in a process
of its own on the same cores. They take turns: after every measurement of one comes one of the next.
`benchmarks/README.md` says how to install the peers; one that cannot run is reported as such.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import report
from .peers import ENGINES
from .weights import CONFIG, write_huggingface
from .worker import ROOT, PeerError, Peers

DEFAULT = [name for name in ENGINES if name not in ("torch-compile", "transformers-batched")]
WARM_STEPS = 8
PREFILL_SECONDS = 15.0  # a prefill is repeated until all of them together took this long
SHARED_PROMPT_FROM = 65536  # prompt tokens of a cell from which on its rows share one prompt
KV_BYTES = 2 * 4 * CONFIG["num_hidden_layers"] * CONFIG["num_key_value_heads"] * CONFIG["head_dim"]


def work_directory(parent: Path) -> Path:
    """The folder with the weights of this model and what was made of them, filled at the first run."""
    name = hashlib.sha256(json.dumps(CONFIG).encode()).hexdigest()[:12]
    directory = parent / f"llama-{name}"
    if not (directory / "huggingface" / "config.json").exists():
        write_huggingface(directory)
    return directory


def write_prompts(directory: Path, batch: int, context: int) -> tuple[str, str]:
    """Files with the prompts `int32 [batch, context]` of a cell, and with their first 2048 tokens."""
    shared = batch * context > SHARED_PROMPT_FROM
    rows = np.random.default_rng(context).integers(0, CONFIG["vocab_size"], (1 if shared else batch, context))
    prompts = np.broadcast_to(rows, (batch, context)).astype(np.int32)
    paths = directory / f"prompts-{batch}-{context}.npy", directory / f"prompts-{batch}-{context}-warm.npy"
    np.save(paths[0], prompts)
    np.save(paths[1], prompts[:, :2048])
    return str(paths[0]), str(paths[1])


def spread(rates: list[float]) -> dict[str, float]:
    """Median, least and greatest of a list of rates."""
    return {"median": statistics.median(rates), "min": min(rates), "max": max(rates)}


def copy_rates(options: argparse.Namespace) -> dict[str, Any]:
    """Bandwidths as `benchmarks.bandwidth` prints them."""
    megabytes, repeat = ("64", "2") if options.quick else ("512", "5")
    size = ["--threads", str(options.threads), "--megabytes", megabytes, "--repeat", repeat]
    command = [sys.executable, "-m", "benchmarks.bandwidth", *size]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)


def measure_cell(
    peers: Peers, options: argparse.Namespace, context: int, batch: int, tick: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All engines at one context and batch: the entry of the results, and the bandwidths measured between."""
    steps = 8 if options.quick else min(128, max(32, 262144 // context))
    total = 1 + WARM_STEPS + options.repeat * steps
    prompts, start = write_prompts(peers.directory, batch, context)
    results: dict[str, Any] = {name: {"prefill": [], "decode": []} for name in options.engines}
    tokens: dict[str, list[np.ndarray]] = {}
    bandwidths = []

    def ask(name: str, do: str, *arguments: int | str) -> dict[str, Any] | None:
        """The answer of an engine; None once it has failed in this cell, which is recorded."""
        tick(f"{context} × {batch}  {name} {do}")
        if "error" in results[name]:
            return None
        try:
            return peers.ask(name, do, *arguments)
        except PeerError as error:
            results[name]["error"] = f"{do}: {error}"
            return None

    for name in options.engines:
        ask(name, "open", batch, context + total + WARM_STEPS)
        ask(name, "prefill", start)
    for _ in range(options.repeat):
        for name in options.engines:
            done = results[name]["prefill"]
            if sum(x["seconds"] for x in done) < PREFILL_SECONDS and (
                answer := ask(name, "prefill", prompts)
            ):
                done.append({"seconds": answer["seconds"], "tokens": answer["read"]})
                tokens[name] = [np.array(answer["tokens"])[:, None]]
    for turn in range(-1, options.repeat):
        do, count = ("warm", WARM_STEPS) if turn < 0 else ("decode", steps)
        first = max(turn, 0) % len(options.engines)
        for name in options.engines[first:] + options.engines[:first]:
            if answer := ask(name, do, count):
                tokens[name].append(np.array(answer["tokens"]))
                if turn >= 0:
                    results[name]["decode"].append({"seconds": answer["seconds"], "tokens": batch * steps})
                    results[name]["detail"] = answer["detail"]
        if turn >= 0:
            bandwidths.append(copy_rates(options))
    for result in results.values():
        for kind in ("prefill", "decode"):
            if result[kind]:
                result[f"{kind}_rate"] = spread([x["tokens"] / x["seconds"] for x in result[kind]])
    whole = {name: np.concatenate(parts, 1) for name, parts in tokens.items() if not ENGINES[name][1]}
    # A step reads every weight once (the tied embedding as the head) and the keys and values up to itself.
    length = context + 1 + WARM_STEPS + options.repeat * steps / 2
    weights = (peers.directory / "huggingface" / "model.safetensors").stat().st_size
    cell = {
        "context": context,
        "batch": batch,
        "steps": steps,
        "shared_prompt": batch * context > SHARED_PROMPT_FROM,
        "bytes_per_step": weights + batch * length * KV_BYTES,
        "engines": results,
        "agreement": compare({n: x for n, x in whole.items() if x.shape[1] == total}),
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
    found = {}
    for name, other in tokens.items():
        if name != reference:
            rows, places = np.nonzero(other != tokens[reference])
            first = int(places.min()) if places.size else None
            found[name] = {"first": first, "rows": len(set(rows.tolist())), "tokens": other.shape[1]}
    return {"reference": reference, "engines": found}


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure every cell; the results as they are stored."""
    directory = work_directory(options.work)
    here = report.machine(console)
    interpreters = {"openvino": options.openvino_python, "llamacpp": options.llamacpp_python}
    peers, cells, rates = Peers(directory, options.threads, options.limit, interpreters), [], []
    grid = [(context, batch) for context in options.contexts for batch in options.batches]
    calls = len(options.engines) * (3 + 2 * options.repeat)  # of a cell, at most
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(grid) * calls)
        tick = lambda what: progress.update(task, advance=1, description=what)
        try:
            for context, batch in grid:
                cell, between = measure_cell(peers, options, context, batch, tick)
                cells.append(cell)
                rates += between
                progress.update(task, completed=len(cells) * calls)
        finally:
            peers.close()
    bandwidth = {
        kind: {
            "best": max(rate[kind]["best"] for rate in rates),
            "median": statistics.median(rate[kind]["median"] for rate in rates),
        }
        for kind in ("copy", "read")
    }
    knobs = ("GLIBC_TUNABLES", "GOMP_", "KMP_", "OMP_", "XLA_FLAGS", "MALLOC_", "LD_PRELOAD")
    return {
        **here,
        "threads": options.threads,
        "environment": {name: value for name, value in os.environ.items() if name.startswith(knobs)},
        "versions": peers.versions,
        "model": CONFIG,
        "bandwidth": bandwidth,
        "bandwidth_measured": rates,
        "cells": cells,
    }


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    integers = lambda text: [int(part) for part in text.split(",")]
    parser.add_argument(
        "--quick", action="store_true", help="a few tokens: shows that everything runs, not how fast"
    )
    parser.add_argument("--engines", type=lambda text: text.split(","), help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--contexts", type=integers, help="prompt lengths (512,4096,16384)")
    parser.add_argument("--batches", type=integers, help="batch sizes (1,8)")
    parser.add_argument("--repeat", type=int, help="measurements of each kind (3)")
    parser.add_argument("--threads", type=int, default=2, help="cores and threads of every engine")
    parser.add_argument("--limit", type=float, default=240.0, help="most seconds of one call of an engine")
    for name in ("openvino", "llamacpp"):
        variable = f"{name.upper()}_PYTHON"
        given = os.environ.get(variable, sys.executable)
        parser.add_argument(f"--{name}-python", default=given, help=f"its interpreter (${variable})")
    folder = Path(tempfile.gettempdir()) / "entropic-decode"
    parser.add_argument(
        "--work", type=Path, default=folder, help="keeps the weights in the form of each engine"
    )
    parser.add_argument(
        "--output", type=Path, help="file of the results (benchmarks/results/decode-CPU.json)"
    )
    parser.add_argument(
        "--show", type=Path, nargs="+", metavar="RESULTS", help="print stored runs, measure nothing"
    )
    parser.add_argument("--document", action="store_true", help="write the tables into docs/results.md")
    options = parser.parse_args()
    options.contexts = options.contexts or ([64, 256] if options.quick else [512, 4096, 16384])
    options.batches = options.batches or ([1, 2] if options.quick else [1, 8])
    options.repeat = options.repeat or (1 if options.quick else 3)
    options.engines = options.engines or DEFAULT
    unknown = [name for name in options.engines if name not in ENGINES]
    if unknown:
        parser.error(f"--engines has {unknown[0]}; accepted are {', '.join(ENGINES)}")

    console = Console()
    if options.show:
        runs = [json.loads(path.read_text()) for path in options.show]
    else:
        runs = [results := run(options, console)]
        stored = ROOT / "benchmarks" / "results" / f"decode-{report.slug(results['cpu'])}.json"
        output = options.output or (options.work / "quick.json" if options.quick else stored)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=1) + "\n")
        console.print(f"results: {output}")
    for results in runs:
        report.show(results, console)
    if options.document:
        texts = [report.markdown(report.grids(results), report.notes(results)) for results in runs]
        report.write_section(ROOT / "docs" / "results.md", "decode", "\n\n".join(texts))


if __name__ == "__main__":
    main()
