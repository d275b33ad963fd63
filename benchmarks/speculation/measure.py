"""Measurements of speculation: milliseconds of a pass by its tokens, and rates of every arm in turn."""

import argparse
import os
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from entropic_jax import allocate, chain, generate, models, parameters, start
from entropic_jax.parameter_tables.speculation_names import AUTO
from entropic_jax.phases.batch import Batch
from entropic_jax.serving.options import draft_model
from entropic_jax.speculation import Draft, HeadedDecoder, PassCosts, Speculator
from entropic_jax.speculation.draft_length import DraftLength
from entropic_jax.speculation.pass_timing import SHORT, measure_pass_costs
from entropic_jax.speculation.pruned import WINDOW
from entropic_jax.state import RUNNING
from entropic_jax.state.pytree import STATIC, pytree

from ..harness.cores import pin_to_cores
from ..harness.provenance import describe_run
from . import batches
from .workload import WIDTHS, arms, loops, prompts, with_restless

LAUNCH = 32  # steps
DTYPES = ("float32", "bfloat16")
"""The values of `--dtype`."""
SHORT_SHARE = 4  # a cell of short prompts takes this part of the time that one of the longest takes


@pytree
class Nonsense:
    """Always drafts tokens that no text holds, so that every pass emits one token."""

    most_tokens: Annotated[int, STATIC] = max(WIDTHS) - 1

    def draft(self, model: Any, batch: Batch, most: jax.Array) -> tuple[Batch, Draft]:
        """See `speculation.Drafter`."""
        rows = batch.active.shape[0]
        tokens = jnp.full((rows, self.most_tokens), -2, jnp.int32)
        return batch, Draft(tokens, jnp.minimum(most, self.most_tokens), jnp.full(tokens.shape, 0.9))


def always(width: int) -> Speculator:
    """A speculator whose passes all have `width` tokens."""
    costs = jnp.where(jnp.arange(len(WIDTHS)) == WIDTHS.index(width), 1e-3, 1e3)
    return Speculator(Nonsense(), DraftLength(costs, 0.0, WIDTHS))


def begin(model: models.Model, prompt: list[int], tokens: int, temperature: float, speculator: Any) -> Any:
    """The state of one row after its prompt, in a cache of one size for all prompts: one program serves all.

    Args:
        model: the model that continues the prompt.
        prompt: token ids.
        tokens: to generate.
        temperature: the temperature of the sampling.
        speculator: or None.
    """
    pool = allocate(model.decoder.shape, 1, model.config.max_position_embeddings, dtype=cache_dtype(model))
    return start(
        model.decoder,
        model.params,
        chain(),
        pool,
        [prompt],
        key=jax.random.key(0),
        max_tokens=tokens,
        sample=parameters(1, temperature=temperature),
        speculator=speculator,
    )


def launch(model: models.Model, state: Any, speculator: Any, steps: int) -> tuple[Any, Any, float]:
    """One launch: the state, the trace on the host, and its seconds."""
    began = time.perf_counter()
    state, trace = generate(
        model.decoder, model.params, chain(), state, steps, capacity=LAUNCH, speculator=speculator
    )
    trace = jax.device_get(trace)
    return state, trace, time.perf_counter() - began


def pass_seconds(model: models.Model, prompt: list[int], repeat: int) -> dict[int, float]:
    """Median seconds of a pass by its number of tokens; 0 stands for a step of plain decoding.

    Args:
        model: the model that runs the passes.
        prompt: token ids before them.
        repeat: launches of every size, taken in turn.
    """
    arms: dict[int, Any] = {0: None} | {width: always(width) for width in WIDTHS}
    tokens = LAUNCH * (repeat + 1)
    states = {width: begin(model, prompt, tokens, 1.0, arm) for width, arm in arms.items()}
    seconds: dict[int, list[float]] = {width: [] for width in arms}
    for repetition in range(repeat + 1):
        for width, arm in arms.items():
            states[width], trace, taken = launch(model, states[width], arm, LAUNCH)
            assert int(trace.emitted.sum()) == LAUNCH
            if repetition:  # the first compiles
                seconds[width].append(taken / LAUNCH)
    return {width: float(np.median(values)) for width, values in seconds.items()}


