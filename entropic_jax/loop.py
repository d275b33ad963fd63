"""The closed loop: Entropy → Control → Attention → Logits → Entropy, one pure function per step.

`start` fills the cache with the prompts, `step` advances every running row by one token, `generate` runs
many steps in one launch, and `replay` runs the same step over given tokens.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from . import entropy, ledger, sampling, step_entropy
from .attention.attend import Step, attend_to
from .attention.page_selection import PagePolicy, ReadStats
from .attention.statistics import Observer
from .cache import Cache, ModelShape, grant, note_surprisal
from .control import Controller, update_rows
from .row_subset import RowSubset
from .sampling.constraints import Constraints, any_constraint, constrain, likeliest
from .sampling.randomness import row_keys
from .state import FAILED, FULL, RUNNING, STOPPED, Signal, State, Trace, plain_action, quiet_signal

PREFILL_CHUNK = 512  # positions a row takes at once, at most; always a power of two


class Decoder(Hashable, Protocol):
    """A decoder-only language model as the loop sees it: pure functions of `params`."""

    @property
    def shape(self) -> ModelShape:
        """Its sizes."""

    def hidden(
        self, params: Any, tokens: jax.Array, positions: jax.Array, layers: tuple[Any, ...], attend: Any
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Last hidden states `[rows, n, hidden]` of tokens `[rows, n]`, and the layers as written."""

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """float32 `[..., vocabulary]`."""


def start(
    decoder: Decoder,
    params: Any,
    controller: Controller,
    cache: Cache,
    prompts: Sequence[Sequence[int]],
    *,
    key: jax.Array,
    max_tokens: int | Sequence[int],
    sample: sampling.Sampling | None = None,
    seeds: Sequence[int] | None = None,
    stop: Sequence[Sequence[int]] = (),
    belief_temperature: float = 1.0,
    page_policy: PagePolicy | None = None,
    hardware: ledger.Hardware | None = None,
) -> State:
    """Read the prompts into an empty cache, in chunks whose lengths are powers of two.

    One prompt of at least one token per row; a row without a prompt (`[]`) stays out of the batch. The last
    token of a prompt is left to the first step, which thereby emits the first new token. The cache is
    consumed. Raises ValueError where a prompt is outside the vocabulary or does not fit.
    """
    rows, context = cache.table.shape[0], cache.table.shape[1] * cache.page_size
    vocabulary = decoder.shape.vocabulary
    if len(prompts) != rows:
        raise ValueError(f"prompts has {len(prompts)} entries; accepted are {rows}, one per row of the cache")
    budgets = np.broadcast_to(np.asarray(max_tokens, np.int32), rows)
    lengths = np.array([len(p) for p in prompts], np.int32)
    for row, prompt in enumerate(prompts):
        wrong = [t for t in prompt if not 0 <= t < vocabulary]
        if wrong:
            raise ValueError(f"prompts[{row}] holds token {wrong[0]}; accepted are 0 to {vocabulary - 1}")
        if lengths[row] > context:
            raise ValueError(
                f"prompts[{row}] has {lengths[row]} tokens; accepted are at most {context}, as the cache"
            )
    seen = np.zeros((rows, vocabulary), bool)
    for row, prompt in enumerate(prompts):
        seen[row, np.asarray(prompt, np.int64)] = True
    stops = np.full((rows, max([1, *map(len, stop)])), -1, np.int32)
    for row, tokens in enumerate(stop):
        stops[row, : len(tokens)] = tokens
    sample = sampling.parameters(rows) if sample is None else sample
    alive = (lengths > 0) & (budgets > 0)
    action = plain_action(sample.temperature)
    state = State(
        key=key,
        seed=jnp.asarray(np.arange(rows) if seeds is None else np.asarray(seeds), jnp.int32),
        token=jnp.asarray([p[-1] if len(p) else 0 for p in prompts], jnp.int32),
        length=jnp.zeros(rows, jnp.int32),
        evicted=jnp.zeros(rows, jnp.int32),
        limit=jnp.asarray(np.minimum(lengths - 1 + budgets, context), jnp.int32),
        status=jnp.asarray(np.where(alive, RUNNING, FULL), jnp.int32),
        stop=jnp.asarray(stops),
        belief_temperature=jnp.float32(belief_temperature),
        sampling=sample,
        history=sampling.history(rows, vocabulary)._replace(prompt=jnp.asarray(seen)),
        signal=quiet_signal(rows),
        action=action,
        control=controller.init(action),
        page_policy=page_policy,
        page_policy_state=() if page_policy is None else page_policy.memory(decoder.shape, cache),
        age=jnp.int32(0),
        ledger=ledger.open_ledger(rows),
        hardware=jax.tree.map(jnp.float32, hardware or ledger.default_hardware()),
        cache=cache,
    )
    # Launches consume the state: no two leaves may share a buffer, nor one of the caller's.
    small = {name: value for name, value in state._asdict().items() if name != "cache"}
    state = state._replace(**jax.tree.map(jnp.copy, small))
    todo = np.where(alive, lengths - 1, 0)
    total = jnp.asarray(todo, jnp.int32)
    chunk = getattr(page_policy, "segment", PREFILL_CHUNK)
    done = 0
    while done < todo.max(initial=0):
        size = min(chunk, 1 << int(todo.max() - done - 1).bit_length())
        count = np.clip(todo - done, 0, size)
        tokens = np.zeros((rows, size + 1), np.int32)
        for row, prompt in enumerate(prompts):
            some = prompt[done : done + count[row] + 1] if count[row] else ()
            tokens[row, : len(some)] = some
        state, enough = prefill(decoder, params, state, tokens, count, total)
        if not np.all(enough):
            row = int(np.argmin(enough))
            raise ValueError(
                f"the cache has too few pages for prompts[{row}] of {lengths[row]} tokens: "
                f"{cache_size(state)}; accepted are prompts that fit together"
            )
        done += size
    return state


