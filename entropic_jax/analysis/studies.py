"""Studies of an ablation: every configuration on the same text, taking turns.

A study measures one cell (a context and a seed, say) and returns rows of plain numbers, one or more per
configuration, which `statistics` and `tables` summarise. `entropic ablate` and
`benchmarks.ablation` run them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..control import chain
from ..control.scheduling import FirstComeFirstServed
from ..methods.presets import Gains, Preset, preset
from ..state import State
from ..state.cache import default_page_size
from ..state.ledger import prefill_seconds
from . import ablation
from .ablation import LN2, Subject
from .information import information_gained, order_zero_surprisal

Row = dict[str, Any]
# The presets of one token a step. `meso` and `full` draft tokens, which changes none of them.
ALL = ("off", "micro", "meso-lossy", "macro", "full-lossy", "paper")
# Under teacher forcing, with no sequence waiting, temperature and schedule change nothing.
DISTINCT_PRESETS = ("off", "meso-lossy")
EQUIVALENT_PRESETS = {"micro": "off", "macro": "off", "full-lossy": "meso-lossy", "paper": "meso-lossy"}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, held-out text as tokens, and the gains of the presets."""

    subject: Subject
    stream: np.ndarray  # int32, tokens of the text
    bytes_per_token: float
    gains: Gains

    def preset(self, name: str, width: int | None = None) -> Preset:
        """The preset of that name, with the workload's gains."""
        return preset(name, width, self.gains)

    def windows(self, count: int, length: int, seed: int) -> list[list[int]]:
        """`count` random stretches of `length` tokens. Raises ValueError if the text is not longer.

        Args:
            count: how many.
            length: the length of each window, in tokens.
            seed: the seed of the random starts.
        """
        if len(self.stream) <= length:
            raise ValueError(f"text must have more than {length} tokens; got {len(self.stream)}")
        starts = np.random.default_rng(seed).integers(0, len(self.stream) - length, count)
        return [self.stream[s : s + length].tolist() for s in starts]

    def bits_per_byte(self, surprisal: np.ndarray) -> float:
        """Bits per byte of text, from nats per token."""
        return float(surprisal.mean() / LN2 / self.bytes_per_token)


def set_up(state: State, setting: Preset) -> State:
    """`resume`, in pages as long as the configuration would have them by itself."""
    size = (setting.page_policy.page_size if setting.page_policy else None) or default_page_size()
    return ablation.resume(state, setting.controller, setting.page_policy, max(size, state.cache.page_size))


def quality(
    workload: Workload,
    context: int,
    seed: int,
    *,
    names: Sequence[str] = DISTINCT_PRESETS,
    sequences: int = 4,
    scored: int = 256,
) -> list[Row]:
    """Bits per byte of the last tokens of held-out windows, and what was read for them.

    Args:
        workload: model, text and gains.
        context: tokens of a window, those that are scored included.
        seed: the seed of the choice of windows.
        names: the names of the presets.
        sequences: how many windows.
        scored: tokens at the end of a window that are scored.
    """
    texts = workload.windows(sequences, context, 100 + seed)
    state = ablation.prefill(workload.subject, [t[:-scored] for t in texts], scored + 1)
    rows = []
    for name in names:
        setting = workload.preset(name)
        forced = ablation.forced(
            workload.subject,
            setting.controller,
            set_up(state, setting),
            [t[-scored:] for t in texts],
        )
        rows.append(
            {
                "preset": name,
                "context": context,
                "seed": seed,
                "bits_per_byte": workload.bits_per_byte(forced.surprisal),
                "kept": float(forced.kept[:, 1:].mean()),
                "bytes_read": float(forced.bytes_read.mean()),
                "flops": float(forced.flops.mean()),
                "certificate": float(np.median(forced.certificate)),
            }
        )
    return rows


