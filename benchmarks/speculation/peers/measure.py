"""Measurements of speculation beside other engines: every engine continues the same prompts, in turn."""

import argparse
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ...harness.baselines.drafting_engines import DRAFT, Tuned, engine_class
from ...harness.baselines.float32_model import write_float32
from ...harness.baselines.pool import EngineError, EnginePool
from ...harness.provenance import describe_run
from ..workload import loops, prompts

PLAIN = {"ours": "ours-off", "openvino": "openvino", "llamacpp": "llamacpp"}  # of each library
ENGINES = {  # and what drafts
    "ours-off": "nothing",
    "ours-suffix": "`suffix`",
    "ours-auto": "`auto`: suffix, draft head, few pages",
    "ours-draft": "suffix, draft model",
    "openvino": "nothing",
    "openvino-lookup": "prompt lookup",
    "openvino-draft": "draft model",
    "llamacpp": "nothing",
    "llamacpp-lookup": "prompt lookup",
}
TUNING_PROMPTS = 3  # not among those that are measured; the first of them is not timed either


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure every prompt with every engine.

    Args:
        options: the options of the command.
        console: where progress is shown.
    """
    directory = prepare(options)
    results: dict[str, Any] = {**describe_run(console), "threads": options.threads}
    results |= {"model": options.model.name, "dtype": "float32", "draft_layers": options.draft_layers}
    results |= {"context": options.context, "tokens": options.tokens}
    interpreters = {"openvino": options.openvino_python, "llamacpp": options.llamacpp_python}
    pool = EnginePool(directory, options.threads, options.limit, interpreters)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    calls = (1 + options.prompts * options.repeat) * len(options.engines)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=calls)

        def tick(description: str) -> None:
            progress.update(task, advance=1, description=description)

        try:
            results |= measure(pool, options, tick)
        finally:
            pool.close()
    return results | {"versions": pool.versions}


def prepare(options: argparse.Namespace) -> Path:
    """The folder with the weights in float32, and those of the draft model."""
    digest = hashlib.sha256((options.model / "model.safetensors").read_bytes()).hexdigest()[:12]
    layers = "-".join(map(str, options.draft_layers))
    work = options.work / f"{options.model.name}-{digest}-{layers}"
    write_float32(options.model, work)
    write_float32(options.model, work / DRAFT, options.draft_layers)
    return work


def measure(pool: EnginePool, options: argparse.Namespace, tick: Callable[[str], None]) -> dict[str, Any]:
    """The texts, the rates of every engine, what each chose, and failures.

    Args:
        pool: the engines.
        options: the options of the command.
        tick: called with a description before each measurement.
    """
    texts = prompts(
        "copy", options.model / "tokenizer.json", options.context, options.prompts + TUNING_PROMPTS
    )
    files = write_prompts(pool.directory, texts, options.prompts)
    failures: dict[str, str] = {}
    details: dict[str, str] = {}
    rates: list[dict[str, Any]] = []
    generated: dict[tuple[str, int], list[int]] = {}
    for name in options.engines:
        tick(f"{name}: compiles, and tries its settings")
        try:
            details[name] = _open(pool, name, options, files[-1])
        except EngineError as error:
            failures[name] = str(error)
    for repetition in range(options.repeat):
        for number in range(options.prompts):
            first = (number + repetition) % len(options.engines)
            for name in options.engines[first:] + options.engines[:first]:
                tick(f"text {number + 1}, {name}")
                if name in failures:
                    continue
                try:
                    entry, text = continue_text(pool, name, files[number], options.tokens)
                except EngineError as error:
                    failures[name] = str(error)
                    continue
                # Later texts of an engine are compared with its first.
                same = generated.setdefault((name, number), text) == text
                rates.append(
                    {"engine": name, "text": number, "repetition": repetition, "same": same, **entry}
                )
    if PLAIN["ours"] in failures:
        raise RuntimeError(f"{PLAIN['ours']} failed: {failures[PLAIN['ours']]}")
    described = [_describe(number, generated, texts[number], options) for number in range(options.prompts)]
    return {"texts": described, "rates": rates, "settings": details, "failures": failures}


def write_prompts(directory: Path, texts: list[list[int]], number: int) -> list[str]:
    """Files of the prompts, int32 `[1, context]`, and one of those that settings are tried on.

    Args:
        directory: where to write.
        texts: the tokens of all prompts.
        number: how many of them are measured.
    """
    arrays = [np.array(text, np.int32)[None] for text in texts[:number]]
    arrays.append(np.array(texts[number:], np.int32))
    files = [directory / f"prompt-{index}.npy" for index in range(len(arrays))]
    for file, array in zip(files, arrays, strict=True):
        np.save(file, array)
    return list(map(str, files))


def _open(pool: EnginePool, name: str, options: argparse.Namespace, file: str) -> str:
    """Start an engine, compile, choose its settings; what it chose, if anything.

    Args:
        pool: the engines.
        name: the name of the engine.
        options: the options of the command.
        file: the prompts that settings are tried on.
    """
    if name == f"openvino-{DRAFT}":
        drafts = EnginePool(pool.directory / DRAFT, options.threads, options.limit, pool.interpreters)
        drafts.prepare("openvino")
    pool.call(name, "open", 1, options.context + options.tokens)
    if issubclass(engine_class(name), Tuned):
        return pool.call(name, "tune", file, options.tokens)["detail"]
    single = f"{file}-single.npy"
    np.save(single, np.load(file)[:1])
    continue_text(pool, name, single, options.tokens)
    return ""


def continue_text(pool: EnginePool, name: str, file: str, tokens: int) -> tuple[dict[str, Any], list[int]]:
    """Continue a prompt: the measurements, and the tokens.

    Args:
        pool: the engines.
        name: the name of the engine.
        file: the prompt.
        tokens: the number of tokens to generate.
    """
    text = np.ravel(pool.call(name, "prefill", file)["tokens"]).tolist()
    first = len(text)  # they arrived together: time begins when they had
    answer = pool.call(name, "decode", tokens - first)
    text += np.ravel(answer["tokens"]).tolist()
    passes = answer["passes"] or tokens - first
    return {"seconds": answer["seconds"], "tokens": tokens - first, "passes": passes}, text


def _describe(
    number: int, generated: dict[tuple[str, int], list[int]], prompt: list[int], options: argparse.Namespace
) -> dict[str, Any]:
    """A text: whether it loops, how far it copies, and where each engine's first differs from plain decoding.

    Args:
        number: the number of the text.
        generated: the tokens, by engine and number.
        prompt: the tokens of the prompt, whose end is a copy of its beginning.
        options: the options of the command.
    """
    plain = generated[PLAIN["ours"], number]
    again = options.context // 4
    differences = {
        name: first_difference(generated[name, number], plain)
        for name in options.engines
        if (name, number) in generated
    }
    copied = first_difference(plain, prompt[again : again + len(plain)])
    return {
        "loops": loops(plain),
        "copied": len(plain) if copied is None else copied,
        "first_difference": differences,
    }


def first_difference(text: list[int], other: list[int]) -> int | None:
    """The number of tokens that both texts begin with; None if the texts are equal."""
    pairs = enumerate(zip(text, other, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), None)
    if first is None and len(text) != len(other):
        return min(len(text), len(other))
    return first