def cache_size(state: State) -> str:
    """The size of the page pool in words."""
    return f"{state.cache.pages} pages of {state.cache.page_size} positions"


@partial(jax.jit, static_argnames="decoder", donate_argnames="state")
def prefill(
    decoder: Decoder, params: Any, state: State, tokens: jax.Array, count: jax.Array, total: Any = None
) -> tuple[State, jax.Array]:
    """Append `count[row]` of the tokens `[rows, n + 1]` to the cache of each row, n at most.

    `total` int32 `[rows]` is how many tokens a row's prompt has in all, for a selection that treats the last
    chunk differently; without, every chunk counts as the last.

    Returns the state and a flag per row, whether there were pages enough; a row without is left alone. Where
    the cache keeps surprisals, the tokens are scored on the way, and so is the one that follows them.
    """
    tokens, following = tokens[:, :-1], tokens[:, 1:]
    cache, enough = grant(state.cache, jnp.where(count > 0, state.length + count, 0))
    count = jnp.where(enough, count, 0)
    positions = (state.length + state.evicted)[:, None] + jnp.arange(tokens.shape[1])
    where = Step(state.length, count)
    reader = None
    if state.page_policy is not None:
        ends = state.length + count if total is None else total
        reader = state.page_policy.prompt_reader(cache, state.page_policy_state, where, ends)
    attend = attend_to(cache, where, reader)
    hidden, layers = decoder.hidden(params, tokens, positions, cache.layers, attend)
    signal = state.signal
    if cache.surprisal is not None:
        logits = decoder.logits(params, hidden)
        scores = entropy.surprisal(logits, following, entropy.entropy_statistics(logits).log_normaliser)
        own = jnp.concatenate(
            [signal.surprisal[:, None], scores[:, :-1]], 1
        )  # the first: of the chunk before
        cache = note_surprisal(cache, state.length, count, own)
        last = jnp.take_along_axis(scores, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0]
        signal = signal._replace(surprisal=jnp.where(count > 0, last, signal.surprisal))
    after = state._replace(length=state.length + count, signal=signal, cache=cache._replace(layers=layers))
    return after if reader is None else after._replace(page_policy_state=reader.memory()), enough