class Continuation:
    """A text that grows by launches: tokens, seconds without the prompt, passes, tokens drafted and accepted.

    Args:
        model: the model that continues the prompt.
        prompt: token ids.
        tokens: to generate.
        temperature: the temperature of the sampling.
        speculator: or None.
    """

    def __init__(
        self, model: models.Model, prompt: list[int], tokens: int, temperature: float, speculator: Any
    ) -> None:
        self.model, self.speculator = model, speculator
        self.state = begin(model, prompt, tokens, temperature, speculator)
        jax.block_until_ready(self.state.cache)
        self.ended = False
        self.text: list[int] = []
        self.seconds, self.drafted, self.accepted, self.passes = 0.0, 0, 0, 0

    def advance(self) -> None:
        """Run a launch, unless the text has ended."""
        if self.ended:
            return
        self.state, trace, taken = launch(self.model, self.state, self.speculator, LAUNCH)
        self.seconds += taken
        self.text += trace.token[trace.emitted[:, 0], 0].tolist()
        self.drafted += int(trace.num_drafted.sum())
        self.accepted += int(trace.from_draft.sum())
        self.passes += int((trace.emitted & ~trace.from_draft).sum())
        self.ended = bool(self.state.status[0] != RUNNING)

    def result(self) -> dict[str, Any]:
        """The measurements, and the text."""
        counts = {"drafted": self.drafted, "accepted": self.accepted, "passes": self.passes}
        return {"text": self.text, "seconds": self.seconds, **counts}


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure everything that the options ask for."""
    pin_to_cores(options.threads)
    results: dict[str, Any] = {**describe(options, console), "costs": [], "rates": []}
    model, tokenizer = load(options.model, options.dtype), options.model / "tokenizer.json"
    held_out = [("held-out", c, t) for c in options.contexts for t in options.temperatures]
    shortest = min(options.contexts)
    cells = [*held_out, ("copy", shortest, 0.0), ("copy", shortest, 0.7), ("random", shortest, 1.5)]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        total = len(options.contexts) + sum(num_texts(options, context) for _, context, _ in cells)
        total += len(options.rows) * len(options.batch_contexts) + len({min(options.rows), max(options.rows)})
        task = progress.add_task("passes", total=total)
        for context in options.contexts:
            (prompt,) = prompts("held-out", tokenizer, context, 1)
            seconds = pass_seconds(model, prompt, options.repeat)
            results["costs"].append({"context": context, "seconds": {str(n): s for n, s in seconds.items()}})
            progress.advance(task)
        costs = pass_costs(model, max(options.contexts))
        results["law"] = costs._asdict()

        def speculators(text):
            by_name = arms(costs, has_head(model))
            return with_restless(by_name) if text == "random" else by_name

        for text, context, temperature in cells:
            progress.update(task, description=f"{text}, {context} tokens, T = {temperature}")
            texts = prompts(text, tokenizer, context, num_texts(options, context))
            compare(model, texts[0], 4, temperature, speculators(text), 0)  # compile
            for number, prompt in enumerate(texts):
                entry = {"text": text, "context": context, "temperature": temperature, "prompt": number}
                results["rates"].append(
                    entry | compare(model, prompt, options.tokens, temperature, speculators(text), number)
                )
                progress.advance(task)
        progress.update(task, description="batches")
        results["batches"] = batches.measure(options, lambda: progress.advance(task))
    return results


def describe(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """When, where and with which model a run is made.

    Args:
        options: the options of the command.
        console: where a warning is shown.
    """
    run = {**describe_run(console), "jax": jax.__version__, "threads": options.threads}
    return run | {"xla_threads": os.environ.get("NPROC"), "model": options.model.name, "dtype": options.dtype}


def load(folder: Path, dtype: str) -> models.Model:
    """The model of a directory, with its draft head if it has one.

    Args:
        folder: the directory.
        dtype: one of `DTYPES`.
    """
    model = models.load(folder, dtype, blocked=True)
    return draft_model.load(model, AUTO, dtype, path=folder)


def cache_dtype(model: models.Model) -> str:
    """The dtype of keys and values: that which the model was loaded with."""
    return DTYPES[0] if model.operand_dtype is None else DTYPES[1]


def has_head(model: models.Model) -> bool:
    """Whether the model has a draft head."""
    return isinstance(model.decoder, HeadedDecoder)


def pass_costs(model: models.Model, context: int) -> PassCosts:
    """The costs that the engine would measure for one row.

    Args:
        model: the model that runs the passes.
        context: tokens of the longest prompt.
    """
    longest = max(2 * SHORT, context)
    return measure_pass_costs(
        model.decoder,
        model.params,
        most_tokens=max(WIDTHS),
        context=longest,
        dtype=cache_dtype(model),
        pages=WINDOW,
    )


def num_texts(options: argparse.Namespace, context: int) -> int:
    """The number of texts of a cell: `options.prompts`, and more where prompts are short, since many loop.

    Args:
        options: the options of the command.
        context: tokens of a prompt.
    """
    return max(options.prompts, options.prompts * max(options.contexts) // (context * SHORT_SHARE))


def compare(
    model: models.Model,
    prompt: list[int],
    tokens: int,
    temperature: float,
    speculators: dict[str, Any],
    first: int,
    reference: list[int] | None = None,
) -> dict[str, Any]:
    """One prompt, continued by every arm: their measurements, and whether the text loops.

    The arms take turns launch by launch, so that a change of the machine's speed meets all.

    Args:
        model: the model that continues the prompt.
        prompt: token ids.
        tokens: to generate.
        temperature: the temperature of the sampling.
        speculators: by the name of the arm; that of "off" is None.
        first: number of the arm that begins.
        reference: the text that every arm is compared with; None is that of "off".
    """
    names = list(speculators)
    names = names[first % len(names) :] + names[: first % len(names)]
    texts = {n: Continuation(model, prompt, tokens, temperature, speculators[n]) for n in names}
    while not all(text.ended for text in texts.values()):
        for text in texts.values():
            text.advance()
    results = {name: texts[name].result() for name in speculators}
    plain = results["off"]["text"]
    reference = plain if reference is None else reference
    for result in results.values():
        text = result.pop("text")
        pairs = enumerate(zip(text, reference, strict=False))
        length = min(len(text), len(reference))
        result["equal"] = next((i for i, (token, other) in pairs if token != other), length)
        result["tokens"] = len(text)
    return {"loops": loops(plain), "arms": results}
