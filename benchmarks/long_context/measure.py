"""Sparse prefill and cache compression on long prompts: quality at equal budgets, and time end to end.

    python -m benchmarks.long_context [--studies quality,speed] [--document]
    python -m benchmarks.long_context --files path/to/longbench/*.jsonl [--model DIR]

Every cell (a study, a context, a budget, a method) is stored as soon as it is measured; a run goes on where
the one before it ended.
"""

import argparse
import importlib.util
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from entropic_jax import loop, models, parameters
from entropic_jax.analysis.ablation import LN2, Subject
from entropic_jax.cache import allocate
from entropic_jax.calibration import load_calibration
from entropic_jax.control.presets import Gains, Preset, preset
from entropic_jax.methods import compaction
from entropic_jax.methods.method import Method
from entropic_jax.methods.registry import METHODS, method
from entropic_jax.models.train.recall import Filler
from entropic_jax.serving.generation import EMBEDDED
from entropic_jax.state import RUNNING, State

from . import long_context_report, report
from .ablation_shape import random_model
from .long_files import read_items, score
from .long_tasks import TASKS, Case, make_case
from .worker import ROOT

STUDIES = ("quality", "speed")
QUALITY = (*METHODS, "meso", "entropyinfer + meso")
SPEED = ("dense", "entropyinfer", "entropy-prefill", "criti-prefill", "snapkv", "meso", "entropyinfer + meso")
LONGEST = ("dense", "entropyinfer", "entropyinfer + meso")  # what is timed at the longest context
SHORTEST = ("dense", "entropyinfer")  # and where a prompt is too short for anything but dense reading
TAIL, ROWS, TOKENS = 320, len(TASKS), 128


def way(name: str, budget: int | None, gains: Gains | None = None, dense_below: int | None = None) -> Preset:
    """A method by name, perhaps with `+ meso`, with one budget for its prefill and its cache."""
    named, _, plus = name.partition(" + ")
    if named == "meso":
        named, plus = "dense", "meso"
    made = method(named, preset(plus or "off", gains=gains), base=budget, budget=budget)
    if made.page_policy is None:
        return made._replace(page_policy=Method())  # which counts what is spent
    if not isinstance(made.page_policy, Method):
        made = made._replace(page_policy=Method(steps=made.page_policy))
    prefill = made.page_policy.prefill
    if prefill is not None and dense_below is not None:
        prefill = replace(prefill, dense_below=dense_below)
    return made._replace(page_policy=replace(made.page_policy, prefill=prefill))


def begin(
    subject: Subject,
    setting: Preset,
    prompts: list[list[int]],
    context: int,
    tokens: int,
    belief: float = 1.0,
) -> State:
    """A state that has read the prompts under a method, greedy."""
    pool = allocate(subject.decoder.shape, len(prompts), context, page_size=setting.page_policy.page_size)
    state = loop.start(
        subject.decoder,
        subject.params,
        setting.controller,
        pool,
        prompts,
        key=jax.random.key(0),
        max_tokens=tokens,
        sample=parameters(len(prompts), temperature=0.0),
        page_policy=setting.page_policy,
        belief_temperature=belief,
    )
    return compaction.settle(state)


def forced(subject: Subject, setting: Preset, state: State, tails: np.ndarray) -> tuple[State, np.ndarray]:
    """The state after the given tokens `[rows, steps]`, and the surprisal of each in nats."""
    compression = setting.page_policy.compression
    first = 0 if compression is None else compression.after
    parts = []
    for piece in (tails[:, :first], tails[:, first:]):
        if piece.shape[1]:
            given = subject.decoder, subject.params, setting.controller, state
            state, trace = loop.replay(*given, jnp.asarray(piece))
            state = compaction.settle(state)
            parts.append(np.asarray(trace.surprisal).T)
    return state, np.concatenate(parts, 1)