def information(
    workload: Workload,
    context: int,
    seed: int,
    *,
    names: Sequence[str] = DISTINCT_PRESETS,
    sequences: int = 4,
    scored: int = 256,
) -> list[Row]:
    """Information gained about held-out text and entropic time, per roofline second, prompt included.

    Every window is scored alone, one sequence in a step, as in `speed`: with more rows a step, each would pay
    a smaller part of the weights.

    Args:
        workload: model, text and gains.
        context: tokens of a window, those that are scored included.
        seed: the seed of the choice of windows.
        names: the names of the presets.
        sequences: how many windows.
        scored: tokens at the end of a window that are scored.
    """
    subject = workload.subject
    shape = subject.decoder.shape
    rows = []
    for index, text in enumerate(workload.windows(sequences, context, 100 + seed)):
        prompt, tail = text[:-scored], text[-scored:]
        state = ablation.prefill(subject, [prompt], scored + 1)
        reference = order_zero_surprisal(prompt, tail, shape.vocabulary)
        weight, cache = jax.tree.leaves(subject.params)[0].dtype.itemsize, state.cache.bytes_per_number
        sizes = {"bytes_per_weight": weight, "bytes_per_cache": cache, "hardware": state.hardware}
        prefill = prefill_seconds(shape, len(prompt), **sizes)
        for name in names:
            setting = workload.preset(name)
            forced = ablation.forced(subject, setting.controller, set_up(state, setting), [tail])
            tau, decode = float(forced.entropic_time[0]), float(forced.seconds[0])
            gained = information_gained(forced.surprisal[0], reference, tau, prefill + decode)
            rows.append(
                {
                    "preset": name,
                    "context": context,
                    "seed": seed,
                    "window": index,
                    "bits_per_token": gained.bits_per_token,
                    "bits_per_second": gained.bits_per_second,
                    "efficiency": gained.entropic_efficiency,
                    "entropic_time": tau / scored,
                    "decode_efficiency": tau / decode,
                    "prefill_seconds": prefill,
                    "decode_seconds": decode,
                }
            )
    return rows


def speed(
    workload: Workload, context: int, *, names: Sequence[str] = ALL, steps: int = 8, repeat: int = 24
) -> list[Row]:
    """Milliseconds a token of one sequence: launches of `steps` steps, one configuration after another.

    Args:
        workload: model, text and gains.
        context: tokens of the prompt.
        names: the names of the presets.
        steps: per launch.
        repeat: launches of each preset that are timed.
    """
    (text,) = workload.windows(1, context, 3)
    state = ablation.prefill(workload.subject, [text], (repeat + 2) * steps)
    presets = {name: workload.preset(name) for name in names}
    states = {name: set_up(state, setting) for name, setting in presets.items()}
    return interleave(dict.fromkeys(presets, workload.subject), presets, states, context, steps, repeat)


def interleave(
    subjects: dict[str, Subject],
    presets: dict[str, Preset],
    states: dict[str, State],
    context: int,
    steps: int,
    repeat: int,
    between: Any = None,
) -> list[Row]:
    """Times launches of several configurations in turns, the first two of each not counted.

    Args:
        subjects: the model of each configuration, by its name.
        presets: its preset.
        states: a state after prefill, which is consumed.
        context: entered into the rows.
        steps: number of steps of a launch.
        repeat: launches of each that are counted.
        between: called with the number of the turn after every turn.

    Returns:
        A row for every launch.
    """
    rows = []
    order = list(presets)
    for repetition in range(-2, repeat):
        first = repetition % len(order)
        for name in order[first:] + order[:first]:
            states[name], trace, seconds = ablation.launch(subjects[name], presets[name], states[name], steps)
            seen = trace.emitted
            if repetition >= 0 and seen.any():
                rows.append(
                    {
                        "preset": name,
                        "context": context,
                        "turn": repetition,
                        "milliseconds": 1e3 * seconds / int(seen.any(1).sum()),
                        "kept": float(trace.kept_fraction[seen].mean()),
                    }
                )
        if between is not None:
            between(repetition)
    return rows


