"""Measurements of stopping signals: records of drafts, and what each signal is worth on them."""

import argparse
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from entropic_jax import models
from entropic_jax.parameter_tables.speculation_names import AUTO
from entropic_jax.serving.options import draft_model
from entropic_jax.speculation import (
    ControlledModel,
    HeadedDecoder,
    PassCosts,
    Speculator,
    head_drafter,
    make_speculator,
    measure_pass_costs,
    pruned_drafter,
    suffix_drafter,
)
from entropic_jax.speculation.draft_length import DraftLength
from entropic_jax.speculation.pass_timing import SHORT
from entropic_jax.speculation.pruned import WINDOW

from ...harness.cores import pin_to_cores
from ...harness.intervals import auc_interval, share_interval
from ...harness.provenance import describe_run
from ..measure import Continuation
from ..workload import WIDTHS, loops, prompts
from .names import (
    COMPILED,
    DRAFT_ENTROPY,
    EVERY,
    FIXED,
    HEAD,
    LAW,
    ORACLE,
    PRUNED,
    SHUFFLED,
    SUFFIX,
    signal_of,
)
from .recording import MOST_TOKENS
from .replay import Replay, steps_of
from .signals import FORMS, SHUFFLES, Record, drafts_of, record_text
from .stopping import Drafts, Form, evaluate, oracle

QUARTILES = 0.25, 0.5, 0.75


class Costs(NamedTuple):
    """The cost model: measured costs of passes, for passes of some sizes."""

    passes: PassCosts
    widths: tuple[int, ...]

    @property
    def law(self) -> DraftLength:
        """The law of one row."""
        return self.passes.law(1, self.widths)

    def verify_seconds(self, length: np.ndarray) -> np.ndarray:
        """Seconds of a pass that verifies 0, 1, … k tokens, float `[positions, k + 1]`.

        A pass has the smallest size that holds them and the row's last token.
        """
        law = self.law
        seconds = np.asarray(jax.vmap(law.pass_costs)(jnp.asarray(length, jnp.float32)), float)
        return seconds[:, np.searchsorted(self.widths, np.arange(MOST_TOKENS + 1) + 1)]

    def step_seconds(self, drafter: str, length: np.ndarray) -> np.ndarray:
        """Seconds of a draft step, float `[positions]`; a suffix draft costs nothing."""
        if drafter == SUFFIX:
            return np.zeros(len(length))
        cost = self.passes.head_step_costs if drafter == HEAD else self.passes.draft_step_costs
        base, slope = cost(1)
        return base + slope * length


def priced(drafter: str, records: list[Record], costs: Costs) -> list[Drafts]:
    """The drafts with what their steps and passes cost.

    Args:
        drafter: the name of the drafter.
        records: the drafts of each text.
        costs: the cost model.
    """
    return [
        drafts._replace(
            step_seconds=costs.step_seconds(drafter, length), verify_seconds=costs.verify_seconds(length)
        )
        for drafts, _, length in records
    ]


def law_of(drafter: str, model: models.Model, costs: Costs) -> Speculator:
    """The drafter with the law as it ships, for `Replay`.

    Args:
        drafter: the name of the drafter.
        model: whose tokens it drafts.
        costs: the cost model.
    """
    law = costs.law
    if drafter == SUFFIX:
        return Speculator(suffix_drafter(MOST_TOKENS), law)
    if drafter == HEAD:
        result: Any = head_drafter(MOST_TOKENS, law, costs.passes.head_step_costs(1))
    else:
        shortest = costs.passes.shortest_context
        result = pruned_drafter(MOST_TOKENS, WINDOW, law, costs.passes.draft_step_costs(1), shortest)
    controlled = ControlledModel(model.decoder, model.params, None)
    return Speculator(steps_of(result, controlled), law)


def replayed(speculator: Speculator, drafter: str, record: Record, drafts: Drafts) -> Replay:
    """A text under the law.

    Args:
        speculator: the result of `law_of`.
        drafter: the name of the drafter.
        record: the records of the text.
        drafts: the same with costs.
    """
    entropy = None if drafter == SUFFIX else -drafts.signals[DRAFT_ENTROPY]
    return Replay(speculator, drafts, entropy, record.acceptance, record.length)


