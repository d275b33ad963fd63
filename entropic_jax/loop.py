"""The closed loop, one pure function per step: Entropy → Control → Attention → Logits → Entropy.

The life of a token is `step`: gather the active rows, run the model over them, emit a token per row (process
the logits, measure their entropy, let the controller act, sample, account), scatter the rows back, and let
the controller schedule the next step. `start` fills the cache with the prompts, `generate` runs many steps in
one launch, and `replay` runs the same step over given tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import control
from .control import Controller, take_rows
from .mesh import sharding
from .phases.batch import gather_active, record, record_text, scatter
from .phases.emission import emit
from .phases.forward import decode, decode_cost
from .phases.prefill import PrefillChunk, launch_prefill, prefill, start
from .phases.start_check import CheckedProgram, check_controlled, check_generated, check_replayed
from .speculation import (
    ControlledModel,
    Speculator,
    check_speculation,
    draft,
    num_resting,
    rested,
    verify_and_emit,
)
from .state import RUNNING, SchedulingSignal, State, Trace
from .state.constraints import Constraints
from .state.decoder import Decoder
from .state.stacking import Stacking, StateStacking

__all__ = [
    "Decoder",
    "PrefillChunk",
    "generate",
    "launch_prefill",
    "prefill",
    "replay",
    "run",
    "schedule",
    "speculative_step",
    "start",
    "step",
]


def step(
    decoder: Decoder,
    params: Any,
    controller: Controller,
    state: State,
    forced: jax.Array | None = None,
    width: int | None = None,
    constraints: Constraints | None = None,
) -> tuple[State, Trace]:
    """Advances every running row by one token: S[t+1] = Φ(S[t], u[t]).

    A row that has ended, waits (quota 0) or finds no free page is inert. A row whose logits are NaN ends with
    status FAILED and emits nothing; other rows are not affected.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        controller: the control law.
        state: the loop's state.
        forced: int32 `[rows]`, the tokens to emit in place of sampled ones (teacher forcing).
        width: rows that are computed at most: the first of those that run and have a quota. Static.
        constraints: per-row constraints on sampling; with them the trace has the likeliest tokens.

    Returns:
        The next state, and the trace of the step, `[rows]`.
    """
    rows, state, batch = gather_active(state, width)
    forced, constraints, laws = rows.gather(forced), rows.gather(constraints), take_rows(controller, rows)
    before = batch.state
    batch, output = decode(decoder, params, batch, getattr(controller, "observes", None))
    cost = decode_cost(decoder, params, batch, output)
    after, trace = emit(laws, batch, output, cost, forced, constraints)
    state = scatter(state, rows, before, after)
    trace = rows.scatter(trace, jax.tree.map(lambda x: jnp.zeros((), x.dtype), trace))
    state = record(state, trace.token[None], trace.emitted[None])
    return schedule(controller, state, trace.emitted), trace


def speculative_step(
    decoder: Decoder,
    params: Any,
    controller: Controller,
    speculator: Speculator,
    state: State,
    width: int | None = None,
    constraints: Constraints | None = None,
) -> tuple[State, Trace]:
    """Advances every running row by one or more tokens, those that as many calls of `step` would emit.

    Draft, verify in one dense pass, emit up to the first token that was not drafted. The state's page policy
    is not used.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        controller: the control law.
        speculator: the drafter and the draft-length law.
        state: the state of the loop, with the rows' text.
        width: as in `step`.
        constraints: as in `step`. A row with a forced token advances by one.

    Returns:
        The next state, and the trace `[k + 1, rows]` of the pass: a row's tokens come first.
    """
    rows, state, batch = gather_active(state, width, speculator.drafter.most_tokens)
    room = rows.gather(state.cache.granted) * state.cache.page_size
    constraints, laws = rows.gather(constraints), take_rows(controller, rows)
    model = ControlledModel(decoder, params, laws)
    drafted, plan = draft(speculator, model, batch, room, constraints)
    after, trace = verify_and_emit(speculator, model, drafted, plan, constraints)
    state = scatter(state, rows, batch.state, after)
    trace = jax.vmap(lambda x: rows.scatter(x, jax.tree.map(lambda y: jnp.zeros((), y.dtype), x)))(trace)
    if rows.index is None:  # emission has kept the history of all rows
        state = record_text(state._replace(history=after.history), trace.token, trace.emitted)
    else:
        state = record(state, trace.token, trace.emitted)
    return schedule(controller, state, trace.emitted[0]), trace


def schedule(controller: Controller, state: State, emitted: jax.Array) -> State:
    """Lets the controller's law across rows set the quotas of the next step.

    Args:
        controller: the control law.
        state: the state of the loop, after sampling.
        emitted: bool `[rows]`, the rows that emitted a token in this step.

    Returns:
        The state with the next action.
    """
    signal = SchedulingSignal(
        *state.measured, emitting=emitted, runnable=state.status == RUNNING, length=state.length
    )
    action, law_state = control.schedule_rows(controller, signal, state.action, state.control)
    return state._replace(action=action, control=law_state)


@partial(CheckedProgram, check=check_generated)
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
    speculator: Speculator | None = None,
) -> tuple[State, Trace]:
    """Runs up to `steps` steps in one launch, fewer if every row ends.

    Args:
        decoder: the model's pure functions. Static.
        params: its parameters.
        controller: the control law.
        state: the loop's state; it is consumed.
        steps: at least 0; those past `capacity` are not run. Traced.
        capacity: steps of the trace, at least 1. Static.
        width: as in `step`, at least 1. Static.
        speculator: drafts tokens for a state that was started with it; None decodes one by one.

    Returns:
        The state, and the trace `[capacity, rows]`, with a speculator `[capacity · (k + 1), rows]`: the
        tokens of a row are its first ones.
    """
    check_controlled(controller, state)
    check_speculation(speculator, controller, state)

    def program(params, state, controller, speculator, steps):
        def plain(state: State, number: jax.Array) -> tuple[State, Trace]:
            return step(decoder, params, controller, state, width=width)

        if speculator is None:
            return run(plain, state, steps, capacity)[::2]  # without the number of steps
        drafting = partial(speculative_step, decoder, params, controller, speculator, width=width)
        return run(lambda state, _: drafting(state), state, steps, capacity, resting(plain))[::2]

    return sharding.launch(decoder, program, params, state, controller, speculator, steps)


class Resting(NamedTuple):
    """Plain steps, which emit one token a row, between steps that may emit several."""

    number: Callable[[State], jax.Array]  # int32 [], how many of them come next
    advance: Callable[[State, jax.Array], tuple[State, Trace]]  # one of them, with a trace `[rows]`


def resting(
    advance: Callable[[State, jax.Array], tuple[State, Trace]], constraints: Constraints | None = None
) -> Resting:
    """The plain steps that rows take while drafting does not pay.

    Args:
        advance: one plain step, as for `run`.
        constraints: the constraints of the rows.
    """

    def plain(state: State, number: jax.Array) -> tuple[State, Trace]:
        state, trace = advance(state, number)
        return rested(state), trace

    return Resting(partial(num_resting, constraints=constraints), plain)


def run(
    advance: Callable[[State, jax.Array], tuple[State, Trace]],
    state: State,
    steps: jax.Array | int,
    capacity: int,
    resting: Resting | None = None,
) -> tuple[State, jax.Array, Trace]:
    """Runs `advance(state, number of the step)` up to `steps` times, fewer if every row ends.

    Args:
        advance: one step of the loop, with a trace `[rows]`, or `[n, rows]` where it emits several tokens.
        state: the loop's state.
        steps: traced, at most `capacity`.
        capacity: steps of the trace.
        resting: plain steps, which are run in place of some of these; they must then emit several tokens.

    Returns:
        The state, the number of steps run (int32 `[]`), and the trace `[capacity, rows]` or
        `[capacity · n, rows]`, in which the tokens of a row come first.
    """
    blank = jax.eval_shape(advance, state, jnp.int32(steps))[1]
    fields, measured = StateStacking(state), Stacking(blank, blank.emitted.shape)

    def running(carry):
        done, (state, changed), _ = carry
        state = fields.unstack(state, changed)
        return (done < jnp.minimum(steps, capacity)) & (state.status == RUNNING).any()

    def body(carry):
        done, (state, changed), traces = carry
        state, trace = advance(fields.unstack(state, changed), done)
        return done + 1, fields.split(state), measured.put(traces, trace, done)

    if resting is not None:
        body = _after_rest(resting, fields, running, body)
    carry = jnp.int32(0), fields.split(state), measured.room(capacity)
    done, (state, changed), traces = jax.lax.while_loop(running, body, carry)
    if blank.emitted.ndim == 2:
        traces = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), traces)
    return fields.unstack(state, changed), done, tokens_first(measured.unstack(traces))


def _after_rest(
    resting: Resting,
    fields: StateStacking,
    running: Callable[[Any], jax.Array],
    body: Callable[[Any], Any],
) -> Any:
    """The body of a loop that takes the plain steps which come next, and then what is left to do of `body`.

    Args:
        resting: the plain steps.
        fields: how the loop carries its state.
        running: whether a step is left to run, of what the loop carries.
        body: body of the loop without plain steps.
    """

    def plain(carry: Any) -> Any:
        done, (state, changed), traces = carry
        state, trace = resting.advance(fields.unstack(state, changed), done)
        measured = Stacking(trace, trace.emitted.shape)
        return done + 1, fields.split(state), measured.put(traces, trace, done, 0)

    def after_rest(carry: Any) -> Any:
        until = carry[0] + resting.number(fields.unstack(*carry[1]))
        carry = jax.lax.while_loop(lambda c: running(c) & (c[0] < until), plain, carry)
        # A loop of no or one turn, because XLA copies the page pool into a conditional.
        return jax.lax.while_loop(lambda c: running(c) & (c[0] == until), body, carry)

    return after_rest


def tokens_first(trace: Trace) -> Trace:
    """The trace with every row's tokens moved to its beginning: rows advance unevenly."""
    capacity, rows = trace.emitted.shape
    number, row = jnp.arange(capacity, dtype=jnp.int32)[:, None], jnp.arange(rows)
    place = jnp.where(trace.emitted, jnp.cumsum(trace.emitted, 0) - 1, capacity)
    # One scatter of indices and a gather per field: on a CPU, XLA scatters element by element.
    source = jnp.zeros((capacity, rows), jnp.int32).at[place, row].set(number, mode="drop")
    there = number < trace.num_tokens

    def take(x: jax.Array) -> jax.Array:
        shown = there.reshape(*there.shape, *[1] * (x.ndim - 2))
        return jnp.where(shown, x[source, row], jnp.zeros((), x.dtype))

    stacking = Stacking(trace, trace.emitted.shape)
    return stacking.unstack(jax.tree.map(take, stacking.stack(trace)))


@partial(CheckedProgram, check=check_replayed)
@partial(jax.jit, static_argnames="decoder")
def replay(
    decoder: Decoder, params: Any, controller: Controller, state: State, tokens: jax.Array
) -> tuple[State, Trace]:
    """Runs the step over given tokens in place of sampled ones.

    Differentiable with respect to `params` and the controller's gains wherever the controller is.

    Args:
        decoder: the model's pure functions. Static.
        params: its parameters.
        controller: the control law.
        state: the loop's state.
        tokens: int32 `[rows, steps]`.

    Returns:
        The state, and the trace `[steps, rows]`.

    Raises:
        ValueError: the tokens are no integers `[rows, steps]`, or outside the vocabulary.
    """
    check_controlled(controller, state)

    def program(params, state, controller, tokens):
        def body(state, token):
            return step(decoder, params, controller, state, token)

        return jax.lax.scan(body, state, tokens.T)

    return sharding.launch(decoder, program, params, state, controller, tokens)
