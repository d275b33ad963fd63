"""The measures of an ablation: quality under teacher forcing, speed, load, and the text that is generated.

Every function takes a model and one configuration and returns plain numbers. A prompt is prefilled once:
`prefill` fills a cache, and `resume` gives every configuration a copy of it, in pages of the size it wants.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import loop
from ..attention.page_selection import Selection, no_page_lists
from ..control import Controller, chain
from ..control.scheduling import default_load, with_load
from ..methods.presets import Preset
from ..state import FULL, RUNNING, State, plain_action
from ..state.cache import Cache, Layer, allocate
from ..state.sampling_parameters import parameters

LN2 = float(np.log(2))


class Subject(NamedTuple):
    """A model as far as it is measured, and the temperature T_cal of its belief."""

    decoder: Any
    params: Any
    belief_temperature: float = 1.0


def prefill(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    tokens: int | Sequence[int],
    *,
    page_size: int = 16,
    dtype: Any = None,
    temperature: float = 1.0,
    seed: int = 0,
    page_information: bool = False,
) -> State:
    """A state after the prefill of the prompts, with room for `tokens` more of each, under no control.

    Args:
        subject: the model.
        prompts: token ids, one prompt per row.
        tokens: room for new tokens, for all rows or one number per row.
        page_size: positions per page of the cache.
        dtype: the dtype of the cache, by default the one the model computes in.
        temperature: at which tokens are sampled where no law sets it.
        seed: the seed of the run's random key.
        page_information: whether the cache keeps what page selection by "surprisal" and "mahalanobis" needs.
    """
    context = max(map(len, prompts)) + int(np.max(tokens))
    dtype = jax.tree.leaves(subject.params)[0].dtype if dtype is None else dtype
    # Whole pages of the largest size in use, so that `resume` can merge pages.
    room = -(-context // 128) * 128
    kept = dict(moments=page_information, surprisal=page_information)
    return loop.start(
        subject.decoder,
        subject.params,
        chain(),
        allocate(subject.decoder.shape, len(prompts), room, page_size=page_size, dtype=dtype, **kept),
        prompts,
        key=jax.random.key(seed),
        max_tokens=tokens,
        sample=parameters(len(prompts), temperature=temperature),
        belief_temperature=subject.belief_temperature,
    )


def resume(
    state: State, controller: Controller, page_policy: Selection | None = None, page_size: int | None = None
) -> State:
    """A copy of a state that was read, about to run under a configuration.

    Args:
        state: from `prefill`; it is not consumed.
        controller: the control law of the run.
        page_policy: the choice of pages that a step reads; None reads all.
        page_size: positions per page, by default that of the policy or, without one, of the state. Pages are
            merged to it.
    """
    size = page_size or (page_policy.page_size if page_policy else None) or state.cache.page_size
    # A launch consumes its state: the original stays whole.
    state = jax.tree.map(jnp.copy, state)
    if size != state.cache.page_size:
        state = state._replace(cache=merged(state.cache, state.length, size))
    action = plain_action(state.sampling.temperature)
    return state._replace(
        action=jax.tree.map(jnp.copy, action),
        control=jax.tree.map(jnp.copy, controller.init(action)),
        page_policy=page_policy,
        page_policy_state=() if page_policy is None else no_page_lists(page_policy, state.cache),
    )


def merged(cache: Cache, length: jax.Array, page_size: int) -> Cache:
    """The same contents in larger pages, all of them granted: the row of a page is the row of its parts.

    Raises ValueError unless `page_size` is a multiple of the cache's, and where that holds 8 bits.

    Args:
        cache: the cache; its dtype is float32 or bfloat16.
        length: int32 `[rows]`, positions that each row holds.
        page_size: positions per new page, a multiple of the cache's.
    """
    if not isinstance(cache.layers[0].keys, jax.Array):  # values with scales
        raise ValueError(f"cache must be of float32 or bfloat16; got {cache.layers[0].keys.dtype}")
    pages_per_page, remainder = divmod(page_size, cache.page_size)
    if remainder or not pages_per_page:
        raise ValueError(
            f"page_size must be a multiple of {cache.page_size}, the cache's page size; got {page_size}"
        )
    rows, max_pages = cache.table.shape
    per_row = -(-max_pages // pages_per_page)
    table = jnp.pad(
        cache.table, ((0, 0), (0, per_row * pages_per_page - max_pages)), constant_values=cache.pages
    )
    filled = jnp.arange(per_row * pages_per_page) < -(-length // cache.page_size)[:, None]
    filled = filled.reshape(rows * per_row, pages_per_page)

    def parts(x: jax.Array, numbers: jax.Array) -> jax.Array:
        return x[numbers].reshape(rows * per_row, pages_per_page, *x.shape[1:])

    def with_bin(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x, jnp.zeros_like(x[:1])])

    def tiles(x: Any, numbers: jax.Array) -> jax.Array:
        return with_bin(
            parts(x, numbers).swapaxes(1, 2).reshape(rows * per_row, x.shape[1], page_size, x.shape[3])
        )

    def summary(x: jax.Array, numbers: jax.Array, reduce: Any, blank: float) -> jax.Array:
        real = filled.reshape(*filled.shape, *(1,) * (x.ndim - 1))
        reduced = reduce(jnp.where(real, parts(x, numbers), blank), axis=1)
        return with_bin(jnp.where(jnp.isfinite(reduced), reduced, 0.0))

    def layer(x: Layer) -> Layer:
        numbers = x.pages_of(table)
        return Layer(
            tiles(x.keys, numbers),
            tiles(x.values, numbers),
            summary(x.key_min, numbers, jnp.min, jnp.inf),
            summary(x.key_max, numbers, jnp.max, -jnp.inf),
            summary(x.key_sum, numbers, jnp.sum, 0.0),
            summary(x.value_norm, numbers, jnp.max, 0.0),
        )

    pages = rows * per_row
    return cache._replace(
        layers=tuple(map(layer, cache.layers)),
        table=jnp.arange(pages, dtype=jnp.int32).reshape(rows, per_row),
        granted=jnp.full(rows, per_row, jnp.int32),
        free=jnp.zeros(pages, jnp.int32),
        available=jnp.int32(0),
        references=jnp.ones(pages + 1, jnp.int32).at[-1].set(0),
        surprisal=None,
    )


class Forced(NamedTuple):
    """Measurements of teacher forcing; each `[sequences, tokens]` unless stated."""

    surprisal: np.ndarray  # nats
    entropy: np.ndarray
    kept: np.ndarray  # fraction of the keys and values held that were read
    certificate: np.ndarray
    dropped_mass_limit: np.ndarray
    bytes_read: np.ndarray  # [sequences], per token, weights and cache
    flops: np.ndarray  # [sequences], per token
    entropic_time: np.ndarray  # [sequences], τ in nats
    seconds: np.ndarray  # [sequences], C of the tail, the prompt not included, in roofline seconds


def forced(
    subject: Subject, controller: Controller, state: State, tails: Sequence[Sequence[int]] | np.ndarray
) -> Forced:
    """Score `tails`, one token after another, from a state of `resume`.

    The temperature and the schedule change nothing here; what is read does.

    Args:
        subject: the model.
        controller: the control law of the run.
        state: from `resume`; it is not consumed.
        tails: token ids `[rows, n]`, what follows each prompt.
    """
    tokens = jnp.asarray(np.asarray(tails), jnp.int32)
    state, trace = loop.replay(subject.decoder, subject.params, controller, state, tokens)
    trace, account = jax.device_get((trace, state.ledger))
    by_row = lambda x: np.asarray(x).T
    return Forced(
        by_row(trace.surprisal),
        by_row(trace.entropy),
        by_row(trace.kept_fraction),
        by_row(trace.certificate),
        by_row(trace.dropped_mass_limit),
        account.bytes_read / tokens.shape[1],
        account.flops / tokens.shape[1],
        account.entropic_time,
        account.seconds,
    )


def launch(subject: Subject, setting: Preset, state: State, steps: int) -> tuple[State, Any, float]:
    """Generate for `steps` steps: the state, the trace on the host, and the seconds on the clock.

    Args:
        subject: the model.
        setting: controller and width.
        state: the loop's state; it is consumed.
        steps: how many steps to run.
    """
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
    """Measurements of free generation, over all rows and steps; nats."""

    tokens: list[list[int]]
    entropy_variance: float  # of H_T, the entropy of what was sampled from
    error: float  # mean |H_T − target|
    clipped: float  # share of steps with the temperature at a clip
    temperature: float
    drop_of_entropy: float  # mean of max(0, H₁[t−1] − H₁[t])


def write(
    subject: Subject,
    setting: Preset,
    state: State,
    *,
    target: float,
    clips: tuple[float, float],
) -> Writing:
    """Generate from a state of `resume` until every row is full.

    Args:
        subject: the model.
        setting: controller and width.
        state: from `resume`; it is consumed.
        target: entropy that the law holds, nats; the error is measured against it.
        clips: the lowest and the highest temperature; tokens at either count as clipped.
    """
    out: list[list[int]] = [[] for _ in range(state.token.shape[0])]
    sampled, temperature, falls = [], [], []
    while (np.asarray(state.status) == RUNNING).any():
        state, trace, _ = launch(subject, setting, state, 64)
        emitted = trace.emitted
        for row, row_tokens in enumerate(out):
            steps = emitted[:, row]
            row_tokens += trace.token[steps, row].tolist()
            falls.append(np.maximum(0, -np.diff(trace.entropy[steps, row])))
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


class Load(NamedTuple):
    """Serving more sequences than a step advances."""

    latency: np.ndarray  # [sequences], seconds from arrival to the last token
    tokens_per_second: float
    entropic_time_per_second: float


def serve(subject: Subject, setting: Preset, state: State, arrivals: np.ndarray, steps: int = 4) -> Load:
    """Decodes sequences that arrive at set times, `setting.width` of them a step.

    Their prompts have been read beforehand: what is timed is decoding and the order in which it is done.

    Args:
        subject: the model.
        setting: its `width` sequences advance in a step.
        state: from `resume`, one row per sequence, prompts in the cache; it is consumed.
        arrivals: float `[rows]`, seconds since the start, ascending.
        steps: steps between two looks at the clock.
    """
    rows = len(arrivals)
    order = default_load(rows)._replace(arrival=jnp.arange(rows, dtype=jnp.int32))
    waiting = jnp.full(rows, FULL, jnp.int32)
    state = state._replace(status=waiting, control=with_load(state.control, order))
    came, ended = np.zeros(rows, bool), np.full(rows, np.nan)
    tokens, began = 0, time.perf_counter()
    while np.isnan(ended).any():
        seconds = time.perf_counter() - began
        fresh = ~came & (arrivals <= seconds)
        if not fresh.any() and not (np.asarray(state.status) == RUNNING).any():
            time.sleep(max(0.0, float(arrivals[~came].min()) - seconds))
            continue
        came |= fresh
        state = state._replace(status=jnp.where(fresh, RUNNING, state.status))
        state, trace, _ = launch(subject, setting, state, steps)
        tokens += int(trace.emitted.sum())
        over = came & (np.asarray(state.status) != RUNNING) & np.isnan(ended)
        ended[over] = time.perf_counter() - began
    span = float(np.nanmax(ended))
    resolved = float(np.asarray(state.ledger.entropic_time).sum())
    return Load(ended - arrivals, tokens / span, resolved / span)


def distinct(texts: Sequence[Sequence[int]], n: int) -> float:
    """The share of n-grams that are different, mean over texts; 1 is no repetition."""
    grams = [[tuple(t[i : i + n]) for i in range(len(t) - n + 1)] for t in texts]
    return float(np.mean([len(set(g)) / len(g) for g in grams if g]))


def repetition(texts: Sequence[Sequence[int]], n: int = 8, window: int = 128) -> float:
    """The share of n-grams that were written within the last `window` tokens: the text loops; in [0, 1].

    Args:
        texts: token ids.
        n: tokens of an n-gram.
        window: how many tokens back a repeated n-gram may begin.
    """
    again = []
    for text in texts:
        last: dict[tuple[int, ...], int] = {}
        for i in range(len(text) - n + 1):
            gram = tuple(text[i : i + n])
            again.append(i - last[gram] <= window if gram in last else False)
            last[gram] = i
    return float(np.mean(again)) if again else 0.0


def divergence(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], n: int = 2) -> float:
    """Jensen–Shannon divergence of the n-gram distributions of two sets of texts, in nats, in [0, ln 2].

    Args:
        ours: token ids of one set.
        theirs: token ids of the other.
        n: tokens of an n-gram.
    """

    def shares(texts: Sequence[Sequence[int]]) -> dict[tuple[int, ...], float]:
        count: dict[tuple[int, ...], float] = {}
        for text in texts:
            for i in range(len(text) - n + 1):
                gram = tuple(text[i : i + n])
                count[gram] = count.get(gram, 0) + 1
        total = sum(count.values())
        return {gram: c / total for gram, c in count.items()}

    p, q = shares(ours), shares(theirs)
    middle = {gram: (p.get(gram, 0) + q.get(gram, 0)) / 2 for gram in {*p, *q}}

    def part(x):
        return sum(v * np.log(v / middle[gram]) for gram, v in x.items())

    return float((part(p) + part(q)) / 2)