def rules(drafter: str, model: models.Model, records: list[Record], costs: Costs) -> dict[str, Any]:
    """Seconds of every text under every rule, and the thresholds that were chosen.

    Args:
        drafter: the name of the drafter.
        model: whose tokens it drafts.
        records: the drafts of each text.
        costs: the cost model.
    """
    texts = priced(drafter, records, costs)
    seconds, chosen = {}, {}
    fixed = evaluate(texts, None, Form())
    seconds[FIXED], chosen[FIXED] = fixed.seconds, fixed.rules
    for signal in [name for name in texts[0].signals if name in FORMS]:
        seconds[signal], chosen[signal] = evaluate(texts, signal, FORMS[signal])
    form = FORMS[signal_of(drafter)]
    shuffled = [evaluate(texts, f"{SHUFFLED} {number}", form) for number in range(SHUFFLES)]
    seconds[SHUFFLED] = np.mean([result.seconds for result in shuffled], 0)
    speculator = law_of(drafter, model, costs)
    runs = [replayed(speculator, drafter, r, t) for r, t in zip(records, texts, strict=True)]
    seconds[LAW] = np.array([run.seconds for run in runs])
    seconds[ORACLE] = np.array([oracle(text) for text in texts])
    return {
        "seconds": {name: [float(f"{s:.6g}") for s in values] for name, values in seconds.items()},
        "chosen": {name: [list(rule) for rule in of_halves] for name, of_halves in chosen.items()},
        "law": {
            "drafted": sum(run.drafted for run in runs),
            "verified": sum(sum(run.verified) for run in runs),
            "passes": sum(len(run.verified) for run in runs),
        },
    }


def predictions(drafter: str, records: list[Record]) -> dict[str, Any]:
    """Acceptance by quartile of the drafter's signal, and the AUC of every signal, with intervals over texts.

    Args:
        drafter: the name of the drafter.
        records: the drafts of each text.
    """
    texts = [record.drafts for record in records]
    texts = [t._replace(verify_seconds=np.zeros((1, MOST_TOKENS + 1))) for t in texts]
    tested, accepted = [t.tested for t in texts], [t.is_accepted for t in texts]
    flags = [a[t] for a, t in zip(accepted, tested, strict=True)]
    areas = {}
    for name in texts[0].signals:
        if name.startswith(SHUFFLED):
            continue
        areas[name] = list(
            auc_interval([t.signals[name][w] for t, w in zip(texts, tested, strict=True)], flags)
        )
    shuffled = [
        np.concatenate([t.signals[f"{SHUFFLED} {number}"][w] for number in range(SHUFFLES)])
        for t, w in zip(texts, tested, strict=True)
    ]
    areas[SHUFFLED] = list(auc_interval(shuffled, [np.tile(f, SHUFFLES) for f in flags]))
    values = [t.signals[signal_of(drafter)][w] for t, w in zip(texts, tested, strict=True)]
    pooled = np.concatenate(values)
    edges = np.quantile(pooled, QUARTILES) if len(pooled) else np.zeros(3)
    place = [np.searchsorted(edges, v, side="left") for v in values]
    quartiles = [
        list(
            share_interval(
                [int(f[p == number].sum()) for f, p in zip(flags, place, strict=True)],
                [int((p == number).sum()) for p in place],
            )
        )
        for number in range(len(QUARTILES) + 1)
    ]
    return {
        "tested": int(sum(map(len, flags))),
        "acceptance": list(share_interval([int(f.sum()) for f in flags], list(map(len, flags)))),
        "edges": edges.tolist(),
        "quartiles": quartiles,
        "auc": areas,
    }


def engine_passes(
    drafter: str, model: models.Model, prompt: list[int], tokens: int, temperature: float, costs: Costs
) -> int:
    """Passes that the engine itself takes for a text with a drafter and the law, beside those of the replay.

    Args:
        drafter: the name of the drafter.
        model: the model that continues the prompt.
        prompt: token ids.
        tokens: to generate.
        temperature: the temperature of the sampling.
        costs: the cost model.
    """
    headed = isinstance(model.decoder, HeadedDecoder)
    speculator = make_speculator(
        SUFFIX if drafter == SUFFIX else PRUNED, 1, MOST_TOKENS, costs.passes, headed
    )
    if drafter == HEAD:
        law = costs.law
        speculator = Speculator(head_drafter(MOST_TOKENS, law, costs.passes.head_step_costs(1)), law)
    text = Continuation(model, prompt, tokens, temperature, speculator)
    while not text.ended:
        text.advance()
    return text.passes


