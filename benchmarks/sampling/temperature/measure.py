"""Measurements of temperature laws: paired tasks and free texts, beside plain sampling, min-p and controls.

Every sampler answers the same tasks and continues the same texts. Prompts are prefilled once and shared.
Kinds of tasks are mixed in a batch, so that exchanging decisions between rows exchanges them between kinds.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console

from entropic_jax import chain, generate, parameters
from entropic_jax.analysis.ablation import Subject, distinct, divergence, prefill, resume
from entropic_jax.calibration import Calibration
from entropic_jax.methods.presets import temperature_law
from entropic_jax.state import State

from ...harness.loops import loops
from .. import workload
from ..measure import held_out_source
from ..samplers import SamplerBenchmark, calibrated_gains
from .controls import Constant, Delayed, Shuffled
from .relative import Relative

ROWS = 64
ANSWER = 32  # tokens of an answer at most
PROMPT, FREE_TEXT_TOKENS = 128, 192
FILLER_LINES = 8
LAW = "relative"
CONSTANT = "relative, constant"
DEVIATIONS = 0.75  # by which the surprisal of a token may be above the entropy
REFERENCES = ("T 1", "min-p 0.1")


def laws(calibration: Calibration) -> dict[str, Any]:
    """The samplers without constants that follow from a run: law, and sampling parameters."""
    gains = calibrated_gains(calibration)
    law = Relative(calibration.target_entropy, DEVIATIONS, gains.prior.correlation, gains.prior.scale)
    cooling = dataclasses.replace(law, surprisal_deviations=100.0)  # excludes nothing
    limit = dataclasses.replace(law, target_entropy=100.0)  # cools nothing
    return {
        "T 1": (chain(), {}),
        "min-p 0.1": (chain(), {"min_p": 0.1}),
        "normalised": (chain(temperature_law(gains)), {}),
        LAW: (chain(law), {}),
        "relative, temperature alone": (chain(cooling), {}),
        "relative, limit alone": (chain(limit), {}),
        "relative, shuffled": (chain(Shuffled(law)), {}),
        "relative, one token late": (chain(Delayed(law)), {}),
    }


class Outcome:
    """Progress of one sampler."""

    def __init__(self) -> None:
        self.solved: list[int] = []
        self.temperature: list[float] = []  # means of launches
        self.entropy: list[float] = []
        self.trace: Any = None  # of the last batch

    def add(self, solved: list[int], trace: Any) -> None:
        """Add a batch: which tasks were solved, and the trace."""
        self.solved += solved
        self.temperature.append(float(np.mean(trace.temperature)))
        self.entropy.append(float(np.mean(trace.tempered_entropy)))
        self.trace = trace

    def constants(self) -> Constant:
        """The mean temperature so far, and the mean surprisal limit of the last batch."""
        limit = self.trace.tempered_entropy + DEVIATIONS * np.sqrt(self.trace.tempered_varentropy)
        return Constant(float(np.mean(self.temperature)), float(np.mean(limit)))

    def record(self) -> dict[str, Any]:
        """The outcome as plain numbers."""
        return {
            "solved": self.solved,
            "temperature": float(np.mean(self.temperature)),
            "entropy": float(np.mean(self.entropy)),
        }


def continue_rows(subject: Subject, sampler: Any, state: State, tokens: int) -> tuple[np.ndarray, Any]:
    """Tokens `[rows, tokens]` of a sampler after shared prompts, and the trace.

    Args:
        subject: the model.
        sampler: its law and its sampling parameters.
        state: the state of the prompts; it is not consumed.
        tokens: number of tokens of each row.
    """
    law, sampling = sampler
    state = resume(state, law)
    state = state._replace(sampling=parameters(state.token.shape[0], **sampling))
    _, trace = generate(subject.decoder, subject.params, law, state, tokens, capacity=tokens)
    trace = jax.device_get(trace)
    return np.asarray(trace.token).T, trace


def batches(count: int, seed: int) -> list[list[workload.Task]]:
    """`count` tasks of all kinds in equal parts, mixed, in batches of `ROWS`."""
    filler = "".join(held_out_source()[0].splitlines(keepends=True)[40 : 40 + FILLER_LINES])
    each = -(-count // len(workload.KINDS))
    tasks = [task for kind in workload.KINDS for task in workload.generated(kind, each, seed, filler)]
    order = np.random.default_rng(seed).permutation(len(tasks))
    chosen = [tasks[int(i)] for i in order]
    return [chosen[at : at + ROWS] for at in range(0, len(chosen) - ROWS + 1, ROWS)]


def measure(benchmark: SamplerBenchmark, count: int, console: Console) -> dict[str, Any]:
    """Answers of every sampler to `count` tasks, and its free texts.

    Args:
        benchmark: the model.
        count: tasks, in batches of `ROWS`.
        console: for progress.
    """
    model, tokenizer = benchmark.model, benchmark.tokenizer
    subject = Subject(model.decoder, model.params, benchmark.calibration.temperature)
    samplers = laws(benchmark.calibration)
    outcomes = {name: Outcome() for name in (*samplers, CONSTANT)}
    kinds: list[str] = []
    for number, tasks in enumerate(batches(count, 17)):
        state = prefill(subject, [tokenizer.encode(task.prompt) for task in tasks], ANSWER, seed=number)
        kinds += [task.kind for task in tasks]
        for name in outcomes:
            if name not in samplers:  # the last, once the law has run: the means of its decisions
                constants = outcomes[LAW].constants()
                samplers[name] = (chain(constants), {})
            tokens, trace = continue_rows(subject, samplers[name], state, ANSWER)
            solved = [
                int(task.check(tokenizer.decode(row[: task.tokens].tolist())))
                for row, task in zip(tokens, tasks, strict=True)
            ]
            outcomes[name].add(solved, trace)
        console.print(f"{len(kinds)} paired tasks")
    return {
        "kinds": kinds,
        "samplers": {name: outcome.record() for name, outcome in outcomes.items()},
        "texts": write(benchmark, subject, samplers, console),
    }


def write(
    benchmark: SamplerBenchmark, subject: Subject, samplers: dict[str, Any], console: Console
) -> dict[str, dict[str, Any]]:
    """Free texts of every sampler after the same held-out source, and how they read.

    Args:
        benchmark: the tokenizer of the model.
        subject: the model.
        samplers: by name.
        console: for progress.
    """
    streams = [benchmark.tokenizer.encode(text) for text in held_out_source()]
    rng = np.random.default_rng(77)
    windows = [window(streams, rng) for _ in range(ROWS)]
    prompts, held_out = [w[:PROMPT] for w in windows], [w[PROMPT:] for w in windows]
    state = prefill(subject, prompts, FREE_TEXT_TOKENS, seed=77)
    texts = {}
    for name, sampler in samplers.items():
        tokens, trace = continue_rows(subject, sampler, state, FREE_TEXT_TOKENS)
        written = tokens.tolist()
        texts[name] = {
            "distinct_4": [distinct([text], 4) for text in written],
            "loops": [int(loops(text)) for text in written],
            "divergence": divergence(written, held_out),
            "temperature": float(np.mean(trace.temperature)),
            "entropy": float(np.mean(trace.tempered_entropy)),
        }
        console.print(f"{ROWS} free texts, {name}")
    return texts


def window(streams: Sequence[Sequence[int]], rng: np.random.Generator) -> list[int]:
    """A stretch of held-out source: a prompt and what follows it."""
    stream = streams[int(rng.integers(len(streams)))]
    at = int(rng.integers(0, len(stream) - PROMPT - FREE_TEXT_TOKENS))
    return list(stream[at : at + PROMPT + FREE_TEXT_TOKENS])
