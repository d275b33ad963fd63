"""Autoregressive drafters: token by token, with the same noise as the target, as long as a token pays.

Drafting is plain decoding on a copy of the control state: the same noise, penalties and control, but cheaper
logits. The entropy of the draft's own distribution predicts whether the pass that verifies it will accept its
token, and ends the draft where it is high.

With the costs of a pass, drafts are as long as they pay. λ is the best rate of accepted tokens, at the mean
probability P that one is accepted:

    λ = max over n of rows · Σ_{i ≤ n} Pⁱ / (n c_draft + c_verify(n + 1))

One more token of a row is drafted if Π P(accepted so far) · P > λ (c_draft + Δc_verify) / rows. A draft step
costs nearly as much for a few rows as for all, so there is none unless Σ Π P(accepted so far) · P, over the
rows that go on, exceeds λ times its cost. Nothing is drafted where n = 0 is best; where another n is, a first
token is drafted in any case.
"""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..attention.attend import TokenSpan
from ..attention.page_reader import dense_step_stats
from ..phases.batch import Batch
from ..phases.emission import emit
from ..phases.forward import Forward, decode_cost, forward, over_shards
from ..sampling import record
from ..state import RUNNING, State
from ..state.pytree import STATIC, pytree
from ..state.stacking import StateStacking
from .draft_length import DraftLength, correct
from .drafter import ControlledModel, Draft


def _interpolation(widths: tuple[int, ...], most: int) -> np.ndarray:
    """The share of each width's cost in that of 1 … `most` tokens, float32 `[widths, most]`."""
    tokens = np.arange(1, most + 1)
    shares = [np.interp(tokens, widths, unit) for unit in np.eye(len(widths))]
    return np.asarray(shares, np.float32)


class DraftedToken(NamedTuple):
    """The result of a draft step."""

    state: State  # of the rows, after the token
    token: jax.Array  # int32 [rows]
    entropy: jax.Array  # float32 [rows], nats, of the distribution that it was drawn from
    emitted: jax.Array  # bool [rows], whether there is one


class Stopping(NamedTuple):
    """When drafts end: a step has to gain as many expected tokens, relative to P, as its time is worth."""

    of_step: jax.Array  # float32 [], of a step, however many rows it has
    of_position: jax.Array  # float32 [], added by each cached position of the rows that go on
    of_row: jax.Array  # float32 [k], added by each of these rows after 0, 1, … tokens; inf drafts nothing

    def least_reach(self, going: jax.Array, length: jax.Array) -> jax.Array:
        """P(all accepted so far) from which a row goes on if all rows do, after 0, 1, … tokens; `[k]`.

        Args:
            going: bool `[rows]`, the rows that draft.
            length: int32 `[rows]`, cached positions.
        """
        rows = jnp.maximum(going.sum(dtype=jnp.float32), 1.0)
        return (self.of_step + self.of_position * _positions(going, length)) / rows + self.of_row

    def pays(self, number: jax.Array, going: jax.Array, length: jax.Array, reach: jax.Array) -> jax.Array:
        """Whether another step pays for the rows that would go on, bool `[]`.

        Args:
            number: int32 `[]`, tokens drafted so far.
            going: bool `[rows]`, the rows that would go on.
            length: int32 `[rows]`, cached positions.
            reach: float32 `[rows]`, P(all accepted so far).
        """
        worth = self.of_step + self.of_position * _positions(going, length)
        worth += jnp.where(going, self.of_row[number], 0.0).sum()
        return jnp.where(going, reach, 0.0).sum() >= worth


def _positions(rows: jax.Array, length: jax.Array) -> jax.Array:
    """Cached positions of some rows, float32 `[]`."""
    return jnp.where(rows, length, 0).sum(dtype=jnp.float32)