def cells(
    options: argparse.Namespace, model: models.Model, sizes: dict[str, Costs], progress: Any
) -> Iterator[dict[str, Any]]:
    """The results of every drafter, context and temperature.

    Args:
        options: the options of the command.
        model: the model.
        sizes: the cost model by sizes of passes.
        progress: called with a description before, and without after every text.
    """
    drafters = [SUFFIX, PRUNED, *([HEAD] if isinstance(model.decoder, HeadedDecoder) else [])]
    suffix = suffix_drafter(MOST_TOKENS)
    for context in options.contexts:
        texts = prompts("held-out", options.model / "tokenizer.json", context, options.prompts)
        for temperature in options.temperatures:
            progress(f"{context} tokens, T = {temperature}")
            records: dict[str, list[Record]] = {name: [] for name in drafters}
            looping = []
            for number, prompt in enumerate(texts):
                text, steps = record_text(model, prompt, options.tokens, temperature, suffix)
                looping.append(loops(text[: options.tokens]))
                for name in drafters:
                    records[name].append(drafts_of(name, text, steps, options.tokens, number))
                progress()
            kept = [number for number, flag in enumerate(looping) if not flag]
            kept = kept if len(kept) > 1 else list(range(len(texts)))
            for name in drafters:
                of_kept = [records[name][number] for number in kept]
                cell = {"drafter": name, "context": context, "temperature": temperature, "texts": kept}
                cell |= {"looped": sum(looping), "tokens": options.tokens} | predictions(name, of_kept)
                cell["rules"] = {size: rules(name, model, of_kept, costs) for size, costs in sizes.items()}
                first, costs = kept[0], sizes[COMPILED]
                (drafts,) = priced(name, [records[name][first]], costs)
                replay = replayed(law_of(name, model, costs), name, records[name][first], drafts)
                engine = engine_passes(name, model, texts[first], options.tokens, temperature, costs)
                yield cell | {"passes": {"replayed": len(replay.verified), "engine": engine}}


def pass_costs(
    options: argparse.Namespace, model: models.Model, results: dict[str, Any]
) -> tuple[PassCosts, str]:
    """The costs of passes, and the machine that they are of: those of a file if the options name one.

    Args:
        options: the options of the command.
        model: the model.
        results: the description of this run.
    """
    if options.costs is None:
        context = max(2 * SHORT, *options.contexts)
        most = max(WIDTHS)
        costs = measure_pass_costs(
            model.decoder, model.params, most_tokens=most, context=context, pages=WINDOW
        )
        return costs, results["cpu"]
    stored = json.loads(options.costs.read_text("utf-8"))
    numbers = stored.get("costs") if isinstance(stored.get("costs"), dict) else stored["law"]
    known = {name: value for name, value in numbers.items() if name in PassCosts._fields}
    return PassCosts.from_json(known), f"{stored['cpu']}, measured {stored['date']}"


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure everything that the options ask for.

    Args:
        options: the options of the command.
        console: where progress is shown.
    """
    pin_to_cores(options.threads)
    results: dict[str, Any] = {**describe_run(console), "jax": jax.__version__, "threads": options.threads}
    results |= {"xla_threads": os.environ.get("NPROC"), "model": options.model.name, "dtype": "float32"}
    model = models.load(options.model, "float32", blocked=True)
    model = draft_model.load(model, AUTO, "float32", path=options.model)  # with its draft head, if any
    passes, results["costs_of"] = pass_costs(options, model, results)
    results["costs"] = passes._asdict()
    sizes = {COMPILED: Costs(passes, WIDTHS), EVERY: Costs(passes, tuple(range(1, MOST_TOKENS + 2)))}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        total = len(options.contexts) * len(options.temperatures) * options.prompts
        task = progress.add_task("texts", total=total)

        def advance(description: str | None = None) -> None:
            if description is None:
                progress.advance(task)
            else:
                progress.update(task, description=description)

        results["cells"] = list(cells(options, model, sizes, advance))
    return results
