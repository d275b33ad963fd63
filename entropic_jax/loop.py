"""The closed loop: Entropy → Control → Attention → Logits → Entropy, one pure function per step.

`start` fills the cache with the prompts, `step` advances every running row by one token, `generate` runs
many steps in one launch, and `replay` runs the same step over given tokens.
"""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from . import entropy, ledger, sampling
from .attention import Step, attend_to
from .cache import Cache, ModelShape, grant
from .control import Controller, advance
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
        limit=jnp.asarray(np.minimum(lengths - 1 + budgets, context), jnp.int32),
        status=jnp.asarray(np.where(alive, RUNNING, FULL), jnp.int32),
        stop=jnp.asarray(stops),
        belief_temperature=jnp.float32(belief_temperature),
        sampling=sample,
        history=sampling.history(rows, vocabulary)._replace(prompt=jnp.asarray(seen)),
        signal=quiet_signal(rows),
        action=action,
        control=controller.init(action),
        ledger=ledger.open_ledger(rows),
        cache=cache,
    )
    # Launches consume the state: no two leaves may share a buffer, nor one of the caller's.
    small = {name: value for name, value in state._asdict().items() if name != "cache"}
    state = state._replace(**jax.tree.map(jnp.copy, small))
    todo = np.where(alive, lengths - 1, 0)
    done = 0
    while done < todo.max(initial=0):
        size = min(PREFILL_CHUNK, 1 << int(todo.max() - done - 1).bit_length())
        count = np.clip(todo - done, 0, size)
        tokens = np.zeros((rows, size), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : count[row]] = prompt[done : done + count[row]]
        state, enough = prefill(decoder, params, state, tokens, count)
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
    decoder: Decoder, params: Any, state: State, tokens: jax.Array, count: jax.Array
) -> tuple[State, jax.Array]:
    """Append `count[row]` of the tokens `[rows, n]` to the cache of each row.

    Returns the state and a flag per row, whether there were pages enough; a row without is left alone.
    """
    cache, enough = grant(state.cache, jnp.where(count > 0, state.length + count, 0))
    count = jnp.where(enough, count, 0)
    positions = state.length[:, None] + jnp.arange(tokens.shape[1])
    attend = attend_to(cache, Step(state.length, count))
    _, layers = decoder.hidden(params, tokens, positions, cache.layers, attend)
    return state._replace(length=state.length + count, cache=cache._replace(layers=layers)), enough


def step(
    decoder: Decoder, params: Any, controller: Controller, state: State, forced: jax.Array | None = None
) -> tuple[State, Trace]:
    """Advance every running row by one token: S[t+1] = Φ(S[t], u[t]).

    `forced` int32 `[rows]` replaces what would be sampled (teacher forcing). A row that is finished, waits
    (quota 0) or finds no free page is inert. A row whose logits are NaN ends with status FAILED and emits
    nothing; its neighbours do not notice.
    """
    active = (state.status == RUNNING) & (state.action.quota > 0)
    cache, enough = grant(state.cache, jnp.where(active, state.length + 1, 0))
    active &= enough
    attend = attend_to(cache, Step(state.length, active.astype(jnp.int32)))
    hidden, layers = decoder.hidden(params, state.token[:, None], state.length[:, None], cache.layers, attend)
    logits = decoder.logits(params, hidden[:, 0])

    belief = entropy.measure(logits / state.belief_temperature)
    broken = active & ~jnp.isfinite(belief.entropy)
    emits = active & ~broken
    keep = lambda new, old: jnp.where(emits, new, old)
    adjusted = sampling.penalise(logits, state.sampling, state.history)
    tempered = entropy.at_temperature(adjusted, state.action.temperature)
    signal = Signal(
        entropy=keep(belief.entropy, state.signal.entropy),
        varentropy=keep(belief.varentropy, state.signal.varentropy),
        tempered_entropy=keep(tempered.entropy, state.signal.tempered_entropy),
        tempered_varentropy=keep(tempered.varentropy, state.signal.tempered_varentropy),
        surprisal=state.signal.surprisal,
        dropped_mass=state.signal.dropped_mass,
        emitting=emits,
        logits=adjusted,
    )
    action, control = advance(controller, signal, state.action, state.control)

    length = state.length + active.astype(jnp.int32)
    token = forced
    if token is None:
        token = sampling.sample(
            adjusted,
            state.sampling,
            action.temperature,
            state.key,
            state.seed,
            length,
            surprisal_limit=action.surprisal_limit,
        )
    sampled = entropy.at_temperature(adjusted, action.temperature)  # one with `tempered` if T stands
    surprisal = entropy.surprisal(logits / state.belief_temperature, token, belief.log_normaliser)
    signal = signal._replace(
        tempered_entropy=keep(sampled.entropy, state.signal.tempered_entropy),
        tempered_varentropy=keep(sampled.varentropy, state.signal.tempered_varentropy),
        surprisal=keep(surprisal, state.signal.surprisal),
        logits=None,
    )
    account = ledger.post(state.ledger, state.signal.entropy, signal.entropy, emits)
    ended = (state.stop == token[:, None]).any(1)
    status = jnp.where(ended, STOPPED, jnp.where(length >= state.limit, FULL, RUNNING))
    after = state._replace(
        token=keep(token, state.token),
        length=length,
        status=jnp.where(broken, FAILED, keep(status, state.status)),
        history=sampling.record(state.history, token, emits),
        signal=signal,
        action=action,
        control=control,
        ledger=account,
        cache=cache._replace(layers=layers),
    )
    trace = Trace(
        emitted=emits,
        token=token,
        entropy=signal.entropy,
        varentropy=signal.varentropy,
        tempered_entropy=signal.tempered_entropy,
        tempered_varentropy=signal.tempered_varentropy,
        surprisal=signal.surprisal,
        temperature=action.temperature,
        drop=action.drop,
        dropped_mass=signal.dropped_mass,
        entropic_time=account.entropic_time,
    )
    return after, trace


@partial(jax.jit, static_argnames=("decoder", "capacity"), donate_argnames="state")
def generate(
    decoder: Decoder,
    params: Any,
    controller: Controller,
    state: State,
    steps: jax.Array | int,
    *,
    capacity: int = 64,
) -> tuple[State, Trace]:
    """Run up to `steps` (traced, at most `capacity`) steps in one launch, fewer if every row ends.

    The state is consumed. The trace has `capacity` steps, of which those that were run are filled.
    """
    blank = jax.eval_shape(lambda s: step(decoder, params, controller, s)[1], state)
    trace = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), blank)

    def running(carry):
        done, state, _ = carry
        return (done < jnp.minimum(steps, capacity)) & (state.status == RUNNING).any()

    def advance(carry):
        done, state, trace = carry
        state, now = step(decoder, params, controller, state)
        return done + 1, state, jax.tree.map(lambda all_, x: all_.at[done].set(x), trace, now)

    _, state, trace = jax.lax.while_loop(running, advance, (jnp.int32(0), state, trace))
    return state, trace


@partial(jax.jit, static_argnames="decoder")
def replay(
    decoder: Decoder, params: Any, controller: Controller, state: State, tokens: jax.Array
) -> tuple[State, Trace]:
    """Run the step over the given tokens int32 `[rows, steps]` in place of sampled ones.

    Differentiable with respect to `params` and the controller's gains wherever the controller is.
    """
    body = lambda state, token: step(decoder, params, controller, state, token)
    return jax.lax.scan(body, state, tokens.T)
