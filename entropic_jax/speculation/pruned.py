"""Pruned drafter: the model itself on few pages of the KV cache.

Drafting is plain decoding on a copy of the control state: the same noise, penalties and control, with page
lists in place of the whole cache. The entropy of the draft's own distribution predicts whether the dense
pass will accept its token, and ends the draft where it is high.

With the costs of a pass, drafts are as long as they pay. λ is the best rate of accepted tokens, at the mean
probability P that one is accepted:

    λ = max over n of rows · Σ_{i ≤ n} Pⁱ / (n c_draft + c_verify(n + 1))

One more token is drafted if Π P(accepted so far) · P > λ (c_draft + Δc_verify) / rows. Nothing is drafted
where n = 0 is best.
"""

from typing import Annotated, Any

import jax
import jax.numpy as jnp

from ..attention.page_selection import PagePolicy, Selection
from ..batch import Batch
from ..control.controller import STATIC, pytree
from ..emission import emit
from ..forward import decode, decode_cost
from ..pallas.paged_attention import SelectionRules
from ..sampling import record
from ..state import RUNNING, State
from .draft_length import DraftLength
from .drafter import ControlledModel, Draft
from .verification import CHANGED

SPARSE_PAGES = Selection(dense_layers=0, rules=SelectionRules(sink_pages=1, recent_pages=2, min_pages=4))
# P(accepted) by the draft's entropy, nats. Starting values, not calibrated for a model or a budget of pages:
# each row corrects them by its own record.
ENTROPY_EDGES, ACCEPTANCE = (0.3, 1.3, 3.2), (0.99, 0.97, 0.94, 0.91)


@pytree
class PrunedDrafter:
    """Drafts with the model on the pages that a page policy selects; costs a pruned step per token."""

    acceptance: jax.Array  # float32 [bins], P(accepted) by the draft's own entropy
    entropy_edges: jax.Array  # float32 [bins − 1], nats, ascending
    dropped_mass_limit: jax.Array | float = 0.3  # ε of the drafts, unless the pruning law sets a larger one
    stop_below: jax.Array | float = 0.6  # P(all accepted so far) below which no further token is drafted
    shortest_context: jax.Array | int = 2048  # positions, below which reading few pages saves nothing
    law: DraftLength | None = None  # what passes cost; None drafts as if they cost nothing
    kept: jax.Array | float = 0.15  # fraction of the context that a draft reads, for its cost
    policy: Annotated[PagePolicy, STATIC] = SPARSE_PAGES
    most_tokens: Annotated[int, STATIC] = 7  # k, the tokens drafted at most

    def draft(self, model: ControlledModel, batch: Batch, most: jax.Array) -> tuple[Batch, Draft]:
        """See `Drafter`."""
        state, k = batch.state, self.most_tokens
        rows = state.token.shape[0]
        most = jnp.minimum(most, k)
        going = batch.active & (state.length >= self.shortest_context) & (most > 0)
        least = self.least_reach(going, state.length)
        going &= least[0] <= 1
        drafted = Draft(jnp.zeros((rows, k), jnp.int32), jnp.zeros(rows, jnp.int32), jnp.zeros((rows, k)))

        def body(carry: Any) -> Any:
            number, going, reach, layers, changed, drafted = carry
            scratch = state._replace(**changed, cache=state.cache._replace(layers=layers))
            after, token, entropy, emitted = self._step(model, Batch(scratch, going))
            chance = self.probability(entropy)
            drafted = Draft(
                drafted.tokens.at[:, number].set(token),
                drafted.num_tokens + emitted.astype(jnp.int32),
                drafted.acceptance.at[:, number].set(chance),
            )
            reach = jnp.where(emitted, reach * chance, reach)
            going = emitted & (after.status == RUNNING) & (number + 1 < most)
            going &= (reach >= self.stop_below) & (reach >= least[jnp.minimum(number + 1, k - 1)])
            changed = {name: getattr(after, name) for name in CHANGED}
            return number + 1, going, reach, after.cache.layers, changed, drafted

        changed = {name: getattr(state, name) for name in CHANGED}
        carry = jnp.int32(0), going, jnp.ones(rows), state.cache.layers, changed, drafted
        *_, layers, changed, drafted = jax.lax.while_loop(lambda c: c[1].any(), body, carry)
        spent: Any = changed["ledger"]
        ledger = state.ledger._replace(flops=spent.flops, bytes_read=spent.bytes_read, seconds=spent.seconds)
        state = state._replace(cache=state.cache._replace(layers=layers), ledger=ledger)
        return batch._replace(state=state), drafted

    def least_reach(self, going: jax.Array, length: jax.Array) -> jax.Array:
        """P(all accepted so far) from which the next token is drafted, after 0, 1, … of them; float32 `[k]`.

        Args:
            going: bool `[rows]`, the rows that draft.
            length: int32 `[rows]`, cached positions.
        """
        k = self.most_tokens
        if self.law is None:
            return jnp.zeros(k)
        rows, positions = going.sum(dtype=jnp.float32), jnp.where(going, length, 0).sum(dtype=jnp.float32)
        number, mean = jnp.arange(k + 1, dtype=jnp.float32), jnp.asarray(self.acceptance).mean()
        costs = self.law.pass_costs(positions)
        verify = jnp.interp(number + 1, jnp.asarray(self.law.widths, jnp.float32), costs)
        step = self.law.pass_costs(self.kept * positions)[0]
        rates = rows * jnp.cumsum(mean**number) / (number * step + verify)
        marginal = jnp.max(rates) * (step + jnp.diff(verify)) / (jnp.maximum(rows, 1.0) * mean)
        return jnp.where(jnp.argmax(rates) == 0, jnp.inf, marginal)

    def probability(self, entropy: jax.Array) -> jax.Array:
        """P(accepted) of tokens drawn at these entropies of the draft, nats `[rows]`."""
        edges = jnp.asarray(self.entropy_edges)
        return jnp.asarray(self.acceptance)[jnp.searchsorted(edges, entropy)]

    def _step(self, model: ControlledModel, batch: Batch) -> tuple[State, jax.Array, jax.Array, jax.Array]:
        """One step on few pages: the state, the token, its entropy, and which rows emitted one."""
        state = batch.state
        limit = jnp.maximum(state.action.dropped_mass_limit, self.dropped_mass_limit)
        batch = batch._replace(
            state=state._replace(
                page_policy=self.policy,
                page_policy_state=self.policy.memory(model.decoder.shape, state.cache),
                action=state.action._replace(dropped_mass_limit=limit),
            )
        )
        read, output = decode(model.decoder, model.params, batch, None)
        cost = decode_cost(model.decoder, model.params, read, output)
        after, trace = emit(model.controller, read, output, cost, None, None)
        history = record(after.history, trace.token, trace.emitted)
        return after._replace(history=history), trace.token, trace.entropy, trace.emitted


def pruned_drafter(
    most_tokens: int = 7, policy: PagePolicy = SPARSE_PAGES, law: DraftLength | None = None
) -> PrunedDrafter:
    """A pruned drafter with the default table of acceptance.

    Args:
        most_tokens: k, the tokens drafted at most.
        policy: which pages the drafts read; its lists must not outlive a step.
        law: what passes cost; None drafts as if they cost nothing.
    """
    tables = jnp.asarray(ACCEPTANCE, jnp.float32), jnp.asarray(ENTROPY_EDGES, jnp.float32)
    return PrunedDrafter(*tables, law=law, policy=policy, most_tokens=most_tokens)
