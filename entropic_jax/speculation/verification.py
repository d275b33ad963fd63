"""Verification: one dense pass over the last token and the drafted tokens of every row, then emission.

Emission is that of plain decoding, repeated over the positions of the pass. A row goes on while the token
that it emits is the one that was drafted, so penalties, control, stop tests and ledger see accepted tokens
only, and nothing is rolled back: keys and values past a row's length are never read, and the next pass
overwrites them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import sampling
from ..attention.attend import TokenSpan
from ..attention.page_reader import dense_step_stats
from ..pallas.uninitialised import uninitialised
from ..phases.batch import Batch
from ..phases.emission import emit
from ..phases.forward import Forward, forward, narrowest
from ..phases.packing import lay_out
from ..state import RUNNING, State, Trace, ledger
from ..state.constraints import Constraints
from ..state.stacking import Stacking, StateStacking
from .drafter import ControlledModel, Draft


class PassPlan(NamedTuple):
    """The tokens that one pass verifies."""

    draft: Draft
    num_drafted: jax.Array  # int32 [rows], drafted tokens to verify
    size: jax.Array  # int32 [], index of the pass's size among the law's widths


class VerifiedLogits(NamedTuple):
    """The logits that a pass has computed, one row of them for each of its tokens.

    On a mesh they are those of this device's part of the vocabulary. Emission exchanges them position by
    position, and none past the last position at which a row emits.
    """

    logits: jax.Array  # float32 [tokens, vocabulary]
    slot: jax.Array  # int32 [rows, n], which of them the i-th token of a row has
    hidden: jax.Array | None = None  # float32 [tokens, hidden], where a draft head reads hidden states

    @classmethod
    def empty(
        cls, iteration: jax.Array, tokens: int, rows: int, n: int, vocabulary: int, hidden: int | None = None
    ) -> "VerifiedLogits":
        """Room for the logits of a pass.

        Args:
            iteration: an array of the pass, as for `uninitialised`.
            tokens: the number of tokens that the pass may have.
            rows: number of rows of the batch.
            n: tokens that a row may have.
            vocabulary: number of tokens of this device's part of the vocabulary.
            hidden: numbers of a hidden state; None keeps none.
        """
        logits = uninitialised((tokens, vocabulary), iteration)
        kept = None if hidden is None else uninitialised((tokens, hidden), iteration)
        return cls(logits, jnp.zeros((rows, n), jnp.int32), kept)

    def filled(self, logits: "VerifiedLogits") -> "VerifiedLogits":
        """Room in which the logits of a pass stand first; the rest of it is never read."""
        return jax.tree.map(lambda room, x: jax.lax.dynamic_update_slice(room, x, (0, 0)), self, logits)

    def at(self, number: jax.Array) -> jax.Array:
        """The logits after token `number` of every row, float32 `[rows, vocabulary]`."""
        return self.logits[take_column(self.slot, number)]

    def last_hidden(self, emitted: jax.Array, before: jax.Array | None) -> jax.Array | None:
        """The hidden state from which each row's last token was drawn; None where none is kept.

        Args:
            emitted: bool `[n, rows]`, the tokens that were emitted; those of a row come first.
            before: float32 `[rows, hidden]`, of rows that emit none.
        """
        if self.hidden is None or before is None:
            return before
        number = emitted.sum(0, dtype=jnp.int32)
        index = self.slot[jnp.arange(number.shape[0]), jnp.maximum(number - 1, 0)]
        return jnp.where(number[:, None] > 0, self.hidden[index], before)


def verify(
    model: ControlledModel, batch: Batch, plan: PassPlan, tokens_per_row: int
) -> tuple[Batch, VerifiedLogits]:
    """Runs the model densely over the last token of every active row and the tokens drafted after it.

    A pass of fewer tokens than `rows · n` is packed: the tokens of a row follow those of the row before.

    Args:
        model: whose tokens are verified.
        batch: the rows of the pass.
        plan: tokens for the following positions, and how many of them to verify: at most
            rows · (tokens_per_row − 1) together.
        tokens_per_row: on average; static.

    Returns:
        The batch with the cache as written, and the logits of the positions.
    """
    state, (decoder, params, _) = batch.state, model
    rows, k = plan.draft.tokens.shape
    num_tokens = jnp.where(batch.active, 1 + plan.num_drafted, 0)
    n = min(k, rows * (tokens_per_row - 1)) + 1
    tokens = jnp.concatenate([state.token[:, None], plan.draft.tokens[:, : n - 1]], 1)
    packing = None if tokens_per_row == n else lay_out(num_tokens, rows * tokens_per_row, n)
    hidden, state = forward(decoder, params, state, tokens, num_tokens, packing=packing)
    if packing is None:
        hidden, slot = hidden.reshape(rows * n, -1), jnp.arange(rows * n).reshape(rows, n)
    else:
        hidden, slot = hidden[:, 0], packing.packed_index
    kept = None if state.features is None else hidden.astype(jnp.float32)
    return batch._replace(state=state), VerifiedLogits(decoder.logits(params, hidden), slot, kept)


def pass_cost(model: ControlledModel, batch: Batch, plan: PassPlan) -> ledger.Cost:
    """Cost that the ledger charges every active row for a pass; float32 `[rows]` each.

    Args:
        model: whose tokens are verified.
        batch: the rows before the pass.
        plan: what the pass verifies.
    """
    state, (decoder, params, _) = batch.state, model
    num_tokens = jnp.where(batch.active, 1 + plan.num_drafted, 0)
    read = ledger.dense_positions(decoder.shape, state.length + num_tokens)
    cost = ledger.step_cost(
        decoder.shape,
        active=batch.active,
        positions_read=read,
        length=state.length + num_tokens,
        bytes_per_weight=narrowest(params),
        bytes_per_cache=state.cache.bytes_per_number,
        hardware=state.hardware,
    )
    flops = cost.flops * num_tokens.astype(jnp.float32)
    seconds = jnp.maximum(flops / state.hardware.peak, cost.bytes_read / state.hardware.bandwidth)
    return cost._replace(flops=flops, seconds=jnp.where(batch.active, seconds, 0.0))


class PassEmission(NamedTuple):
    """Emission at the positions of a pass: what all of them share."""

    model: ControlledModel
    logits: VerifiedLogits
    cost: ledger.Cost  # of the pass; it is charged to a row's first token
    later: ledger.Cost  # of each later token: zeros
    constraints: Constraints | None

    def at(self, number: jax.Array, batch: Batch, plan: PassPlan) -> tuple[State, Trace]:
        """Emits the token after position `number` of every active row; arrays of the trace are `[rows]`.

        Args:
            number: int32 `[]`, of the position in the pass.
            batch: the rows, with the tokens that were emitted at the positions before.
            plan: the plan of the pass.
        """
        first, state = number == 0, batch.state
        charged = jax.tree.map(lambda x, y: jnp.where(first, x, y), self.cost, self.later)
        charged = charged._replace(kv_bytes=self.cost.kv_bytes)
        span = TokenSpan(state.length, batch.active.astype(jnp.int32))
        read = dense_step_stats(self.model.decoder.shape, span)
        output = Forward(self.logits.at(number), read, None)
        after, trace = emit(self.model.controller, batch, output, charged, None, self.constraints)
        after = after._replace(history=sampling.record(after.history, trace.token, trace.emitted))
        return after, trace._replace(
            num_drafted=jnp.where(batch.active & (number == 0), plan.num_drafted, 0),
            from_draft=trace.emitted & (number > 0),
        )


def emit_accepted(
    model: ControlledModel,
    batch: Batch,
    plan: PassPlan,
    logits: VerifiedLogits,
    cost: ledger.Cost,
    constraints: Constraints | None,
) -> tuple[State, Trace]:
    """Emits tokens in every active row up to the first that is not the drafted one, that one included.

    Args:
        model: whose tokens were verified, with the control law of these rows.
        batch: the rows, with the cache as the pass left it.
        plan: the drafted tokens, at least n − 1 of every row, and how many of them were verified.
        logits: the logits of the positions, n of every row.
        cost: the cost of the pass, float32 `[rows]` each.
        constraints: the constraints of these rows.

    Returns:
        The state of the rows, and the trace `[n, rows]`.
    """
    before, n = batch.state, logits.slot.shape[1]
    emission = PassEmission(model, logits, cost, jax.tree.map(jnp.zeros_like, cost), constraints)
    drafted = verified_tokens(plan, n)

    def emit_next(carry: Any) -> Any:
        number, active, changed, traces = carry
        state, trace = emission.at(number, Batch(fields.unstack(before, changed), active), plan)
        active &= trace.emitted & (trace.token == take_column(drafted, number)) & (state.status == RUNNING)
        return number + 1, active, fields.stack(state), measured.put(traces, trace, number)

    blank = jax.eval_shape(lambda s: emission.at(jnp.int32(0), Batch(s, batch.active), plan)[1], before)
    fields, measured = StateStacking(before), Stacking(blank, batch.active.shape)
    carry = jnp.int32(0), batch.active, fields.stack(before), measured.room(n)
    _, _, changed, traces = jax.lax.while_loop(lambda c: (c[0] < n) & c[1].any(), emit_next, carry)
    return fields.unstack(before, changed), measured.unstack(traces)


def verified_tokens(plan: PassPlan, n: int) -> jax.Array:
    """int32 `[rows, n]`: the drafted token that was verified after each position, −1 where there is none."""
    verified = jnp.arange(n - 1) < plan.num_drafted[:, None]
    tokens = jnp.where(verified, plan.draft.tokens[:, : n - 1], -1)
    return jnp.pad(tokens, ((0, 0), (0, 1)), constant_values=-1)


def take_column(x: jax.Array, number: jax.Array) -> jax.Array:
    """Column `number` of `[rows, n]`, `[rows]`."""
    return jax.lax.dynamic_index_in_dim(x, number, 1, keepdims=False, allow_negative_indices=False)
