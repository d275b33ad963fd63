"""Emission: from a row's logits to its next token, one position at a time.

Process the logits, measure their entropy, let the controller act, choose a token, account for it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import control, entropy, ledger, sampling, step_entropy
from .batch import Batch
from .entropy import EntropyStatistics
from .forward import Forward
from .sampling.constraints import Constraints, any_constraint, constrain, top_logprobs
from .sampling.randomness import row_keys
from .state import FAILED, FULL, RUNNING, STOPPED, Action, Focus, Measured, Signal, State, Trace


class Logits(NamedTuple):
    """The logits of a position, before and after processing; float32 `[rows, vocabulary]`."""

    raw: jax.Array  # of the model: the belief and the surprisal are theirs
    processed: jax.Array  # after penalties, bias and constraints: what is sampled from
    changed: jax.Array  # bool []: whether the two may differ


def emit(
    controller: Any,
    batch: Batch,
    forward: Forward,
    cost: ledger.Cost,
    forced: jax.Array | None,
    constraints: Constraints | None,
) -> tuple[State, Trace]:
    """Emits one token in every active row.

    Args:
        controller: the control law of these rows.
        batch: the rows, with the cache as the forward pass left it.
        forward: their logits, and what was read.
        cost: of the token, for the ledger.
        forced: int32 `[rows]`, tokens to emit in place of sampled ones.
        constraints: of these rows.

    Returns:
        The state of the rows after the token, and its trace. A row that is not active, or whose logits are
        NaN, emits nothing.
    """
    state = batch.state
    logits = process(forward.logits, state, constraints)
    belief, tempered = step_entropy.measure(
        logits.raw, logits.processed, logits.changed, state.action.temperature, state.belief_temperature
    )
    emitting = batch.active & jnp.isfinite(belief.entropy)
    measured = measurements(belief, tempered, state.signal.surprisal, forward.read.dropped)
    signal = observe(batch, hold(emitting, measured, state.signal), emitting, logits, forward.focus)
    action, own = control.update_rows(controller, signal, state.action, state.control)
    token = jnp.where(emitting, choose(logits, state, action, forced, constraints), state.token)
    tempered = step_entropy.remeasure(
        logits.processed, action.temperature, state.action.temperature, tempered
    )
    surprisal = entropy.surprisal(logits.raw / state.belief_temperature, token, belief.log_normaliser)
    measured = measurements(belief, tempered, surprisal, forward.read.dropped)
    after = state._replace(
        token=token,
        length=state.length + batch.active.astype(jnp.int32),
        signal=hold(emitting, measured, state.signal),
        action=action._replace(token=state.action.token),
        control=own,
    )
    after = after._replace(status=next_status(batch, after, emitting))
    before = state.signal.entropy
    after = after._replace(ledger=ledger.add_step(after.ledger, before, after.signal.entropy, emitting, cost))
    return after, trace_of(state, after, forward, logits, emitting, cost, constraints)


def process(logits: jax.Array, state: State, constraints: Constraints | None) -> Logits:
    """Applies penalties, bias and constraints to logits `[rows, vocabulary]`."""
    processed = sampling.penalise(logits, state.sampling, state.history)
    changed = sampling.adjusts(state.sampling)
    if constraints is not None:
        length = state.length + state.evicted + 1  # of the text with the token to come
        processed = constrain(processed, constraints, state.stop, length)
        changed |= any_constraint(constraints, length)
    return Logits(logits, processed, changed)


def measurements(
    belief: EntropyStatistics, tempered: EntropyStatistics, surprisal: jax.Array, dropped_mass: jax.Array
) -> Measured:
    """The measurements of a token, from the statistics of the belief and of the distribution sampled from."""
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
    """The signal from which the controller decides how the next token is drawn."""
    state = batch.state
    failed = batch.active & ~emitting
    return Signal(
        *measured,
        emitting=emitting,
        runnable=(state.status == RUNNING) & ~failed & (state.length + 1 < state.limit),
        length=state.length,
        logits=logits.processed,
        key=row_keys(state.key, state.seed, state.length + state.evicted + 1),
        focus=focus,
    )


def choose(
    logits: Logits,
    state: State,
    action: Action,
    forced: jax.Array | None,
    constraints: Constraints | None,
) -> jax.Array:
    """The next token of every row, int32 `[rows]`: forced, chosen by the controller, or sampled."""
    if forced is not None:
        token = forced
    else:
        chosen = action.token >= 0
        sampled = sampling.sample(
            logits.processed,
            state.sampling,
            jnp.where(chosen, 0.0, action.temperature),  # no noise is drawn where the controller has chosen
            state.key,
            state.seed,
            state.length + state.evicted + 1,
            surprisal_limit=action.surprisal_limit,
        )
        token = jnp.where(chosen, action.token, sampled)
    return token if constraints is None else jnp.where(constraints.forced >= 0, constraints.forced, token)


def next_status(batch: Batch, after: State, emitting: jax.Array) -> jax.Array:
    """The status of the rows after the token: stopped by it, full, failed (NaN logits), or as it was."""
    stopped = (after.stop == after.token[:, None]).any(1)
    status = jnp.where(stopped, STOPPED, jnp.where(after.length >= after.limit, FULL, RUNNING))
    failed = batch.active & ~emitting
    return jnp.where(failed, FAILED, jnp.where(emitting, status, batch.state.status))


def trace_of(
    before: State,
    after: State,
    forward: Forward,
    logits: Logits,
    emitting: jax.Array,
    cost: ledger.Cost,
    constraints: Constraints | None,
) -> Trace:
    """The trace of one token per row."""
    read = forward.read
    zero = jnp.zeros_like(after.signal.entropy)
    return Trace(
        emitted=emitting,
        token=after.token,
        entropy=after.signal.entropy,
        varentropy=after.signal.varentropy,
        tempered_entropy=after.signal.tempered_entropy,
        tempered_varentropy=after.signal.tempered_varentropy,
        surprisal=after.signal.surprisal,
        temperature=after.action.temperature,
        dropped_mass_limit=before.action.dropped_mass_limit,
        dropped_mass=after.signal.dropped_mass,
        kept_fraction=zero + read.positions / jnp.maximum(read.held, 1.0),
        certificate=zero + read.certificate,
        entropic_time=after.ledger.entropic_time,
        cost=cost.seconds,
        top_logprobs=()
        if constraints is None
        else top_logprobs(logits.raw, after.token, constraints.report_logprobs),
    )


def hold(emitting: jax.Array, new: Measured, old: Measured) -> Measured:
    """`new` in the rows that emit, `old` in the others."""
    return jax.tree.map(lambda x, y: jnp.where(emitting, x, y), new, old)
