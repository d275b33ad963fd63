"""Measurements of the long-context benchmark: quality at equal budgets, time end to end."""

import argparse
import itertools
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from entropic_jax import loop, models, parameters
from entropic_jax.analysis.ablation import LN2, Subject
from entropic_jax.calibration import load_calibration
from entropic_jax.methods import cache_compression
from entropic_jax.methods.head_needs import save_head_needs
from entropic_jax.methods.method import Method
from entropic_jax.methods.need_calibration import RankedProfile, head_needs, ranked_profile
from entropic_jax.methods.presets import Gains, Preset, preset
from entropic_jax.methods.registry import METHODS, add_method, budgets_of
from entropic_jax.models.train.recall import Filler
from entropic_jax.state import RUNNING, State
from entropic_jax.state.cache import allocate

from ..harness.baselines.reference_model import random_model
from ..harness.held_out_text import module_texts
from ..harness.provenance import describe_run
from ..harness.publishing import results_file, write_json
from .head_budgets.measure import LENGTH, SEGMENT, TABLE_PACKAGE, TEXTS, package_tokens
from .published_tasks import read_items, score
from .workload import TASKS, Case, make_case

STUDIES = ("quality", "speed")
BUDGETED, WEIGHED = "budgeted-prefill", "budgeted-prefill × exp(E)"
QUALITY = (*METHODS, WEIGHED, "meso-lossy", "entropyinfer + meso-lossy")
SPEED = (
    "dense",
    "entropyinfer",
    "entropy-prefill",
    "criti-prefill",
    "snapkv",
    "meso-lossy",
    "entropyinfer + meso-lossy",
)
UNBOUNDED = ("dense", "meso-lossy")  # methods without a budget
LONGEST = ("dense", "entropyinfer", "entropyinfer + meso-lossy")  # timed at the longest context
SHORTEST = ("dense", "entropyinfer")  # timed where the prompt is so short that prefill is dense
PUBLISHED = 512  # budget of a head, where none is stated
TAIL, ROWS, TOKENS = 320, len(TASKS), 128
CASES = 15 * len(TASKS)  # at least 100 questions that are asked first


class NeedTables:
    """Tables of head needs of a model, from the source of a package that no document is made of.

    Args:
        model: the model, with its tokenizer.
    """

    def __init__(self, model: models.Model) -> None:
        self.model = model
        self.profiles: list[RankedProfile] = []
        self.folder = tempfile.TemporaryDirectory()

    def file(self, name: str, budget: int) -> str | None:
        """The file of the table for a budget; None for a method that has no table."""
        if name not in (BUDGETED, WEIGHED):
            return None
        decoder = self.model.decoder
        if not self.profiles:
            assert self.model.tokenizer is not None
            length = min(LENGTH, self.model.config.longest_context)
            texts = package_tokens(self.model.tokenizer, TABLE_PACKAGE, length, TEXTS)
            self.profiles = [ranked_profile(decoder, self.model.params, text, SEGMENT) for text in texts]
        file = Path(self.folder.name) / f"{budget}.json"
        save_head_needs(head_needs(decoder.shape, self.profiles, budget), file)
        return str(file)


def configure(
    name: str,
    budget: int | None,
    gains: Gains | None = None,
    dense_below: int | None = None,
    table: str | None = None,
) -> Preset:
    """The preset of a method.

    Args:
        name: the name of the method, perhaps with `+ meso-lossy`.
        budget: tokens a KV head, for its prefill and its KV cache; None for the published one.
        gains: the gains of the control laws.
        dense_below: context up to which prefill is dense.
        table: file of the head needs, for a method that shares its budget by them.
    """
    base_name, _, addition = name.partition(" + ")
    if base_name == "meso-lossy":
        base_name, addition = "dense", "meso-lossy"
    extra: dict[str, Any] = {} if table is None else {"table": table}
    if base_name == WEIGHED:
        base_name, extra["entropy"] = BUDGETED, True
    chosen = preset(addition or "off", gains=gains)
    budgets = dict.fromkeys(budgets_of(base_name), budget)
    setting = add_method(base_name, chosen, **budgets, prefill_options=extra)
    if setting.page_policy is None:
        return setting._replace(page_policy=Method())  # counts what prefill costs
    if not isinstance(setting.page_policy, Method):
        setting = setting._replace(page_policy=Method(decode_policy=setting.page_policy))
    prefill = setting.page_policy.prefill
    if prefill is not None and dense_below is not None:
        prefill = replace(prefill, dense_below=dense_below)
    return setting._replace(page_policy=replace(setting.page_policy, prefill=prefill))


