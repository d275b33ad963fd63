"""Latency of streams: two servers, one of which drafts, get the same requests at the same times, in turn."""

import argparse
import tempfile
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from entropic_jax.serving.bench import arrivals as laws
from entropic_jax.serving.bench.arrivals import Arrival
from entropic_jax.serving.bench.client import Outcome
from entropic_jax.serving.bench.measures import distribution, pauses, summary
from entropic_jax.serving.bench.prompts import Prompts

from ...harness.held_out_text import module_tokens
from ...harness.provenance import describe_run
from ...harness.server_process import ServerProcess, ours, running
from ..workload import drive, engine_state, sustained

OFF, ON = "off", "meso"  # presets with the same texts
TEXTS = 64, 192  # tokens of a text, drawn uniformly from this range, both included
QUICK_TEXTS = 8, 16
QUEUE = 2  # requests for each row while the sustained rate is measured
DRAFTED, ACCEPTED = "num_draft_tokens", "num_accepted_tokens"  # counts of the engine
CAPACITY_SEED = 7  # of the prompts; those of the runs have the seeds after it


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The runs of every cell.

    Args:
        options: the options of the command.
        console: where progress is printed.
    """
    results = describe_run(console) | {"model": options.model.name, "dtype": "float32", "rows": options.rows}
    results |= {"load": options.load, "temperature": options.temperature, "cells": []}
    tokens = module_tokens(options.model / "tokenizer.json")
    longest = max(options.contexts) + TEXTS[1] + 1
    warmup = "min" if options.quick else "full"
    size = ("--max-num-seqs", str(options.rows), "--max-model-len", str(longest))
    with tempfile.TemporaryDirectory() as folder:

        def server(preset: str) -> Any:
            command = ours(options.model, "--dtype", "float32", "--warmup", warmup, *size, "--preset", preset)
            return running(command, Path(folder) / f"{preset}.log")

        with server(OFF) as plain, server(ON) as drafting:
            servers = {OFF: plain, ON: drafting}
            for context in options.contexts:
                console.print(f"prompts of up to {context} tokens")
                results["cells"].append(cell(servers, tokens, context, options))
    return results


def cell(
    servers: dict[str, ServerProcess], tokens: list[int], context: int, options: argparse.Namespace
) -> dict[str, Any]:
    """The runs of one length of prompts: the sustained rate of `off`, and each server's figures below it.

    As a control of equal texts, `off` gets each repetition's requests once more, in a closed loop.

    Args:
        servers: the servers, by their presets.
        tokens: the text that prompts are taken from.
        context: tokens of the longest prompt; the shortest has a quarter of them.
        options: the options of the command.
    """
    texts = QUICK_TEXTS if options.quick else TEXTS
    drawn = laws.drawn(options.requests, 1.0, 1.0, (max(1, context // 4), context), texts, context)
    queue = QUEUE * options.rows
    rates = {}
    for preset in (ON, OFF):  # both are warm then
        prompts = Prompts(tokens, CAPACITY_SEED)
        body = {"temperature": options.temperature, "seed": CAPACITY_SEED}
        rates[preset] = sustained(drive(servers[preset].url, drawn, prompts, queue, **body), queue)
    rate = options.load * rates[OFF]
    timed = [arrival._replace(time=arrival.time / rate) for arrival in drawn]
    runs, equal, control = [], [], []
    for repetition in range(options.repeat):
        outcomes = {}
        for preset in (OFF, ON) if repetition % 2 == 0 else (ON, OFF):
            seed = CAPACITY_SEED + 1 + repetition
            figures, outcomes[preset] = stream(
                servers[preset].url, timed, Prompts(tokens, seed), options, seed
            )
            runs.append({"preset": preset, "repetition": repetition, **figures})
        seed = CAPACITY_SEED + 1 + repetition
        body = {"temperature": options.temperature, "seed": seed}
        crowded = drive(servers[OFF].url, timed, Prompts(tokens, seed), queue, **body)
        equal.append(equal_texts(outcomes[OFF], outcomes[ON]))
        control.append(equal_texts(outcomes[OFF], crowded))
    cell = {"context": context, "requests": options.requests, "texts": texts, "sustained": rates}
    return cell | {"rate": rate, "equal": equal, "control": control, "runs": runs}


def equal_texts(outcomes: list[Outcome], others: list[Outcome]) -> int:
    """How many requests have the same text in both runs."""
    return sum(outcome.text == other.text for outcome, other in zip(outcomes, others, strict=True))


def stream(
    url: str, timed: list[Arrival], prompts: Prompts, options: argparse.Namespace, seed: int
) -> tuple[dict[str, Any], list[Outcome]]:
    """The figures of one run, and the outcomes of its requests.

    Args:
        url: the URL of the server.
        timed: the lengths and times of all requests.
        prompts: makes the prompt of each.
        options: the options of the command.
        seed: the seed of every request.
    """
    before = engine_state(url)
    outcomes = drive(url, timed, prompts, temperature=options.temperature, seed=seed)
    after = engine_state(url)
    total = summary(outcomes)
    figures = {
        "gaps": {
            "event": distribution(gap for outcome in outcomes for gap in pauses(outcome)),
            "token as it arrives": distribution(gap for o in outcomes for gap in arriving_gaps(o)),
            "token, spread": distribution(gap for outcome in outcomes for gap in spread_gaps(outcome)),
        },
        "first": total["ttft"],
        "tokens_per_event": total["tokens_per_chunk"],
        "tokens_per_second": total["output_tokens_per_second"],
        "late": total["late"]["p99"],
    }
    counts = {name: after[name] - before[name] for name in (DRAFTED, ACCEPTED)}
    return figures | counts, outcomes


def arriving_gaps(outcome: Outcome) -> Iterable[float]:
    """Milliseconds between one token and the next: the first of an event has waited, the others have not.

    >>> outcome = Outcome(0.0, 0.0, 1, 4, chunks=[(1.0, 1), (1.25, 2), (1.5, 1)])
    >>> list(arriving_gaps(outcome)), list(spread_gaps(outcome))
    ([250.0, 0.0, 250.0], [125.0, 125.0, 250.0])
    """
    for gap, count in _events(outcome):
        yield gap
        yield from [0.0] * (count - 1)


def spread_gaps(outcome: Outcome) -> Iterable[float]:
    """Milliseconds of each token if those of an event divided the time since the event before equally."""
    for gap, count in _events(outcome):
        yield from [gap / count] * count


def _events(outcome: Outcome) -> Iterable[tuple[float, int]]:
    """Milliseconds since the event before, and tokens, of every event with tokens but the first."""
    events = [(when, count) for when, count in outcome.chunks if count]
    for (begin, _), (end, count) in pairwise(events):
        yield 1000 * (end - begin), count