def step(
    decoder: Decoder,
    params: Any,
    controller: Controller,
    state: State,
    forced: jax.Array | None = None,
    width: int | None = None,
    constraints: Constraints | None = None,
) -> tuple[State, Trace]:
    """Advance every running row by one token: S[t+1] = Φ(S[t], u[t]).

    `forced` int32 `[rows]` replaces what would be sampled (teacher forcing). `width` (static) is how many
    rows are computed at most: the first of those that run and have a quota. `constraints` are what the rows
    are held to beyond sampling; with them the trace has the likeliest tokens. A row that is finished, waits
    (quota 0) or finds no free page is inert. A row whose logits are NaN ends with status FAILED and emits
    nothing; its neighbours do not notice.
    """
    active = (state.status == RUNNING) & (state.action.quota > 0)
    cut = RowSubset(active, width)
    active &= cut.scatter(jnp.ones(cut.rows, bool), False)
    cache, enough = grant(state.cache, jnp.where(active, state.length + 1, 0))
    active &= enough

    # Attention, then logits.
    mine = cache._replace(table=cut.gather(cache.table, cache.pages))
    token, start, runs = cut.gather(state.token), cut.gather(state.length), cut.gather(active)
    where = Step(start, runs.astype(jnp.int32))
    surprisal = cut.gather(state.signal.surprisal)
    mine = note_surprisal(mine, start, where.count, surprisal[:, None])
    reader = None
    if state.page_policy is not None:
        memory = jax.tree.map(cut.gather, state.page_policy_state)
        reader = state.page_policy.reader(
            mine, cut.gather(state.action.dropped_mass_limit), memory, state.age
        )
    observed = getattr(controller, "observes", None)
    observer = Observer(observed, mine) if observed else None
    attend = attend_to(mine, where, reader, observer)
    position = start + cut.gather(state.evicted)
    hidden, layers = decoder.hidden(params, token[:, None], position[:, None], mine.layers, attend)
    logits = decoder.logits(params, hidden[:, 0])
    reading = reader.total() if reader else dense(decoder.shape, where)
    policy_state = jax.tree.map(cut.scatter, reader.memory(), state.page_policy_state) if reader else ()

    # Entropy, then control.
    sample, history = jax.tree.map(cut.gather, (state.sampling, state.history))
    adjusted, changed = sampling.penalise(logits, sample, history), sampling.adjusts(sample)
    if constraints is not None:
        constraints = jax.tree.map(cut.gather, constraints)
        adjusted = constrain(adjusted, constraints, cut.gather(state.stop, -1), position + where.count)
        changed |= any_constraint(constraints, position + where.count)
    before = cut.gather(state.action.temperature)
    belief, tempered = step_entropy.of_step(logits, adjusted, changed, before, state.belief_temperature)
    broken = cut.scatter(runs & ~jnp.isfinite(belief.entropy), False)
    emits = active & ~broken
    keep = lambda new, old: jnp.where(emits, cut.scatter(new, old), old)
    signal = Signal(
        entropy=keep(belief.entropy, state.signal.entropy),
        varentropy=keep(belief.varentropy, state.signal.varentropy),
        tempered_entropy=keep(tempered.entropy, state.signal.tempered_entropy),
        tempered_varentropy=keep(tempered.varentropy, state.signal.tempered_varentropy),
        surprisal=state.signal.surprisal,
        dropped_mass=keep(reading.dropped, state.signal.dropped_mass),
        emitting=emits,
        runnable=(state.status == RUNNING) & ~broken & (state.length + 1 < state.limit),
        length=state.length,
        logits=cut.scatter(adjusted, 0.0),
        key=row_keys(state.key, state.seed, state.length + state.evicted + 1),
        focus=jax.tree.map(lambda x: cut.scatter(x, 0.0), observer.total()) if observer else None,
    )
    undecided = state.action._replace(token=jnp.full_like(state.token, -1))
    action, control = update_rows(controller, signal, undecided, state.control)

    # Sampling.
    length = state.length + active.astype(jnp.int32)
    temperature, chosen = cut.gather(action.temperature), cut.gather(action.token)
    action = action._replace(token=None)
    if forced is None:
        token = sampling.sample(
            adjusted,
            sample,
            jnp.where(chosen < 0, temperature, 0.0),  # nothing is drawn where the law has chosen
            state.key,
            cut.gather(state.seed),
            position + where.count,
            surprisal_limit=cut.gather(action.surprisal_limit),
        )
        token = jnp.where(chosen < 0, token, chosen)
    else:
        token = cut.gather(forced)
    if constraints is not None:
        token = jnp.where(constraints.forced >= 0, constraints.forced, token)
    sampled = step_entropy.anew(adjusted, temperature, before, tempered)
    surprisal = entropy.surprisal(logits / state.belief_temperature, token, belief.log_normaliser)
    token = keep(token, state.token)
    signal = signal._replace(
        tempered_entropy=keep(sampled.entropy, state.signal.tempered_entropy),
        tempered_varentropy=keep(sampled.varentropy, state.signal.tempered_varentropy),
        surprisal=keep(surprisal, state.signal.surprisal),
        logits=None,
        key=None,
        focus=None,
    )
    cost = ledger.step_cost(
        decoder.shape,
        active=active,
        positions_read=cut.scatter(reading.positions + reading.summaries, 0.0),
        length=length,
        bytes_per_weight=min(x.dtype.itemsize for x in jax.tree.leaves(params)),
        bytes_per_cache=cache.bytes_per_number,
        hardware=state.hardware,
    )
    account = ledger.post(state.ledger, state.signal.entropy, signal.entropy, emits, cost)
    ended = (state.stop == token[:, None]).any(1)
    status = jnp.where(ended, STOPPED, jnp.where(length >= state.limit, FULL, RUNNING))
    after = state._replace(
        token=token,
        length=length,
        status=jnp.where(broken, FAILED, jnp.where(emits, status, state.status)),
        history=sampling.record(state.history, token, emits),
        signal=signal,
        action=action,
        control=control,
        page_policy_state=policy_state,
        age=state.age + 1,
        ledger=account,
        cache=cache._replace(layers=layers, surprisal=mine.surprisal),
    )
    zero = jnp.zeros_like(signal.entropy)
    trace = Trace(
        emitted=emits,
        token=token,
        entropy=signal.entropy,
        varentropy=signal.varentropy,
        tempered_entropy=signal.tempered_entropy,
        tempered_varentropy=signal.tempered_varentropy,
        surprisal=signal.surprisal,
        temperature=action.temperature,
        dropped_mass_limit=state.action.dropped_mass_limit,
        dropped_mass=signal.dropped_mass,
        kept_fraction=cut.scatter(reading.positions / jnp.maximum(reading.held, 1.0), zero),
        certificate=cut.scatter(reading.certificate, zero),
        entropic_time=account.entropic_time,
        cost=cost.seconds,
    )
    if constraints is not None:
        found = likeliest(logits, cut.gather(token), constraints.reported)
        trace = trace._replace(likeliest=jax.tree.map(lambda x: cut.scatter(x, 0), found))
    return after, trace


