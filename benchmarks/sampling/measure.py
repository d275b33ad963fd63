"""Measurements of the benchmark of samplers: tasks with checkable answers, and free text."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console

from entropic_jax.analysis.ablation import distinct

from ..harness.held_out_text import module_texts
from ..harness.loops import loops
from ..harness.provenance import describe_run
from ..harness.publishing import results_file, write_json
from . import workload
from .samplers import SamplerBenchmark
from .workload import Task

ROWS = 8  # tasks at once
FREE_TEXT_TOKENS = 192


def held_out_source() -> list[str]:
    """Long modules of held-out source code."""
    return module_texts("[a-z]*.py", longer_than=8000)


def task_sets(options: argparse.Namespace) -> Iterator[tuple[str, int, list[Task]]]:
    """(kind, seed, tasks) in the order in which they are measured."""
    cases = ROWS if options.quick else options.cases
    filler = "".join(held_out_source()[0].splitlines(keepends=True)[40:64])
    for name in ("gsm8k", "humaneval"):
        if path := getattr(options, name):
            yield name, 0, getattr(workload, name)(path)
    if not (options.gsm8k or options.humaneval):
        for seed in range(1 if options.quick else options.seeds):
            for kind in workload.KINDS:
                yield kind, seed, workload.generated(kind, cases, seed, filler)


def solve(benchmark: SamplerBenchmark, name: str, tasks: list[Task], seed: int) -> dict[str, Any]:
    """Solve a set of tasks with one sampler.

    Args:
        benchmark: the model and its samplers.
        name: the name of the sampler.
        tasks: to solve, `ROWS` at a time.
        seed: the seed of the noise.

    Returns:
        Which tasks were solved, and the tokens and seconds that were spent.
    """
    solved, tokens, seconds, roofline = [], 0, 0.0, 0.0
    for first in range(0, len(tasks), ROWS):
        chunk = tasks[first : first + ROWS]
        prompts = [benchmark.tokenizer.encode(task.prompt) for task in chunk]
        batch = benchmark.run(name, prompts, max(task.tokens for task in chunk), 1000 * seed + first)
        texts = [benchmark.tokenizer.decode(text) for text in batch.texts]
        solved += [task.check(text) for task, text in zip(chunk, texts, strict=True)]
        tokens, seconds = tokens + batch.computed, seconds + batch.seconds
        roofline += batch.roofline
    return {"solved": [int(x) for x in solved], "tokens": tokens, "seconds": seconds, "roofline": roofline}


def write_free_text(benchmark: SamplerBenchmark, name: str, seed: int, tokens: int) -> dict[str, Any]:
    """Generate free text after stretches of held-out source.

    Args:
        benchmark: the model and its samplers.
        name: the name of the sampler.
        seed: the seed of the stretches and the noise.
        tokens: number of tokens of each text.

    Returns:
        Distinct 4-grams, which texts end in a loop, and the tokens and seconds that were spent.
    """
    rng = np.random.default_rng((seed, 77))
    texts = [benchmark.tokenizer.encode(text) for text in held_out_source()]
    chosen = [texts[int(i)] for i in rng.integers(0, len(texts), ROWS)]
    offsets = [int(rng.integers(0, len(text) - 200)) for text in chosen]
    prompts = [text[at : at + 128] for text, at in zip(chosen, offsets, strict=True)]
    batch = benchmark.run(name, prompts, tokens, seed)
    return {
        "distinct_4": distinct(batch.texts, 4),
        "loops": [int(loops(text)) for text in batch.texts],
        "tokens": batch.computed,
        "seconds": batch.seconds,
    }


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure what the output file does not have yet."""
    description = describe_run(console)
    name = "sampling-quick" if options.quick else "sampling"
    output = options.output or results_file(name, description["cpu"])
    results = json.loads(output.read_text()) if output.exists() else {**description, "tasks": [], "texts": []}
    benchmark = SamplerBenchmark(options.model, options.context)
    names = options.samplers or list(benchmark.samplers)
    unknown = [name for name in names if name not in benchmark.samplers]
    if unknown:
        raise SystemExit(f"--samplers must be among {'; '.join(benchmark.samplers)}; got {unknown[0]!r}")
    results["settings"] = {"cases": options.cases, "context": options.context, "rows": ROWS}
    done = {(r["sampler"], r["kind"], r["seed"]) for r in results["tasks"]}
    written = {(r["sampler"], r["seed"]) for r in results["texts"]}

    def store() -> None:
        write_json(output, results)

    for task, seed, tasks in task_sets(options):
        for name in names:
            if (name, task, seed) not in done:
                outcome = solve(benchmark, name, tasks, seed)
                results["tasks"].append({"sampler": name, "kind": task, "seed": seed, **outcome})
        store()
        console.print(f"{task}, seed {seed}: {len(tasks)} tasks")
    for seed in range(1 if options.quick else options.seeds):
        for name in names:
            if (name, seed) not in written:
                outcome = write_free_text(benchmark, name, seed, 32 if options.quick else FREE_TEXT_TOKENS)
                results["texts"].append({"sampler": name, "seed": seed, **outcome})
        store()
        console.print(f"free text, seed {seed}")
    console.print(f"results: {output}")
    return results