def begin(
    subject: Subject,
    setting: Preset,
    prompts: list[list[int]],
    context: int,
    tokens: int,
    belief: float = 1.0,
) -> State:
    """A state after prefill under a method, ready to decode greedily.

    Args:
        subject: the model.
        setting: the preset of the method.
        prompts: token ids of each row.
        context: most tokens of a row.
        tokens: most tokens after the prompt.
        belief: calibrated temperature of the belief.
    """
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
    return cache_compression.compress_due_rows(state)


def forced(subject: Subject, setting: Preset, state: State, tails: np.ndarray) -> tuple[State, np.ndarray]:
    """Teacher forcing under a method.

    Args:
        subject: the model.
        setting: the preset of the method.
        state: after prefill.
        tails: the tokens `[rows, steps]`.

    Returns:
        The state after them, and the surprisal of each in nats, `[rows, steps]`.
    """
    compression = setting.page_policy.compression
    first = 0 if compression is None else compression.delay
    parts = []
    for piece in (tails[:, :first], tails[:, first:]):
        if piece.shape[1]:
            arguments = subject.decoder, subject.params, setting.controller, state
            state, trace = loop.replay(*arguments, jnp.asarray(piece))
            state = cache_compression.compress_due_rows(state)
            parts.append(np.asarray(trace.surprisal).T)
    return state, np.concatenate(parts, 1)