class Quality:
    """The embedded model, and generated cases of held-out text and tasks."""

    def __init__(self, folder: Path, cases: int) -> None:
        self.cases = cases
        model = models.load(folder, "float32", progress=False)
        self.subject = Subject(model.decoder, model.params)
        found = load_calibration(folder)
        self.belief = found.temperature
        self.gains = Gains(low_entropy=found.low_entropy, high_entropy=found.high_entropy)
        spec = importlib.util.find_spec("rich")
        assert spec and spec.submodule_search_locations
        files = sorted(Path(spec.submodule_search_locations[0]).glob("*.py"))
        texts = [t for f in files if len(t := f.read_text("utf-8")) > 2000]
        self.filler = Filler(texts, Tokenizer.from_file(str(folder / "tokenizer.json")))

    def make(self, context: int) -> list[Case]:
        """The cases of a context, the same for every method; each task is asked first in its turn."""
        names = list(TASKS)
        cases = [
            make_case(
                np.random.default_rng((5, context, i)),
                context - TAIL // 4,
                self.filler,
                names[i % len(names)],
            )
            for i in range(self.cases)
        ]
        longest = max(len(case.prompt) for case in cases)
        if longest > context:
            raise ValueError(f"context is {context}; accepted are at least {longest}, to hold every task")
        return cases

    def measure(self, name: str, context: int, budget: int | None) -> dict[str, Any]:
        """One cell: the answers, and what reading and writing cost."""
        setting = way(name, budget, self.gains, dense_below=min(4096, context // 8))
        shape = self.subject.decoder.shape
        answers, products, positions, kv_bytes, held = [], 0.0, 0.0, 0.0, 0.0
        cases = self.make(context)
        for start in range(0, len(cases), ROWS):
            some = cases[start : start + ROWS]
            some_rows = some + [some[-1]] * (ROWS - len(some))
            tails = np.zeros((ROWS, TAIL), np.int32)
            for row, case in enumerate(some_rows):
                tails[row, : len(case.tail)] = case.tail[:TAIL]
            prompts = [case.prompt for case in some_rows]
            state = begin(self.subject, setting, prompts, context + TAIL, TAIL + 1, self.belief)
            spent = jax.device_get(state.page_policy_state.spent)
            state, surprisal = forced(self.subject, setting, state, tails)
            account = jax.device_get(state.ledger)
            for row, case in enumerate(some):
                products += float(spent.products[row])
                positions += float(spent.positions[row])
                kv_bytes += float(account.bytes_read[row]) - shape.weights * 4 * TAIL / ROWS
                held += float(account.kv_bytes[row])
                for task, places in case.answers.items():
                    if places.max() < TAIL:
                        mine = surprisal[row, places]
                        answers.append(
                            {
                                "task": task,
                                "asked": "first" if task == case.first else "later",
                                "right": bool((mine < LN2).all()),
                                "surprisal": float(mine.mean()),
                            }
                        )
        position = 2 * shape.head_dim * 4
        return {
            "answers": answers,
            "prefill_flops": 4 * shape.head_dim * products / len(cases),
            "prefill_bytes": position * positions / len(cases),
            "step_bytes": kv_bytes / len(cases) / TAIL,
            "held_bytes": held / len(cases),
        }


def timed(subject: Subject, name: str, context: int) -> dict[str, Any]:
    """Seconds of the prompt and of 128 tokens after it, one sequence, compilation not counted."""
    setting = way(name, None)

    def run(length: int) -> tuple[float, float, State]:
        rng = np.random.default_rng(context)
        prompt = rng.integers(0, subject.decoder.shape.vocabulary, length).tolist()
        began = time.perf_counter()
        state = begin(subject, setting, [prompt], context + TOKENS, TOKENS)
        jax.block_until_ready(state)
        read = time.perf_counter()
        while (np.asarray(state.status) == RUNNING).any():
            given = subject.decoder, subject.params, setting.controller, state
            state, _ = compaction.generate(*given, TOKENS, capacity=TOKENS)
        jax.block_until_ready(state.token)
        return read - began, time.perf_counter() - read, state

    run(min(context, 600))
    prompt_seconds, token_seconds, state = run(context)
    spent = jax.device_get(state.page_policy_state.spent)
    return {
        "prompt_seconds": prompt_seconds,
        "token_seconds": token_seconds,
        "seconds": prompt_seconds + token_seconds,
        "products": float(spent.products[0]),
        "held_bytes": float(state.ledger.kv_bytes[0]),
    }


def read_files(options: argparse.Namespace, console: Console, results: dict[str, Any]) -> None:
    """Answer the items of local LongBench and InfiniteBench files, and score what is said."""
    model = models.load(options.model, "float32")
    assert model.tokenizer is not None
    subject = Subject(model.decoder, model.params)
    for file in options.files:
        items = read_items(file)[: options.cases]
        for name in options.methods or QUALITY:
            scores = []
            for item in items:
                room = model.config.max_position_embeddings - item.tokens
                prompt = item.fitted(model.tokenizer.encode, room)
                setting = way(name, options.budgets[0])
                state = begin(subject, setting, [prompt], len(prompt) + item.tokens, item.tokens)
                said: list[int] = []
                while (np.asarray(state.status) == RUNNING).any():
                    given = subject.decoder, subject.params, setting.controller, state
                    state, trace = compaction.generate(*given, 64)
                    said += trace.token[np.asarray(trace.emitted[:, 0]), 0].tolist()
                scores.append(score(item, model.tokenizer.decode(said)))
            key = f"files/{file.stem}/{options.budgets[0]}/{name}"
            results["cells"][key] = {"score": float(np.mean(scores)), "items": len(items)}
            console.print(f"{key}: {np.mean(scores):.3f} of {len(items)} items")


def plan(options: argparse.Namespace) -> list[tuple[str, int, int | None, str, int]]:
    """The cells to measure: study, context, budget, method, number of the repetition."""
    cells: list[tuple[str, int, int | None, str, int]] = []
    if "quality" in options.studies:
        for context in options.contexts:
            for budget in options.budgets:
                for name in options.methods or QUALITY:
                    bounded = name not in ("dense", "meso")
                    cells.append(("quality", context, budget if bounded else None, name, 0))
    if "speed" in options.studies:
        longest = max(options.speed_contexts)
        for context in options.speed_contexts:
            few = SHORTEST if context <= 4096 else LONGEST if context == longest > 40_000 else SPEED
            names = options.methods or few
            for turn in range(3 if context < 20_000 else 1):
                cells += [("speed", context, None, name, turn) for name in names]
    return list(dict.fromkeys(cells))


def main() -> None:
    """Measure the cells that are missing, store and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    numbers = lambda text: [int(x) for x in text.split(",")]
    words = lambda text: text.split(",")
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--studies", type=words, default=list(STUDIES))
    parser.add_argument("--methods", type=words, help=f"of {', '.join(QUALITY)}")
    parser.add_argument("--contexts", type=numbers, default=[7800], help="tokens, for quality")
    parser.add_argument("--budgets", type=numbers, default=[256], help="tokens, for quality")
    parser.add_argument("--speed-contexts", type=numbers, default=[2048, 32768, 65536])
    parser.add_argument(
        "--cases", type=int, default=len(TASKS), help="documents per cell, each with a question per task"
    )
    parser.add_argument("--files", type=Path, nargs="+", help="LongBench or InfiniteBench files, instead")
    parser.add_argument("--output", type=Path, help="benchmarks/results/long-context-CPU.json")
    parser.add_argument("--show", type=Path, metavar="RESULTS", help="print stored results, measure nothing")
    parser.add_argument("--document", action="store_true", help="write the tables into docs/results.md")
    options = parser.parse_args()
    for argument, given, accepted in (
        ("--studies", options.studies, STUDIES),
        ("--methods", options.methods or (), QUALITY),
    ):
        if wrong := [x for x in given if x not in accepted]:
            parser.error(f"{argument} has {wrong[0]}; accepted are {', '.join(accepted)}")
    console = Console()
    if options.show:
        results = json.loads(options.show.read_text())
    else:
        results = measure(options, console)
    tables = long_context_report.grids(results)
    report.publish(options, "long_context", tables, long_context_report.notes(results), console)


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure what the stored results lack."""
    here = report.machine(console)
    slug = report.slug(here["cpu"])
    output = options.output or ROOT / "benchmarks" / "results" / f"long-context-{slug}.json"
    results = json.loads(output.read_text()) if output.exists() else {"cells": {}}
    results.update(here)
    output.parent.mkdir(parents=True, exist_ok=True)
    if options.files:
        read_files(options, console, results)
        output.write_text(json.dumps(results, indent=1) + "\n")
        return results
    quality = shape = None
    for study, context, budget, name, turn in plan(options):
        key = f"{study}/{context}/{budget}/{name}/{turn}"
        if key in results["cells"]:
            continue
        began = time.perf_counter()
        if study == "quality":
            quality = quality or Quality(options.model, options.cases)
            cell = quality.measure(name, context, budget)
        else:
            shape = shape or random_model()
            cell = timed(shape, name, context)
        cell |= {"study": study, "context": context, "budget": budget, "method": name}
        results["cells"][key] = cell
        output.write_text(json.dumps(results, indent=1) + "\n")
        console.print(f"{key}: {time.perf_counter() - began:.0f} s")
    return results


if __name__ == "__main__":
    main()