def dense(shape: ModelShape, step: Step) -> ReadStats:
    """What a step reads that reads everything."""
    positions = jnp.where(step.count > 0, step.start + step.count, 0) * shape.kv_heads * shape.layers
    positions = positions.astype(jnp.float32)
    zero = jnp.zeros_like(positions)
    return ReadStats(positions, positions, dropped=zero, certificate=zero)


@partial(jax.jit, static_argnames=("decoder", "capacity", "width"), donate_argnames="state")
def generate(
    decoder: Decoder,
    params: Any,
    controller: Controller,
    state: State,
    steps: jax.Array | int,
    *,
    capacity: int = 64,
    width: int | None = None,
) -> tuple[State, Trace]:
    """Run up to `steps` (traced, at most `capacity`) steps in one launch, fewer if every row ends.

    `width` as in `step`. The state is consumed. The trace has `capacity` steps, of which those that were run
    are filled.
    """
    one = lambda state, now: step(decoder, params, controller, state, width=width)
    state, _, trace = run(one, state, steps, capacity)
    return state, trace


def run(
    one: Callable[[State, jax.Array], tuple[State, Trace]],
    state: State,
    steps: jax.Array | int,
    capacity: int,
) -> tuple[State, jax.Array, Trace]:
    """Up to `steps` times `one(state, number of the step)`, at most `capacity`, fewer if every row ends.

    Also returns how many there were, int32 `[]`, and their trace `[capacity, rows]`.
    """
    blank = jax.eval_shape(lambda s: one(s, jnp.int32(0))[1], state)
    trace = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), blank)

    def running(carry):
        done, state, _ = carry
        return (done < jnp.minimum(steps, capacity)) & (state.status == RUNNING).any()

    def further(carry):
        done, state, trace = carry
        state, now = one(state, done)
        return done + 1, state, jax.tree.map(lambda all_, x: all_.at[done].set(x), trace, now)

    done, state, trace = jax.lax.while_loop(running, further, (jnp.int32(0), state, trace))
    return state, done, trace


@partial(jax.jit, static_argnames="decoder")
def replay(
    decoder: Decoder, params: Any, controller: Controller, state: State, tokens: jax.Array
) -> tuple[State, Trace]:
    """Run the step over the given tokens int32 `[rows, steps]` in place of sampled ones.

    Differentiable with respect to `params` and the controller's gains wherever the controller is.
    """
    body = lambda state, token: step(decoder, params, controller, state, token)
    return jax.lax.scan(body, state, tokens.T)
