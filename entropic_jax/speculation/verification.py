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
from ..phases import ledger
from ..phases.batch import Batch
from ..phases.emission import emit
from ..phases.forward import Decoder, Forward, forward, narrowest
from ..phases.packing import lay_out
from ..sampling.constraints import Constraints
from ..state import RUNNING, State, Trace
from .drafter import Draft

# The fields of `State` that emission changes.
CHANGED = ("token", "length", "status", "history", "signal", "action", "control", "ledger")


class VerifiedLogits(NamedTuple):
    """The logits that a pass has computed, one row of them for each of its tokens."""

    logits: jax.Array  # float32 [tokens, vocabulary]
    slot: jax.Array  # int32 [rows, n], which of them the i-th token of a row has

    @classmethod
    def empty(cls, tokens: int, rows: int, n: int, vocabulary: int) -> "VerifiedLogits":
        """Room for the logits of a pass.

        Args:
            tokens: that the pass may have.
            rows: number of rows of the batch.
            n: tokens that a row may have.
            vocabulary: number of tokens.
        """
        logits = jax.lax.empty((tokens, vocabulary), jnp.float32)
        return cls(logits, jnp.zeros((rows, n), jnp.int32))

    def filled(self, logits: "VerifiedLogits") -> "VerifiedLogits":
        """Room in which the logits of a pass stand first; the rest of it is never read."""
        update = lambda room, x: jax.lax.dynamic_update_slice(room, x, (0, 0))
        return VerifiedLogits(update(self.logits, logits.logits), update(self.slot, logits.slot))

    def at(self, number: jax.Array) -> jax.Array:
        """The logits after token `number` of every row, float32 `[rows, vocabulary]`."""
        return self.logits[jax.lax.dynamic_index_in_dim(self.slot, number, 1, keepdims=False)]


def verify(
    decoder: Decoder, params: Any, batch: Batch, draft: Draft, num_drafted: jax.Array, width: int
) -> tuple[Batch, VerifiedLogits]:
    """Runs the model densely over the last token of every active row and the tokens drafted after it.

    A pass of fewer tokens than `rows · n` is packed: the tokens of a row follow those of the row before.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        batch: the rows of the pass.
        draft: tokens for the following positions.
        num_drafted: int32 `[rows]`, how many of them to verify; at most rows · (width − 1) together.
        width: tokens a row on average; static.

    Returns:
        The batch with the cache as written, and the logits of the positions.
    """
    state = batch.state
    rows, k = draft.tokens.shape
    num_tokens = jnp.where(batch.active, 1 + num_drafted, 0)
    most = min(k, rows * (width - 1)) + 1
    tokens = jnp.concatenate([state.token[:, None], draft.tokens[:, : most - 1]], 1)
    packing = None if width == most else lay_out(num_tokens, rows * width, most)
    hidden, state = forward(decoder, params, state, tokens, num_tokens, packing=packing)
    if packing is None:
        hidden, slot = hidden.reshape(rows * most, -1), jnp.arange(rows * most).reshape(rows, most)
    else:
        hidden, slot = hidden[:, 0], packing.packed_index
    return batch._replace(state=state), VerifiedLogits(decoder.logits(params, hidden), slot)


def pass_cost(decoder: Decoder, params: Any, batch: Batch, num_drafted: jax.Array) -> ledger.Cost:
    """What the ledger charges every active row for a pass; float32 `[rows]` each.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        batch: the rows before the pass.
        num_drafted: int32 `[rows]`, drafts that the pass verifies.
    """
    state = batch.state
    num_tokens = jnp.where(batch.active, 1 + num_drafted, 0)
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


def emit_accepted(
    decoder: Decoder,
    controller: Any,
    batch: Batch,
    logits: VerifiedLogits,
    draft: Draft,
    num_drafted: jax.Array,
    cost: ledger.Cost,
    constraints: Constraints | None,
) -> tuple[State, Trace]:
    """Emits tokens in every active row up to the first that is not the drafted one, that one included.

    Args:
        decoder: the model's pure functions.
        controller: the control law of these rows.
        batch: the rows, with the cache as the pass left it.
        logits: the logits of the positions, n of every row.
        draft: the drafted tokens, at least n − 1 of every row.
        num_drafted: int32 `[rows]`, how many of them were verified.
        cost: the cost of the pass; it is charged to the first token.
        constraints: the constraints of these rows.

    Returns:
        The state of the rows, and the trace `[n, rows]`.
    """
    cache, n = batch.state.cache, logits.slot.shape[1]
    free = jax.tree.map(jnp.zeros_like, cost)
    drafted = jnp.where(jnp.arange(n - 1) < num_drafted[:, None], draft.tokens[:, : n - 1], -1)
    drafted = jnp.pad(drafted, ((0, 0), (0, 1)), constant_values=-1)
    take = lambda x, number: jax.lax.dynamic_index_in_dim(x, number, 1, keepdims=False)

    def emit_at(number: jax.Array, active: jax.Array, state: State) -> tuple[State, Trace]:
        first = number == 0
        charged = jax.tree.map(lambda x, y: jnp.where(first, x, y), cost, free)._replace(
            kv_bytes=cost.kv_bytes
        )
        read = dense_step_stats(decoder.shape, TokenSpan(state.length, active.astype(jnp.int32)))
        output = Forward(logits.at(number), read, None)
        after, trace = emit(controller, Batch(state, active), output, charged, None, constraints)
        return after._replace(history=sampling.record(after.history, trace.token, trace.emitted)), trace

    def body(carry: Any) -> Any:
        number, active, changed, trace = carry
        after, new = emit_at(number, active, batch.state._replace(**changed))
        new = new._replace(
            num_drafted=jnp.where(active & (number == 0), num_drafted, 0),
            from_draft=new.emitted & (number > 0),
        )
        trace = jax.tree.map(lambda rows, x: rows.at[number].set(x), trace, new)
        active &= new.emitted & (new.token == take(drafted, number)) & (after.status == RUNNING)
        return number + 1, active, {name: getattr(after, name) for name in CHANGED}, trace

    changed = {name: getattr(batch.state, name) for name in CHANGED}
    blank = jax.eval_shape(lambda s: emit_at(jnp.int32(0), batch.active, s)[1], batch.state)
    trace = jax.tree.map(lambda x: jnp.zeros((n, *x.shape), x.dtype), blank)
    carry = jnp.int32(0), batch.active, changed, trace
    _, _, changed, trace = jax.lax.while_loop(lambda c: (c[0] < n) & c[1].any(), body, carry)
    return batch.state._replace(**changed, cache=cache), trace
