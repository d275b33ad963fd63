"""Speculator: a drafter and the draft-length law, and the pass that they make."""

from typing import Any

import jax
import jax.numpy as jnp

from ..mesh import num_shards
from ..phases.batch import Batch
from ..state import RUNNING, State, Trace
from ..state.constraints import ANYTHING, Constraints
from ..state.pytree import pytree
from .draft_length import DraftLength, draft_length
from .drafter import ControlledModel, Draft, Drafter, DraftRecord
from .head import reads_features
from .suffix import suffix_drafter
from .verification import PassPlan, VerifiedLogits, emit_accepted, pass_cost, verify

MOST = 2**30  # steps of a rest, if no row runs
EXPECTED = 0.9  # P(accepted) of a token that the host expects, before correction


@pytree
class Speculator:
    """Parts of speculative decoding besides model and controller; a pytree: new numbers never retrace."""

    drafter: Any  # a `Drafter`
    law: DraftLength
    longest_rest: jax.Array | int = 16  # plain steps in a row, while drafting does not pay
    patience: jax.Array | int = 4  # passes in a row without a drafted token, after which a row rests

    def init(self, rows: int) -> DraftRecord:
        """The record of drafts before the first one (`State.speculation`)."""
        drafters = getattr(self.drafter, "drafters", (self.drafter,))
        shift = jnp.stack([self.law.init(rows)] * len(drafters), 1)
        return DraftRecord(shift, jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.int32))

    def learn(
        self, record: DraftRecord, active: jax.Array, plan: PassPlan, num_accepted: jax.Array
    ) -> DraftRecord:
        """The record of the rows' drafts after a pass.

        Asking drafters that have nothing to offer takes time. So a row rests: after `patience` passes in a
        row without a drafted token for 2 plain steps, and for twice as many after each further one, up to
        `longest_rest`.

        Args:
            record: before the pass.
            active: bool `[rows]`, the rows of the pass.
            plan: what the pass has verified.
            num_accepted: int32 `[rows]`, drafted tokens that were accepted.
        """
        source = _drafter_of_row(plan.draft)
        before, none = record.shift[source], jnp.int32(0)
        shift = self.law.learn(plan.draft, before, plan.num_drafted, num_accepted)
        idle = jnp.where(plan.num_drafted > 0, none, record.idle + 1)
        grown = 2 << jnp.clip(idle - self.patience, 0, 20)
        rest = jnp.where(idle < self.patience, none, jnp.minimum(grown, self.longest_rest))
        return DraftRecord(
            record.shift.at[source].set(jnp.where(active, shift, before)),
            jnp.where(active, idle, record.idle),
            jnp.where(active, rest, record.rest),
        )

    def features(self, rows: int, size: int) -> jax.Array | None:
        """Room for the hidden states that a draft head reads (`State.features`); None without one.

        Args:
            rows: number of rows of the batch.
            size: numbers of a hidden state.
        """
        return jnp.zeros((rows, size), jnp.float32) if reads_features(self.drafter) else None


def speculator(rows: int, drafter: Drafter | None = None, law: DraftLength | None = None) -> Speculator:
    """A speculator for a batch.

    Args:
        rows: number of rows of the batch.
        drafter: by default the suffix drafter.
        law: by default one whose costs grow by a tenth of a pass with every token.
    """
    return Speculator(drafter or suffix_drafter(), law or draft_length(rows))


def num_resting(state: State, constraints: Constraints | None = None) -> jax.Array:
    """How many plain steps to take before tokens are drafted again, int32 `[]`.

    A batch rests as long as that of its rows which rests least.

    Args:
        state: the state of the loop.
        constraints: the constraints of the rows. A row whose next tokens the host expects does not rest.
    """
    running, rest = (state.status == RUNNING) & (state.action.quota > 0), state.speculation.rest
    if constraints is not None:
        rest = jnp.where(constraints.masked & (constraints.expected >= 0).any(1), 0, rest)
    return jnp.where(running, rest, MOST).min()


def rested(state: State) -> State:
    """The state after a plain step in which its rows rested."""
    record = state.speculation
    return state._replace(speculation=record._replace(rest=jnp.maximum(record.rest - 1, 0)))


def check_speculation(speculator: Any, controller: Any, state: State) -> None:
    """Raises ValueError where a controller or a state cannot be combined with a speculator.

    Args:
        speculator: what drafts; None, with which nothing is checked.
        controller: the control law.
        state: the loop's state.
    """
    if speculator is None:
        return
    if state.text is None:
        raise ValueError("state must be started with a speculator to draft tokens; got one without text")
    if getattr(controller, "observes", None) is not None:
        raise ValueError(
            "controller must not observe attention where tokens are drafted, since a pass attends for "
            f"several tokens; got {controller}"
        )
    if state.cache.surprisal is not None:
        raise ValueError("cache must be allocated without surprisals where tokens are drafted")
    if state.page_policy is not None:
        raise ValueError(
            "page_policy must be None where tokens are drafted, since a pass reads every page; "
            f"got {state.page_policy}"
        )
    if state.expert_policy is not None:
        raise ValueError(
            "expert_policy must be None where tokens are drafted, since a pass reads all experts that are "
            f"chosen; got {state.expert_policy}"
        )