def load(
    workload: Workload,
    seed: int,
    *,
    names: Sequence[str] = ALL,
    sequences: int = 16,
    width: int = 4,
    prompt: int = 384,
    most: int = 160,
) -> list[Row]:
    """Completion of sequences that arrive at random, more of them than a step advances.

    Arrivals are a Poisson process in which about as many tokens are asked for as `off` can write. Without
    the macro scale the order is that of arrival. Prompts have up to `prompt` tokens, answers up to `most`.

    Args:
        workload: model, text and gains.
        seed: the seed of prompts, lengths and arrivals.
        names: the names of the presets.
        sequences: how many arrive.
        width: sequences that a step advances.
        prompt: tokens of the longest prompt.
        most: tokens of the longest answer.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(min(32, prompt // 2), prompt, sequences)
    prompts = [workload.windows(1, int(n), seed * 100 + i)[0] for i, n in enumerate(lengths)]
    budgets = np.clip(rng.lognormal(3.7, 0.8, sequences), min(8, most), most).astype(int)
    gaps = rng.exponential(1.0, sequences)
    state = ablation.prefill(workload.subject, prompts, budgets.tolist())
    # The first run is of `off` with everyone there: it compiles, and says what the machine can write.
    rows: list[Row] = []
    pace = 0.0
    for name in ("warm", *names):
        setting = queued(workload.preset("off" if name == "warm" else name, width), width)
        started = set_up(state, setting)
        if name != "warm":
            arrivals = np.cumsum(gaps) * float(budgets.mean()) / pace
            arrivals -= arrivals[0]
            # Compiled before the clock runs, on a copy.
            ablation.launch(workload.subject, setting, set_up(state, setting), 1)
        else:
            arrivals = np.zeros(sequences)
            ablation.launch(workload.subject, setting, set_up(state, setting), 1)
        served = ablation.serve(workload.subject, setting, started, arrivals)
        if name == "warm":
            pace = served.tokens_per_second
            continue
        rows.append(
            {
                "preset": name,
                "seed": seed,
                "completion": float(served.latency.mean()),
                "completion_p95": float(np.percentile(served.latency, 95)),
                "tokens_per_second": served.tokens_per_second,
                "entropic_time_per_second": served.entropic_time_per_second,
            }
        )
    return rows


def queued(setting: Preset, width: int) -> Preset:
    """The same with `width` rows a step in order of arrival, where it has no schedule of its own."""
    if setting.width is not None:
        return setting
    law = FirstComeFirstServed(width)
    return setting._replace(controller=chain(*setting.controller.controllers, law), width=width)


def writing(
    workload: Workload,
    seed: int,
    *,
    presets: dict[str, Preset],
    sequences: int = 4,
    prompt: int = 256,
    tokens: int = 256,
) -> list[Row]:
    """Free generation: how the entropy is held, and how the text compares with held-out text.

    Args:
        workload: model, text and gains.
        seed: the seed of the prompts and of sampling.
        presets: by name.
        sequences: how many texts each preset writes.
        prompt: tokens of a prompt.
        tokens: tokens written after it.
    """
    texts = workload.windows(sequences, prompt, 500 + seed)
    held_out = workload.windows(2 * sequences, tokens, 900 + seed)
    state = ablation.prefill(workload.subject, texts, tokens, seed=seed)
    gains = workload.gains
    rows = []
    for name, setting in presets.items():
        clips = (gains.lowest_temperature, gains.highest_temperature or 1.0)  # texts are written at T = 1
        written = ablation.write(
            workload.subject, setting, set_up(state, setting), target=gains.target_entropy, clips=clips
        )
        rows.append(
            {
                "preset": name,
                "seed": seed,
                "entropy_variance": written.entropy_variance,
                "error": written.error,
                "clipped": written.clipped,
                "temperature": written.temperature,
                "fall": written.drop_of_entropy,
                "distinct_4": ablation.distinct(written.tokens, 4),
                "repetition": ablation.repetition(written.tokens),
                "divergence": ablation.divergence(written.tokens, held_out),
            }
        )
    return rows