class QualityStudy:
    """Quality of the embedded model on generated documents of held-out text and tasks."""

    def __init__(self, folder: Path, cases: int) -> None:
        self.cases = cases
        model = models.load(folder, "float32", progress=False)
        self.subject = Subject(model.decoder, model.params)
        calibration = load_calibration(folder)
        self.belief = calibration.temperature
        self.gains = Gains(low_entropy=calibration.low_entropy, high_entropy=calibration.high_entropy)
        texts = module_texts(longer_than=2000)
        self.need_tables = NeedTables(model)
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
            raise ValueError(f"context must be at least {longest}, to hold every task; got {context}")
        return cases

    def measure(self, name: str, context: int, budget: int | None) -> dict[str, Any]:
        """Measure one cell.

        Args:
            name: the name of the method.
            context: tokens of a document with its questions.
            budget: tokens a KV head; None for methods without one.

        Returns:
            The answers, and the cost of attention in prefill and decoding.
        """
        table = self.need_tables.file(name, budget or PUBLISHED)
        setting = configure(name, budget, self.gains, min(4096, context // 8), table)
        shape = self.subject.decoder.shape
        answers, products, positions, kv_bytes, held = [], 0.0, 0.0, 0.0, 0.0
        cases = self.make(context)
        for start in range(0, len(cases), ROWS):
            batch = cases[start : start + ROWS]
            padded = batch + [batch[-1]] * (ROWS - len(batch))
            tails = np.zeros((ROWS, TAIL), np.int32)
            for row, case in enumerate(padded):
                tails[row, : len(case.tail)] = case.tail[:TAIL]
            prompts = [case.prompt for case in padded]
            state = begin(self.subject, setting, prompts, context + TAIL, TAIL + 1, self.belief)
            spent = jax.device_get(state.page_policy_state.prefill_cost)
            state, surprisal = forced(self.subject, setting, state, tails)
            account = jax.device_get(state.ledger)
            for row, case in enumerate(batch):
                products += float(spent.products[row])
                positions += float(spent.positions[row])
                kv_bytes += float(account.bytes_read[row]) - shape.weights * 4 * TAIL / ROWS
                held += float(account.kv_bytes[row])
                for task, places in case.answers.items():
                    if places.max() < TAIL:
                        nats = surprisal[row, places]
                        answers.append(
                            {
                                "task": task,
                                "asked": "first" if task == case.first else "later",
                                "right": bool((nats < LN2).all()),
                                "surprisal": float(nats.mean()),
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


def measure_speed(subject: Subject, name: str, context: int) -> dict[str, Any]:
    """Seconds of prefill and of 128 tokens after it for one sequence, compilation excluded.

    Args:
        subject: the model.
        name: the name of the method.
        context: tokens of the prompt.
    """
    setting = configure(name, None)

    def run(length: int) -> tuple[float, float, State]:
        rng = np.random.default_rng(context)
        prompt = rng.integers(0, subject.decoder.shape.vocabulary, length).tolist()
        began = time.perf_counter()
        state = begin(subject, setting, [prompt], context + TOKENS, TOKENS)
        jax.block_until_ready(state)
        read = time.perf_counter()
        while (np.asarray(state.status) == RUNNING).any():
            arguments = subject.decoder, subject.params, setting.controller, state
            state, _ = cache_compression.generate(*arguments, TOKENS, capacity=TOKENS)
        jax.block_until_ready(state.token)
        return read - began, time.perf_counter() - read, state

    run(min(context, 600))
    prompt_seconds, token_seconds, state = run(context)
    spent = jax.device_get(state.page_policy_state.prefill_cost)
    return {
        "prompt_seconds": prompt_seconds,
        "token_seconds": token_seconds,
        "seconds": prompt_seconds + token_seconds,
        "products": float(spent.products[0]),
        "held_bytes": float(state.ledger.kv_bytes[0]),
    }


def measure_files(options: argparse.Namespace, console: Console, results: dict[str, Any]) -> None:
    """Answer the items of local LongBench and InfiniteBench files, and score the answers.

    Args:
        options: the options of the command line.
        console: where to print.
        results: receives a cell for each file and method.
    """
    model = models.load(options.model, "float32")
    assert model.tokenizer is not None
    subject, need_tables = Subject(model.decoder, model.params), NeedTables(model)
    for file in options.files:
        items = read_items(file)[: options.cases]
        names = options.methods or QUALITY
        for name, budget in itertools.product(names, options.budgets):
            if name in UNBOUNDED and budget != options.budgets[0]:
                continue
            scores = []
            for item in items:
                room = model.config.max_position_embeddings - item.tokens
                prompt = item.fitted(model.tokenizer.encode, room)
                table = need_tables.file(name, budget)
                setting = configure(name, None if name in UNBOUNDED else budget, table=table)
                state = begin(subject, setting, [prompt], len(prompt) + item.tokens, item.tokens)
                answer: list[int] = []
                while (np.asarray(state.status) == RUNNING).any():
                    arguments = subject.decoder, subject.params, setting.controller, state
                    state, trace = cache_compression.generate(*arguments, 64)
                    answer += trace.token[np.asarray(trace.emitted[:, 0]), 0].tolist()
                scores.append(score(item, model.tokenizer.decode(answer)))
            key = f"files/{file.stem}/{budget}/{name}"
            results["cells"][key] = {"score": float(np.mean(scores)), "items": len(items)}
            console.print(f"{key}: {np.mean(scores):.3f} of {len(items)} items")


def plan(options: argparse.Namespace) -> list[tuple[str, int, int | None, str, int]]:
    """The cells to measure: study, context, budget, method, number of the repetition."""
    cells: list[tuple[str, int, int | None, str, int]] = []
    if "quality" in options.studies:
        for context in options.contexts:
            for budget in options.budgets:
                for name in options.methods or QUALITY:
                    bounded = name not in UNBOUNDED
                    cells.append(("quality", context, budget if bounded else None, name, 0))
    if "speed" in options.studies:
        longest = max(options.speed_contexts)
        for context in options.speed_contexts:
            default = SHORTEST if context <= 4096 else LONGEST if context == longest > 40_000 else SPEED
            names = [name for name in options.methods or default if name not in (BUDGETED, WEIGHED)]
            for repetition in range(3 if context < 20_000 else 1):
                cells += [("speed", context, None, name, repetition) for name in names]
    return list(dict.fromkeys(cells))


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure the cells that the stored results do not have."""
    description = describe_run(console)
    output = options.output or results_file("long-context", description["cpu"])
    results = json.loads(output.read_text()) if output.exists() else {"cells": {}}
    results.update(description)
    if options.files:
        measure_files(options, console, results)
        write_json(output, results)
        return results
    quality = model = None
    for study, context, budget, name, repetition in plan(options):
        key = f"{study}/{context}/{budget}/{name}/{repetition}"
        stored = results["cells"].get(key)
        if stored and (study == "speed" or stored.get("cases", len(TASKS)) == options.cases):
            continue
        began = time.perf_counter()
        if study == "quality":
            quality = quality or QualityStudy(options.model, options.cases)
            cell = {**quality.measure(name, context, budget), "cases": options.cases}
        else:
            model = model or random_model()
            cell = measure_speed(model, name, context)
        cell |= {"study": study, "context": context, "budget": budget, "method": name}
        results["cells"][key] = cell
        write_json(output, results)
        console.print(f"{key}: {time.perf_counter() - began:.0f} s")
    return results