def draft(
    speculator: Speculator,
    model: ControlledModel,
    batch: Batch,
    room: jax.Array,
    constraints: Constraints | None,
) -> tuple[Batch, PassPlan]:
    """Drafts tokens, and decides how many of them to verify.

    Args:
        speculator: the drafter and the law.
        model: whose tokens are drafted.
        batch: the rows of the pass.
        room: int32 `[rows]`, positions that a row's pages hold.
        constraints: the constraints of these rows. Nothing is drafted for a forced row, nor where `drafts` is
            false; a masked row gets the tokens that the host expects.

    Returns:
        The batch, and the plan of the pass.
    """
    state = batch.state
    # A pass writes one position a token, and the last token that it may emit fills the row.
    max_drafts = jnp.maximum(jnp.minimum(room, state.limit) - state.length - 1, 0)
    if constraints is not None:
        max_drafts = jnp.where((constraints.forced >= 0) | ~constraints.drafts, 0, max_drafts)
    batch, drafted = speculator.drafter.draft(model, batch, max_drafts)
    if constraints is not None:
        drafted = draft_expected(drafted, constraints, state.length + state.evicted + 1)
    drafted = drafted._replace(num_tokens=jnp.minimum(drafted.num_tokens, max_drafts))
    shift = state.speculation.shift[_drafter_of_row(drafted)]
    return batch, PassPlan(drafted, *speculator.law.choose(drafted, batch.active, shift, state.length))


def _drafter_of_row(drafted: Draft) -> tuple[jax.Array, jax.Array]:
    """Where the correction of each row's draft stands in `State.speculation`."""
    rows = drafted.num_tokens.shape[0]
    return jnp.arange(rows), jnp.broadcast_to(jnp.asarray(drafted.source, jnp.int32), rows)


def draft_expected(drafted: Draft, constraints: Constraints, length: jax.Array) -> Draft:
    """The draft, in which masked rows have the tokens that the host expects.

    Args:
        drafted: the drafter's draft. It holds for rows without a mask, and where any token may come.
        constraints: the constraints of the rows.
        length: int32 `[rows]`, of the sequence with the next token.
    """
    rows, k = drafted.tokens.shape
    ahead = [constraints.planned(constraints.expected, length + i) for i in range(k)]
    expected = jnp.stack(ahead, 1)
    number = jnp.cumprod((expected >= 0).astype(jnp.int32), 1).sum(1, dtype=jnp.int32)
    planned = constraints.masked & (expected[:, 0] != ANYTHING)
    return Draft(
        tokens=jnp.where(planned[:, None], expected, drafted.tokens),
        num_tokens=jnp.where(planned, number, drafted.num_tokens),
        acceptance=jnp.where(planned[:, None], EXPECTED, drafted.acceptance),
    )


def verify_and_emit(
    speculator: Speculator,
    model: ControlledModel,
    batch: Batch,
    plan: PassPlan,
    constraints: Constraints | None,
) -> tuple[State, Trace]:
    """Runs the pass of the chosen size and emits what it verifies.

    Args:
        speculator: the law whose widths are compiled.
        model: whose tokens are verified.
        batch: the rows of the pass.
        plan: the plan of the pass.
        constraints: the constraints of these rows.

    Returns:
        The state of the rows, and the trace `[k + 1, rows]`.
    """
    cost = pass_cost(model, batch, plan)
    batch, logits = run_pass(speculator.law.widths, model, batch, plan)
    after, trace = emit_accepted(model, batch, plan, logits, cost, constraints)
    after = after._replace(features=logits.last_hidden(trace.emitted, batch.state.features))
    accepted = (trace.emitted & trace.from_draft).sum(0, dtype=jnp.int32)
    record = speculator.learn(batch.state.speculation, batch.active, plan, accepted)
    return after._replace(speculation=record), trace


def run_pass(
    widths: tuple[int, ...], model: ControlledModel, batch: Batch, plan: PassPlan
) -> tuple[Batch, VerifiedLogits]:
    """Runs the pass of the size that the plan names.

    Args:
        widths: the compiled sizes of a pass, in tokens per row.
        model: whose tokens are verified.
        batch: the rows of the pass.
        plan: the plan of the pass.

    Returns:
        The batch with the cache as written, and the logits of k + 1 positions of every row.
    """
    state, (rows, k) = batch.state, plan.draft.tokens.shape

    def with_layers(layers: Any) -> Batch:
        return batch._replace(state=state._replace(cache=state.cache._replace(layers=layers)))

    def run(tokens_per_row: int, runs: jax.Array, layers: Any, logits: Any) -> tuple[Any, VerifiedLogits]:
        verified, computed = verify(model, *_gated(runs, with_layers(layers), plan), tokens_per_row)
        return verified.state.cache.layers, logits.filled(computed)

    shape = model.decoder.shape
    hidden = None if state.features is None else shape.hidden
    vocabulary = shape.vocabulary // num_shards()
    room = VerifiedLogits.empty(plan.size, rows * max(widths), rows, k + 1, vocabulary, hidden)
    carry = state.cache.layers, room
    for index, width in enumerate(widths):
        # A loop of no or one turn: XLA copies the page pool into a conditional, but not into a loop.
        repeats = (plan.size == index).astype(jnp.int32)
        body = lambda number, x, width=width, repeats=repeats: run(width, number < repeats, *x)
        carry = jax.lax.fori_loop(0, repeats, body, carry)
    layers, logits = carry
    return with_layers(layers), logits


def _gated(runs: jax.Array, batch: Batch, plan: PassPlan) -> tuple[Batch, PassPlan]:
    """The pass if it runs, else one of nothing.

    What an iteration of a loop computes has to depend on its number, or XLA computes parts of it in advance,
    for passes of every size.

    Args:
        runs: bool `[]`.
        batch: the rows of the pass.
        plan: the plan of the pass.
    """
    state = batch.state
    token, length, tokens, num_drafted = (
        jnp.where(runs, x, 0) for x in (state.token, state.length, plan.draft.tokens, plan.num_drafted)
    )
    state = state._replace(token=token, length=length)
    batch = batch._replace(state=state, active=batch.active & runs)
    return batch, plan._replace(draft=plan.draft._replace(tokens=tokens), num_drafted=num_drafted)
