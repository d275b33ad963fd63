"""The measures of an ablation: quality under teacher forcing, speed, and the text that is generated.

Every function takes a model and one configuration, and returns plain numbers; `entropic ablate` and
`benchmarks.ablation` decide which configurations to compare, take turns between them and print tables.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import loop
from ..cache import allocate
from ..control.presets import Preset
from ..sampling import parameters
from ..state import RUNNING, State

LN2 = float(np.log(2))


class Subject(NamedTuple):
    """A model as far as it is measured."""

    decoder: Any
    params: Any


def begin(
    subject: Subject,
    setting: Preset,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    page_size: int | None = None,
    temperature: float = 1.0,
    belief_temperature: float = 1.0,
    seed: int = 0,
) -> State:
    """A state that has read the prompts and has room for `tokens` more of each."""
    kind = setting.selection.information if setting.selection else "mass"
    context = max(map(len, prompts)) + tokens
    if page_size is None and setting.selection:
        page_size = setting.selection.page_size
    pool = allocate(
        subject.decoder.shape,
        len(prompts),
        context,
        page_size=page_size,
        dtype=jax.tree.leaves(subject.params)[0].dtype,
        moments=kind == "mahalanobis",
        surprisal=kind == "surprisal",
    )
    return loop.start(
        subject.decoder,
        subject.params,
        setting.controller,
        pool,
        prompts,
        key=jax.random.key(seed),
        max_tokens=tokens,
        sample=parameters(len(prompts), temperature=temperature),
        selection=setting.selection,
        belief_temperature=belief_temperature,
    )


class Forced(NamedTuple):
    """What teacher forcing measured; each `[sequences, tokens]` unless stated."""

    surprisal: np.ndarray  # nats
    entropy: np.ndarray
    kept: np.ndarray  # fraction of the keys and values held that were read
    certificate: np.ndarray
    drop: np.ndarray
    bytes_read: np.ndarray  # [sequences], per token, weights and cache
    efficiency: np.ndarray  # [sequences], dτ/dC in nats per roofline second


def forced(
    subject: Subject, setting: Preset, sequences: Sequence[Sequence[int]], scored: int, **given: Any
) -> Forced:
    """Read all but the last `scored` tokens densely, then those one by one under the preset's control.

    The sequences have the same length. Temperature and schedule change nothing here; what is read does.
    """
    heads = [list(s[:-scored]) for s in sequences]
    state = begin(subject, setting, heads, scored + 1, **given)
    tails = jnp.asarray([s[-scored:] for s in sequences], jnp.int32)
    state, trace = loop.replay(subject.decoder, subject.params, setting.controller, state, tails)
    trace = jax.device_get(trace)
    account = jax.device_get(state.ledger)
    by_row = lambda x: np.asarray(x).T
    return Forced(
        by_row(trace.surprisal),
        by_row(trace.entropy),
        by_row(trace.kept_fraction),
        by_row(trace.certificate),
        by_row(trace.drop),
        account.bytes_read / scored,
        account.entropic_time / account.seconds,
    )


def launch(subject: Subject, setting: Preset, state: State, steps: int) -> tuple[State, Any, float]:
    """Generate for `steps` steps: the state, the trace on the host, and the seconds on the clock."""
    began = time.perf_counter()
    state, trace = loop.generate(
        subject.decoder,
        subject.params,
        setting.controller,
        state,
        steps,
        capacity=max(8, steps),
        width=setting.width,
    )
    jax.block_until_ready(state.token)
    spent = time.perf_counter() - began
    return state, jax.device_get(trace), spent


class Writing(NamedTuple):
    """What free generation measured, over all rows and steps; nats."""

    tokens: list[list[int]]
    entropy_variance: float  # of H_T, the entropy of what was sampled from
    error: float  # mean |H_T − target|
    clipped: float  # share of steps with the temperature at a clip
    temperature: float
    drop_of_entropy: float  # mean of max(0, H₁[t−1] − H₁[t])


def write(
    subject: Subject,
    setting: Preset,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    target: float,
    clips: tuple[float, float],
    **given: Any,
) -> Writing:
    """Generate `tokens` tokens after each prompt."""
    state = begin(subject, setting, prompts, tokens, **given)
    out: list[list[int]] = [[] for _ in prompts]
    sampled, temperature, falls = [], [], []
    while (np.asarray(state.status) == RUNNING).any():
        state, trace, _ = launch(subject, setting, state, 64)
        emitted = trace.emitted
        for row, mine in enumerate(out):
            here = emitted[:, row]
            mine += trace.token[here, row].tolist()
            falls.append(np.maximum(0, -np.diff(trace.entropy[here, row])))
        sampled.append(trace.tempered_entropy[emitted])
        temperature.append(trace.temperature[emitted])
    entropies, heats = np.concatenate(sampled), np.concatenate(temperature)
    low, high = clips
    return Writing(
        out,
        float(entropies.var()),
        float(np.abs(entropies - target).mean()),
        float(((heats <= low * 1.001) | (heats >= high * 0.999)).mean()),
        float(heats.mean()),
        float(np.concatenate(falls).mean()),
    )


def distinct(texts: Sequence[Sequence[int]], n: int) -> float:
    """The share of n-grams that are different, mean over texts; 1 is no repetition."""
    grams = [[tuple(t[i : i + n]) for i in range(len(t) - n + 1)] for t in texts]
    return float(np.mean([len(set(g)) / len(g) for g in grams if g]))


def divergence(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], n: int = 2) -> float:
    """Jensen–Shannon divergence of the n-gram distributions of two sets of texts, in nats, in [0, ln 2]."""

    def shares(texts: Sequence[Sequence[int]]) -> dict[tuple[int, ...], float]:
        count: dict[tuple[int, ...], float] = {}
        for text in texts:
            for i in range(len(text) - n + 1):
                gram = tuple(text[i : i + n])
                count[gram] = count.get(gram, 0) + 1
        whole = sum(count.values())
        return {gram: c / whole for gram, c in count.items()}

    p, q = shares(ours), shares(theirs)
    middle = {gram: (p.get(gram, 0) + q.get(gram, 0)) / 2 for gram in {*p, *q}}
    part = lambda x: sum(v * np.log(v / middle[gram]) for gram, v in x.items())
    return float((part(p) + part(q)) / 2)


def interval(values: Sequence[float], repeats: int = 2000, seed: int = 0) -> tuple[float, float, float]:
    """The mean, and the ends of its 95 % interval by the bootstrap over `values`."""
    x = np.asarray(values, float)
    draws = np.random.default_rng(seed).choice(x, (repeats, len(x))).mean(1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(x.mean()), float(low), float(high)
