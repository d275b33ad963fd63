"""Emission: from a row's logits to its next token, one position at a time.

Process the logits, measure their entropy, let the controller act, choose a token, account for it. On a mesh,
each device decides the tokens of its own rows, and all devices account for all of them (`row_shards`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import control, entropy, sampling
from ..entropy import EntropyStatistics
from ..sampling import step_entropy
from ..sampling.constraints import any_constraint, constrain, pauses, top_logprobs
from ..sampling.randomness import row_keys
from ..state import (
    FAILED,
    FULL,
    PAUSED,
    RUNNING,
    STOPPED,
    Action,
    Focus,
    Measured,
    Signal,
    State,
    TopLogprobs,
    Trace,
    ledger,
)
from ..state.constraints import Constraints
from ..state.row_subset import where_rows
from .batch import Batch
from .forward import Forward
from .row_shards import over_row_shards


class Logits(NamedTuple):
    """The logits of a position, before and after processing; float32 `[rows, vocabulary]`."""

    raw: jax.Array  # of the model: the belief and the surprisal are theirs
    processed: jax.Array  # after penalties, bias and constraints: what is sampled from
    changed: jax.Array  # bool []: whether the two may differ


class Decision(NamedTuple):
    """The token and the control that follow from the logits of a position; one entry per row."""

    emitting: jax.Array  # bool [rows]: the row emits a token; other active rows have failed (NaN logits)
    token: jax.Array  # int32 [rows], that of the position before in rows that emit none
    measured: Measured  # of the token
    action: Action
    control: Any  # state of the controller
    top_logprobs: TopLogprobs | tuple[()]  # without constraints, none are reported


def emit(
    controller: Any,
    batch: Batch,
    forward: Forward,
    cost: ledger.Cost,
    forced: jax.Array | None,
    constraints: Constraints | None,
) -> tuple[State, Trace]:
    """Emits one token in every active row: process, measure, control, choose, account.

    Args:
        controller: the control law of these rows.
        batch: the rows, with the cache as the forward pass left it.
        forward: their logits, and what was read.
        cost: the cost of the token, for the ledger.
        forced: int32 `[rows]`, tokens to emit in place of sampled ones.
        constraints: the constraints of these rows.

    Returns:
        The rows after the token, and its trace. Inactive rows and rows of NaN logits emit nothing.
    """
    before, read = batch.state, forward.read
    decision = over_row_shards(
        decide, controller, batch, forward.logits, read.dropped_mass, forward.focus, forced, constraints
    )
    after = before._replace(
        token=decision.token,
        measured=decision.measured,
        action=decision.action,
        control=decision.control,
    )
    after = advance(batch, after, decision.emitting, constraints)
    entropies = before.measured.entropy, after.measured.entropy
    after = after._replace(ledger=ledger.add_step(after.ledger, *entropies, decision.emitting, cost))
    return after, trace_of(before, after, forward, decision, cost)


def decide(
    controller: Any,
    batch: Batch,
    raw: jax.Array,
    dropped_mass: jax.Array,
    focus: Focus | None,
    forced: jax.Array | None,
    constraints: Constraints | None,
) -> Decision:
    """Decides the next token of every active row: process, measure, control, choose.

    Args:
        controller: the control law of these rows.
        batch: the rows before the token.
        raw: float32 `[rows, vocabulary]`, the logits of the model.
        dropped_mass: float32 `[rows]`, attention mass left unread.
        focus: statistics of attention, where the controller observes it.
        forced: int32 `[rows]`, tokens to emit in place of sampled ones.
        constraints: the constraints of these rows.
    """
    state = batch.state
    logits = process(raw, state, constraints)
    belief, tempered = measure(logits, batch)
    emitting = batch.active & jnp.isfinite(belief.entropy)
    measured = measurements(belief, tempered, state.measured.surprisal, dropped_mass)
    signal = observe(batch, where_rows(emitting, measured, state.measured), emitting, logits, focus)
    action, law_state = control.update_rows(controller, signal, state.action, state.control)
    token = jnp.where(emitting, choose(logits, batch, action, forced, constraints), state.token)
    measured = measure_token(batch, logits, belief, tempered, action, token, dropped_mass)
    likeliest: TopLogprobs | tuple[()] = ()
    if constraints is not None:
        likeliest = top_logprobs(raw, token, constraints.report_logprobs)
    return Decision(
        emitting,
        token,
        where_rows(emitting, measured, state.measured),
        action._replace(token=state.action.token),
        law_state,
        likeliest,
    )


def process(logits: jax.Array, state: State, constraints: Constraints | None) -> Logits:
    """Applies penalties, bias and constraints to the logits of a position.

    Args:
        logits: float32 `[rows, vocabulary]`.
        state: the state of the rows before the token.
        constraints: the constraints of the rows, None for none.
    """
    processed = sampling.penalise(logits, state.sampling, state.history)
    changed = sampling.adjusts(state.sampling)
    if constraints is not None:
        length = state.length + state.evicted + 1  # of the text with the token to come
        processed = constrain(processed, constraints, state.stop, length)
        changed |= any_constraint(constraints, length)
    return Logits(logits, processed, changed)


def measure(logits: Logits, batch: Batch) -> tuple[EntropyStatistics, EntropyStatistics]:
    """Statistics of the belief, and of the distribution at the temperature before the controller acts."""
    state, temperature = batch.state, batch.state.action.temperature
    return step_entropy.measure(
        logits.raw, logits.processed, logits.changed, temperature, state.belief_temperature, batch.active
    )


def measurements(
    belief: EntropyStatistics, tempered: EntropyStatistics, surprisal: jax.Array, dropped_mass: jax.Array
) -> Measured:
    """The measurements of a token.

    Args:
        belief: statistics of softmax(z / T_cal).
        tempered: statistics of the distribution that is sampled from.
        surprisal: float32 `[rows]`, nats, of the token.
        dropped_mass: float32 `[rows]`, attention mass left unread.
    """
    return Measured(
        belief.entropy,
        belief.varentropy,
        tempered.entropy,
        tempered.varentropy,
        surprisal,
        dropped_mass,
    )


def observe(
    batch: Batch, measured: Measured, emitting: jax.Array, logits: Logits, focus: Focus | None
) -> Signal:
    """The signal from which the controller decides how the next token is drawn.

    Args:
        batch: the rows before the token.
        measured: the measurements of the token to come, but for its surprisal, which is that of the token
            before.
        emitting: bool `[rows]`, the rows that emit a token.
        logits: the logits of the position.
        focus: statistics of attention, where the controller observes it.
    """
    state = batch.state
    failed = batch.active & ~emitting
    return Signal(
        *measured,
        emitting=emitting,
        runnable=(state.status == RUNNING) & ~failed & (state.length + 1 < state.limit),
        length=state.length,
        requested_temperature=state.sampling.temperature,
        logits=logits.processed,
        key=row_keys(state.key, state.seed, state.length + state.evicted + 1),
        focus=focus,
    )


def measure_token(
    batch: Batch,
    logits: Logits,
    belief: EntropyStatistics,
    tempered: EntropyStatistics,
    action: Action,
    token: jax.Array,
    dropped_mass: jax.Array,
) -> Measured:
    """The measurements of a token that has been chosen.

    Args:
        batch: the rows before the token.
        logits: from which it was chosen.
        belief: statistics of the belief.
        tempered: statistics at the temperature before the controller acted.
        action: what the controller has decided; at its temperature the token was sampled.
        token: int32 `[rows]`.
        dropped_mass: float32 `[rows]`, attention mass left unread.
    """
    state = batch.state
    tempered = step_entropy.remeasure(
        logits.processed, action.temperature, state.action.temperature, tempered, batch.active
    )
    surprisal = entropy.surprisal(logits.raw / state.belief_temperature, token, belief.log_normaliser)
    return measurements(belief, tempered, surprisal, dropped_mass)


def choose(
    logits: Logits,
    batch: Batch,
    action: Action,
    forced: jax.Array | None,
    constraints: Constraints | None,
) -> jax.Array:
    """The next token of every row, int32 `[rows]`: forced, chosen by the controller, or sampled.

    Args:
        logits: the logits of the position.
        batch: the rows before the token.
        action: in force: the temperature, and the token where the controller has chosen.
        forced: int32 `[rows]`, tokens to emit in place of all others; None forces none.
        constraints: the constraints of the rows; a token that they force goes before.
    """
    if forced is not None:
        token = forced
    else:
        state, chosen = batch.state, action.token >= 0
        sampled = sampling.sample(
            logits.processed,
            state.sampling,
            jnp.where(chosen, 0.0, action.temperature),  # no noise is drawn where the controller has chosen
            state.key,
            state.seed,
            state.length + state.evicted + 1,
            surprisal_limit=action.surprisal_limit,
            active=batch.active,
        )
        token = jnp.where(chosen, action.token, sampled)
    return token if constraints is None else jnp.where(constraints.forced >= 0, constraints.forced, token)


def advance(batch: Batch, state: State, emitting: jax.Array, constraints: Constraints | None) -> State:
    """Lengthens the active rows by a position and ends those that the token stops or that are full.

    Args:
        batch: the rows before the token.
        state: the state of the rows, with the token.
        emitting: bool `[rows]`, the rows that emit it; other active rows have failed (NaN logits).
        constraints: the constraints of the rows; a row whose next mask they do not state pauses.
    """
    length = batch.state.length + batch.active.astype(jnp.int32)
    stopped = (state.stop == state.token[:, None]).any(1)
    going: Any = RUNNING
    if constraints is not None:
        paused = pauses(constraints, state.token, length + state.evicted)
        going = jnp.where(paused, PAUSED, RUNNING)
    status = jnp.where(stopped, STOPPED, jnp.where(length >= state.limit, FULL, going))
    failed = batch.active & ~emitting
    status = jnp.where(failed, FAILED, jnp.where(emitting, status, batch.state.status))
    return state._replace(length=length, status=status)


def trace_of(
    before: State,
    after: State,
    forward: Forward,
    decision: Decision,
    cost: ledger.Cost,
) -> Trace:
    """The trace of one token per row.

    Args:
        before: the rows before the token.
        after: the rows with the token.
        forward: what the step read.
        decision: what the logits have decided, the log-probabilities among it.
        cost: the cost of the step.
    """
    read, zero = forward.read, jnp.zeros_like(after.measured.entropy)
    return Trace(
        emitted=decision.emitting,
        token=after.token,
        **after.measured._asdict(),
        temperature=after.action.temperature,
        dropped_mass_limit=before.action.dropped_mass_limit,
        kept_fraction=zero + read.positions / jnp.maximum(read.held, 1.0),
        certificate=zero + read.certificate,
        entropic_time=after.ledger.entropic_time,
        cost=cost.seconds,
        num_drafted=jnp.zeros_like(after.token),
        from_draft=jnp.zeros_like(decision.emitting),
        top_logprobs=decision.top_logprobs,
        experts_read=() if forward.experts is None else forward.experts.counts,
    )
