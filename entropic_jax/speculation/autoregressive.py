"""Autoregressive drafters: token by token, with the same noise as the target, as long as a token pays.

Drafting is plain decoding on a copy of the control state: the same noise, penalties and control, but cheaper
logits. The entropy of the draft's own distribution predicts whether the pass that verifies it will accept its
token, and ends the draft where it is high.

With the costs of a pass, drafts are as long as they pay. λ is the best rate of accepted tokens, at the mean
probability P that one is accepted:

    λ = max over n of rows · Σ_{i ≤ n} Pⁱ / (n c_draft + c_verify(n + 1))

One more token is drafted if Π P(accepted so far) · P > λ (c_draft + Δc_verify) / rows. Nothing is drafted
where n = 0 is best.
"""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from ..attention.attend import TokenSpan
from ..attention.page_reader import dense_step_stats
from ..phases.batch import Batch
from ..phases.emission import emit
from ..phases.forward import Forward, decode_cost, forward, over_shards
from ..sampling import record
from ..state import RUNNING, State
from ..state.pytree import STATIC, pytree
from .draft_length import DraftLength, correct
from .drafter import ControlledModel, Draft
from .verification import changed_fields


class DraftedToken(NamedTuple):
    """The result of a draft step."""

    state: State  # of the rows, after the token
    token: jax.Array  # int32 [rows]
    entropy: jax.Array  # float32 [rows], nats, of the distribution that it was drawn from
    emitted: jax.Array  # bool [rows], whether there is one


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
        rows, shift = state.token.shape[0], state.speculation[:, 0]
        max_drafts = jnp.minimum(max_drafts, k)
        going = batch.active & (max_drafts > 0) & (state.length >= self.shortest_context)
        least = self.least_reach(going, state.length, shift)
        going &= least[0] <= 1
        drafted = Draft(jnp.zeros((rows, k), jnp.int32), jnp.zeros(rows, jnp.int32), jnp.zeros((rows, k)))

        def body(carry: Any) -> Any:
            number, going, reach, layers, changed, drafted = carry
            scratch = state._replace(**changed, cache=state.cache._replace(layers=layers))
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
            changed = changed_fields(after)
            return number + 1, going, reach, after.cache.layers, changed, drafted

        changed, layers = changed_fields(state), state.cache.layers
        carry = jnp.int32(0), going, jnp.ones(rows), layers[kept_layers], changed, drafted
        *_, written, changed, drafted = jax.lax.while_loop(lambda c: c[1].any(), body, carry)
        first, end, _ = kept_layers.indices(len(layers))
        layers = (*layers[:first], *written, *layers[end:])
        spent: Any = changed["ledger"]
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
        """What chooses the pages that a step reads; None reads all.

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
        rates, *_ = self.calibrated(model)._rates(drafts, state.length, state.speculation[:, 0])
        return jnp.max(rates)

    def least_reach(self, going: jax.Array, length: jax.Array, shift: jax.Array) -> jax.Array:
        """P(all accepted so far) from which the next token is drafted, after 0, 1, … of them; float32 `[k]`.

        Args:
            going: bool `[rows]`, the rows that draft.
            length: int32 `[rows]`, cached positions.
            shift: float32 `[rows]`, correction of the log-odds of acceptance.
        """
        if self.law is None:
            return jnp.full(self.most_tokens, self.stop_below)
        rates, mean, step, verify = self._rates(going, length, shift)
        rows = jnp.maximum(going.sum(dtype=jnp.float32), 1.0)
        marginal = jnp.max(rates) * (step + jnp.diff(verify)) / (rows * mean)
        return jnp.where(jnp.argmax(rates) == 0, jnp.inf, marginal)

    def _rates(
        self, going: jax.Array, length: jax.Array, shift: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """The rate of n = 0 … k drafted tokens, with P, c_draft and c_verify(n + 1)."""
        assert self.law is not None
        rows, positions = going.sum(dtype=jnp.float32), jnp.where(going, length, 0).sum(dtype=jnp.float32)
        mean_shift = jnp.where(going, shift, 0.0).sum() / jnp.maximum(rows, 1.0)
        mean = correct(jnp.asarray(self.mean_acceptance), mean_shift)
        number = jnp.arange(self.most_tokens + 1, dtype=jnp.float32)
        costs = self.law.pass_costs(positions)
        verify = jnp.interp(number + 1, jnp.asarray(self.law.widths, jnp.float32), costs)
        step = self.step_costs[0] + self.step_costs[1] * positions
        rates = rows * jnp.cumsum(mean**number) / (number * step + verify)
        return rates, mean, jnp.asarray(step), verify

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
