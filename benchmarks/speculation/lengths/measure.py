"""Measurements of draft lengths: seconds of the law and of fixed lengths, workload by workload."""

import argparse
import os
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from entropic_jax import models
from entropic_jax.parameter_tables.speculation_names import AUTO, HEAD
from entropic_jax.serving.options import draft_model
from entropic_jax.speculation import HeadedDecoder, measure_pass_costs
from entropic_jax.speculation.pass_timing import SHORT
from entropic_jax.speculation.pruned import WINDOW

from ...harness.cores import pin_to_cores
from ...harness.provenance import describe_run
from ..measure import compare
from ..workload import WIDTHS, prompts
from .fixed import arms


class Workload(NamedTuple):
    """Texts to continue."""

    text: str  # of `workload.TEXTS`
    context: int
    temperature: float


def workloads(contexts: list[int]) -> list[Workload]:
    """The workloads of the mix, from the shortest and the longest context."""
    short, long = min(contexts), max(contexts)
    return [
        Workload("held-out", short, 1.0),
        Workload("held-out", long, 1.0),
        Workload("copy", short, 0.0),
        Workload("random", short, 1.5),
    ]


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure everything that the options ask for.

    Args:
        options: the options of the command.
        console: where progress is shown.
    """
    pin_to_cores(options.threads)
    results: dict[str, Any] = {**describe_run(console), "jax": jax.__version__, "threads": options.threads}
    results |= {"xla_threads": os.environ.get("NPROC"), "model": options.model.name, "dtype": "float32"}
    model, tokenizer = models.load(options.model, "float32", blocked=True), options.model / "tokenizer.json"
    model = draft_model.load(model, AUTO, "float32", path=options.model)  # with its draft head, if any
    headed = isinstance(model.decoder, HeadedDecoder)
    costs = measure_pass_costs(
        model.decoder,
        model.params,
        most_tokens=max(WIDTHS),
        context=max(2 * SHORT, *options.contexts),
        pages=WINDOW,
    )
    results |= {"costs": costs._asdict(), "lengths": options.lengths, "rates": []}
    names = [name for name in options.drafters if headed or name != HEAD]
    cells = [(name, workload) for name in names for workload in workloads(options.contexts)]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("texts", total=len(cells) * options.prompts)
        for name, workload in cells:
            text, context, temperature = workload
            progress.update(task, description=f"{name}: {text}, {context} tokens, T = {temperature}")
            texts = prompts(text, tokenizer, context, options.prompts)
            of_name = arms(name, options.lengths, costs, headed)
            compare(model, texts[0], 4, temperature, of_name, 0)  # compile
            for number, prompt in enumerate(texts):
                entry = {"drafter": name, **workload._asdict(), "prompt": number}
                measured = compare(model, prompt, options.tokens, temperature, of_name, number)
                results["rates"].append(entry | measured)
                progress.advance(task)
    return results