@pytree
class AutoregressiveDrafter:
    """Drafts with a step of a model per token. Subclasses say which model, and which pages it reads."""

    acceptance: jax.Array  # float32 [bins], P(accepted) by the draft's own entropy
    entropy_edges: jax.Array  # float32 [bins − 1], nats, ascending
    mean_acceptance: jax.Array | float = 0.9  # P: of a token before it is drafted
    law: DraftLength | None = None  # what passes cost; None drafts as if they cost nothing
    step_costs: jax.Array | tuple[float, float] = (0.5, 0.0)  # of a draft step, and per position of the rows
    stop_below: jax.Array | float = 0.6  # P(all accepted so far) that ends a draft where costs are unknown
    shortest_context: jax.Array | int = 0  # positions, below which nothing is drafted
    most_tokens: Annotated[int, STATIC] = 7  # k, the tokens drafted at most

    def draft(self, model: ControlledModel, batch: Batch, max_drafts: jax.Array) -> tuple[Batch, Draft]:
        """See `Drafter`."""
        return self.calibrated(model)._draft(model, batch, max_drafts)

    def _draft(self, model: ControlledModel, batch: Batch, max_drafts: jax.Array) -> tuple[Batch, Draft]:
        """`draft` with the numbers of the model."""
        drafting, kept_layers = self.drafting(model)
        state, k = batch.state, self.most_tokens
        rows, shift = state.token.shape[0], state.speculation.shift[:, 0]
        max_drafts = jnp.minimum(max_drafts, k)
        going = batch.active & (max_drafts > 0) & (state.length >= self.shortest_context)
        stopping = self.stopping(going, state.length, shift)
        least = stopping.least_reach(going, state.length)
        # Where drafting pays at all, it begins: the first token need not pay for what any draft costs.
        going &= jnp.isfinite(least[0])
        drafted = Draft(jnp.zeros((rows, k), jnp.int32), jnp.zeros(rows, jnp.int32), jnp.zeros((rows, k)))

        def body(carry: Any) -> Any:
            number, going, reach, layers, changed, drafted = carry
            scratch = fields.unstack(state, changed)
            scratch = scratch._replace(cache=state.cache._replace(layers=layers))
            after, token, entropy, emitted = self.step(drafting, Batch(scratch, going), batch)
            chance = self.probability(entropy)
            drafted = drafted._replace(
                tokens=drafted.tokens.at[:, number].set(token),
                num_tokens=drafted.num_tokens + emitted.astype(jnp.int32),
                acceptance=drafted.acceptance.at[:, number].set(chance),
            )
            reach = jnp.where(emitted, reach * correct(chance, shift), reach)
            going = emitted & (after.status == RUNNING) & (number + 1 < max_drafts)
            going &= reach >= least[jnp.minimum(number + 1, k - 1)]
            going &= stopping.pays(jnp.minimum(number + 1, k - 1), going, state.length, reach)
            return number + 1, going, reach, after.cache.layers, fields.stack(after), drafted

        fields, layers = StateStacking(state), state.cache.layers
        carry = jnp.int32(0), going, jnp.ones(rows), layers[kept_layers], fields.stack(state), drafted
        *_, written, changed, drafted = jax.lax.while_loop(lambda c: c[1].any(), body, carry)
        first, end, _ = kept_layers.indices(len(layers))
        layers = layers[:first] + written + layers[end:]
        spent = fields.unstack(state, changed).ledger
        ledger = state.ledger._replace(flops=spent.flops, bytes_read=spent.bytes_read, seconds=spent.seconds)
        state = state._replace(cache=state.cache._replace(layers=layers), ledger=ledger)
        return batch._replace(state=state), drafted

    def drafting(self, model: ControlledModel) -> tuple[ControlledModel, slice]:
        """The model that drafts, under the same control, and where its layers stand in the cache.

        Args:
            model: whose tokens are drafted.
        """
        return model, slice(None)

    def calibrated(self, model: ControlledModel) -> "AutoregressiveDrafter":
        """The drafter with the acceptance that the model states, if it states any.

        Args:
            model: whose tokens are drafted.
        """
        return self

    def reader(self, batch: Batch) -> Any:
        """The reader that chooses the pages of a step; None reads all.

        Args:
            batch: the rows of the step.
        """
        return None

    def expected_rate(self, model: ControlledModel, batch: Batch) -> jax.Array:
        """λ, accepted tokens of all rows per unit of the law's time; inf without costs. float32 `[]`.

        Args:
            model: whose tokens are drafted.
            batch: the rows.
        """
        if self.law is None:
            return jnp.float32(jnp.inf)
        state = batch.state
        drafts = batch.active & (state.length >= self.shortest_context)
        rates, *_ = self.calibrated(model)._rates(drafts, state.length, state.speculation.shift[:, 0])
        return jnp.max(rates)

    def stopping(self, going: jax.Array, length: jax.Array, shift: jax.Array) -> Stopping:
        """When the drafts of a batch end.

        Args:
            going: bool `[rows]`, the rows that draft.
            length: int32 `[rows]`, cached positions.
            shift: float32 `[rows]`, correction of the log-odds of acceptance.
        """
        nothing = jnp.zeros(())
        if self.law is None:
            return Stopping(nothing, nothing, jnp.full(self.most_tokens, self.stop_below))
        rates, mean, verify = self._rates(going, length, shift)
        rows = jnp.maximum(going.sum(dtype=jnp.float32), 1.0)
        worth = jnp.max(rates) / mean
        nothing_pays = (jnp.argmax(rates) == 0) | jnp.isinf(verify[1:])
        of_row = jnp.where(nothing_pays, jnp.inf, worth * jnp.diff(verify) / rows)
        return Stopping(worth * self.step_costs[0], worth * self.step_costs[1], of_row)

    def _rates(
        self, going: jax.Array, length: jax.Array, shift: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The rate of n = 0 … k drafted tokens, P, and c_verify(n + 1): inf for more than a pass holds."""
        assert self.law is not None
        rows, positions = going.sum(dtype=jnp.float32), _positions(going, length)
        mean_shift = jnp.where(going, shift, 0.0).sum() / jnp.maximum(rows, 1.0)
        mean = correct(jnp.asarray(self.mean_acceptance), mean_shift)
        number = jnp.arange(self.most_tokens + 1, dtype=jnp.float32)
        costs = self.law.pass_costs(positions)
        verify = (costs[:, None] * _interpolation(self.law.widths, self.most_tokens + 1)).sum(0)
        verify = jnp.where(number < self.law.widths[-1], verify, jnp.inf)
        step = self.step_costs[0] + self.step_costs[1] * positions
        rates = rows * jnp.cumsum(mean**number) / (number * step + verify)
        return rates, mean, verify

    def probability(self, entropy: jax.Array) -> jax.Array:
        """P(accepted) of tokens drawn at these entropies of the draft, nats `[rows]`."""
        place = (entropy[:, None] > jnp.asarray(self.entropy_edges)).sum(1)  # XLA searches in a loop
        return jnp.asarray(self.acceptance)[place]

    def step(self, model: ControlledModel, batch: Batch, began: Batch) -> DraftedToken:
        """One step of the model that drafts.

        Args:
            model: the model that drafts.
            batch: the rows, with the tokens that they have drafted, and the layers that drafting writes.
            began: the rows as they were when the draft began, with all layers.
        """
        state, count = batch.state, batch.active.astype(jnp.int32)
        reader = self.reader(batch)
        decoder, params = model.decoder, model.params
        hidden, state = forward(decoder, params, state, state.token[:, None], count, reader)
        logits = decoder.logits(params, hidden[:, 0])
        if reader is None:
            stats = dense_step_stats(decoder.shape, TokenSpan(batch.state.length, count))
        else:
            stats = over_shards(reader.total())
        read, output = batch._replace(state=state), Forward(logits, stats, None)
        cost = decode_cost(decoder, params, read, output)
        after, trace = emit(model.controller, read, output, cost, None, None)
        history = record(after.history, trace.token, trace.emitted)
        return DraftedToken(after._replace(history=history), trace.token, trace.entropy, trace.emitted)
