"""Texts with drafts and without, for many sampling parameters and batch sizes: whether they are equal."""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from entropic_jax import LLM, SamplingParams

from ...harness.provenance import describe_run
from ..workload import prompts

CONTEXTS = 48, 160, 420  # tokens of the prompts, in turn
PAGE_SIZE = 16
SCARCE_ROWS = 16  # rows of the batch whose page pool is too small
SCARCE_SHARE = 0.35  # of the pages that its rows would need: sequences are preempted


class Setting(NamedTuple):
    """A way to sample, and the two presets whose texts must be equal."""

    name: str
    params: dict[str, Any]
    plain: str = "off"
    drafting: str = "meso"
    gains: tuple[tuple[str, Any], ...] = ()  # of both arms


PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.4, "frequency_penalty": 0.3}
STOPS = {"stop": ["\n\n", "return"], "stop_token_ids": [17, 300], "min_tokens": 8}
SETTINGS = (
    Setting("greedy", {"temperature": 0.0}),
    Setting("T 0.7", {"temperature": 0.7}),
    Setting("T 1, top-p 0.95", {"temperature": 1.0, "top_p": 0.95}),
    Setting("penalties", {"temperature": 0.8, **PENALTIES}),
    Setting("filters", {"temperature": 1.2, "top_k": 50, "min_p": 0.05, "typical_p": 0.9}),
    Setting("stops", {"temperature": 0.7, **STOPS}),
    Setting("micro", {"temperature": 1.0}, "micro", "full"),
    Setting("Mirostat", {"temperature": 1.0}, "micro", "full", (("law", "mirostat"),)),
)


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Compare the texts of every cell: a setting and a number of rows.

    Args:
        options: the options of the command.
        console: where progress is shown.
    """
    results: dict[str, Any] = {**describe_run(console), "jax": jax.__version__}
    results |= {"model": options.model.name, "dtype": "float32", "cells": []}
    tokenizer = options.model / "tokenizer.json"
    share = -(-options.prompts // len(CONTEXTS))
    texts = [prompts("held-out", tokenizer, context, share) for context in CONTEXTS]
    mixed = [text for group in zip(*texts, strict=True) for text in group][: options.prompts]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("texts", total=len(options.rows) * len(SETTINGS))
        for rows in options.rows:
            for arms in dict.fromkeys((s.plain, s.drafting, s.gains) for s in SETTINGS):
                settings = [s for s in SETTINGS if (s.plain, s.drafting, s.gains) == arms]
                results["cells"] += _cells(options, rows, settings, mixed, lambda: progress.advance(task))
    return results


def _cells(
    options: argparse.Namespace,
    rows: int,
    settings: list[Setting],
    texts: list[list[int]],
    advance: Callable[[], None],
) -> list[dict[str, Any]]:
    """The cells of one number of rows and one pair of presets: both engines, one after the other.

    Args:
        options: the options of the command.
        rows: number of rows of the batch.
        settings: with the same presets and gains.
        texts: tokens of the prompts.
        advance: called after each cell.
    """
    first = settings[0]
    plain, _ = _generate(options, first.plain, rows, settings, texts)
    drafted, counts = _generate(options, first.drafting, rows, settings, texts)
    cells = []
    for setting, count in zip(settings, counts, strict=True):
        pairs = list(zip(plain[setting.name], drafted[setting.name], strict=True))
        unequal = [i for i, (text, other) in enumerate(pairs) if text != other]
        cells.append(
            {
                "setting": setting.name,
                "presets": [setting.plain, setting.drafting],
                "rows": rows,
                "texts": len(pairs),
                "equal": len(pairs) - len(unequal),
                "tokens": sum(len(text[0]) for text, _ in pairs),
                "first_difference": {i: _first_difference(*pairs[i]) for i in unequal},
                **count,
            }
        )
        advance()
    return cells


def _first_difference(text: tuple, other: tuple) -> int:
    """The number of tokens that both texts begin with."""
    pairs = zip(text[0], other[0], strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text[0]), len(other[0])))


def _generate(
    options: argparse.Namespace, preset: str, rows: int, settings: list[Setting], texts: list[list[int]]
) -> tuple[dict[str, list[tuple]], list[dict[str, int]]]:
    """The texts of an engine for every setting, each with its reason to end, and what it counted meanwhile.

    Args:
        options: the options of the command.
        preset: the preset of the engine.
        rows: number of rows of the batch.
        settings: the settings that the engine runs, one after the other.
        texts: tokens of the prompts.
    """
    longest = max(CONTEXTS) + options.tokens + PAGE_SIZE
    pages = rows * -(-longest // PAGE_SIZE)
    scarce = {"num_pages": int(SCARCE_SHARE * pages)} if rows >= SCARCE_ROWS else {"num_pages": pages + 1}
    results: dict[str, list[tuple]] = {}
    counts = []
    with LLM(
        options.model,
        preset=preset,
        dtype="float32",
        max_num_seqs=rows,
        max_model_len=longest,
        block_size=PAGE_SIZE,
        enable_prefix_caching=False,
        warmup="none",
        **scarce,
        **dict(settings[0].gains),
    ) as llm:
        before = _counts(llm)
        for setting in settings:
            params = [
                SamplingParams(seed=1000 + i, max_tokens=options.tokens, **setting.params)
                for i in range(len(texts))
            ]
            outputs = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
            ended = [output.outputs[0] for output in outputs]
            results[setting.name] = [(tuple(o.token_ids), o.finish_reason, o.stop_reason) for o in ended]
            after = _counts(llm)
            counts.append({name: after[name] - before[name] for name in after})
            before = after
    return results, counts


def _counts(llm: LLM) -> dict[str, int]:
    """Counters of the engine so far."""
    snapshot = llm.snapshot()
    names = "preemptions", "num_draft_tokens", "num_accepted_tokens"
    return {name: int(snapshot[name]) for name in names}
