"""Draft-length law: how many drafted tokens of each row to verify for the most accepted tokens a second.

A pass over T tokens of rows with L cached positions costs c(T, L) = a(T) + b(T, L) L, where a contains what
a pass costs besides the model, and b grows with L until the positions no longer fit the processor's caches;
row r accepts the i-th drafted token with probability Πⱼ≤ᵢ P(accepted). For every compiled size T the
likeliest drafted tokens fill the pass, and the size with the largest rate is taken:

    λ = max over T of (rows + Σ of the T − rows largest products) / c(T, L)

At the optimum a token is verified if its product exceeds λ times the marginal cost, λ being the rate that
results: the fixed point of the decision itself. One budget is shared by all rows, so drafts become short by
themselves where a batch is bound by arithmetic.
"""

from typing import Annotated

import jax
import jax.numpy as jnp

from ..state.pytree import STATIC, pytree
from .drafter import Draft

CERTAIN = 12.0  # log-odds beyond which a correction does not go
SEGMENTS = 2  # of the number of cached positions, in which what a position costs grows


def correct(probability: jax.Array, shift: jax.Array) -> jax.Array:
    """The probability with its log-odds shifted; the shapes are broadcast."""
    odds = jnp.clip(jax.scipy.special.logit(probability), -CERTAIN, CERTAIN)
    return jax.nn.sigmoid(odds + shift)


@pytree
class DraftLength:
    """The law, with the measured costs of a pass.

    Each row corrects the drafter's probabilities by a shift of their log-odds, learnt online: after every
    verified token, shift ← shift + η (accepted − P).
    """

    costs: jax.Array  # float32 [widths], of a pass of rows · width tokens, in any unit of time
    correction_rate: jax.Array | float = 0.1  # η
    widths: Annotated[tuple[int, ...], STATIC] = (1, 2, 4, 8, 16)  # tokens a row, on average, per pass
    position_costs: jax.Array | float = 0.0  # float32 [widths], added by each cached position of a row
    position_growth: jax.Array | float = (
        0.0  # float32 [segments, widths], by which these grow in each segment
    )
    growth_bounds: jax.Array | tuple[tuple[float, float], ...] = (
        (0.0, 1.0),
    )  # cached positions, [segments, 2]

    def init(self, rows: int) -> jax.Array:
        """The shift of the log-odds before the first token, float32 `[rows]`."""
        return jnp.zeros(rows, jnp.float32)

    def probabilities(self, draft: Draft, shift: jax.Array) -> jax.Array:
        """P(accepted | those before were), float32 `[rows, k]`, corrected by the row's own record."""
        return jnp.where(draft.acceptance > 0, correct(draft.acceptance, shift[:, None]), 0.0)

    def pass_costs(self, positions: jax.Array) -> jax.Array:
        """Costs of a pass of each width, float32 `[widths]`; `positions` float32 `[]`, cached by its rows."""
        begin, end = jnp.asarray(self.growth_bounds, jnp.float32).T
        grown = jnp.clip((positions - begin) / (end - begin), 0.0, 1.0)
        growth = (grown[:, None] * jnp.asarray(self.position_growth)).sum(0)
        return jnp.asarray(self.costs) + (jnp.asarray(self.position_costs) + growth) * positions

    def row_rates(self, draft: Draft, active: jax.Array, shift: jax.Array, length: jax.Array) -> jax.Array:
        """The rate at which all active rows advance if each expects of its draft what this row does.

        Args:
            draft: the drafter's draft.
            active: bool `[rows]`.
            shift: correction of each row, float32 `[rows]`.
            length: int32 `[rows]`, cached positions.

        Returns:
            Accepted tokens of all rows per unit of time, float32 `[rows]`.
        """
        offered = jnp.arange(draft.tokens.shape[1]) < draft.num_tokens[:, None]
        reach = jnp.where(offered, jnp.cumprod(self.probabilities(draft, shift), 1), 0.0)
        gain = jnp.pad(jnp.cumsum(reach, 1), ((0, 0), (1, 0)))
        taken = jnp.array([min(width - 1, draft.tokens.shape[1]) for width in self.widths])
        costs = self.pass_costs(jnp.where(active, length, 0).sum(dtype=jnp.float32))
        return (active.sum(dtype=jnp.float32) * (1 + gain[:, taken]) / costs).max(1)

    def choose(
        self, draft: Draft, active: jax.Array, shift: jax.Array, length: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Shares a pass among the rows.

        Args:
            draft: the drafter's draft.
            active: bool `[rows]`.
            shift: correction of each row, float32 `[rows]`.
            length: int32 `[rows]`, cached positions.

        Returns:
            The number of tokens to verify for each row, int32 `[rows]`, and the index of the width, int32
            `[]`.
        """
        rows, k = draft.tokens.shape
        offered = (jnp.arange(k) < draft.num_tokens[:, None]) & active[:, None]
        reach = jnp.where(offered, jnp.cumprod(self.probabilities(draft, shift), 1), 0.0)
        # The products of a row descend, so those of a single one are in order.
        ordered, rank = reach.reshape(-1), jnp.arange(rows * k, dtype=jnp.int32)
        if rows > 1:
            order = jnp.argsort(-ordered, stable=True)
            ordered, rank = ordered[order], rank.at[order].set(rank)
        gain = jnp.concatenate([jnp.zeros(1), jnp.cumsum(ordered)])
        room = jnp.array([min(rows * (width - 1), rows * k) for width in self.widths])
        positions = jnp.where(active, length, 0).sum(dtype=jnp.float32)
        rate = (active.sum(dtype=jnp.float32) + gain[room]) / self.pass_costs(positions)
        width = jnp.argmax(rate).astype(jnp.int32)
        chosen = (rank < room[width]).reshape(rows, k) & offered & (reach > 0)
        return chosen.sum(1, dtype=jnp.int32), width

    def learn(
        self, draft: Draft, shift: jax.Array, num_verified: jax.Array, num_accepted: jax.Array
    ) -> jax.Array:
        """The corrected shift after a pass, float32 `[rows]`.

        Args:
            draft: the drafter's draft.
            shift: before the pass, float32 `[rows]`.
            num_verified: int32 `[rows]`, drafted tokens in the pass.
            num_accepted: int32 `[rows]`, those that were accepted.
        """
        index = jnp.arange(draft.tokens.shape[1])
        tested = index < jnp.minimum(num_verified, num_accepted + 1)[:, None]
        accepted = index < num_accepted[:, None]
        error = jnp.where(tested, accepted.astype(jnp.float32) - self.probabilities(draft, shift), 0.0).sum(1)
        return jnp.clip(shift + self.correction_rate * error, -CERTAIN, CERTAIN)


def draft_length(
    rows: int, marginal_cost: float = 0.1, widths: tuple[int, ...] = (1, 2, 4, 8, 16)
) -> DraftLength:
    """The law with costs that grow linearly: each further token costs `marginal_cost` passes of one token.

    Args:
        rows: number of rows of the batch.
        marginal_cost: the cost of one more token in a pass, in passes of one token.
        widths: compiled sizes of a pass, tokens a row.
    """
    cost = lambda tokens: 1 + marginal_cost * (tokens - 1)
    costs = jnp.asarray([cost(rows * width) / cost(rows) for width in widths], jnp.float32)
    nothing, bounds = jnp.zeros((SEGMENTS, len(widths)), jnp.float32), [(0.0, 1.0)] * SEGMENTS
    return DraftLength(
        costs,
        widths=widths,
        position_costs=nothing[0],
        position_growth=nothing,
        growth_bounds=jnp.asarray(bounds, jnp.float32),
    )
