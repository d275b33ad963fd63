"""Cascade of drafters, cheapest first: a row uses the first that promises a higher rate than the next."""

from typing import Any

import jax
import jax.numpy as jnp

from ..phases.batch import Batch
from ..state.pytree import pytree
from .draft_length import DraftLength
from .drafter import ControlledModel, Draft


@pytree
class Cascade:
    """Drafts with the first drafter whose draft promises a higher rate than is expected of the next.

    The rate is that of accepted tokens by the law's costs. A drafter of which less is expected than of one
    after it is passed over. Without costs, each is asked in turn, and a first token that is likely enough to
    be accepted is enough. A row for which no draft is gets that of the last drafter that had one.
    """

    drafters: tuple[Any, ...]  # of `Drafter`
    law: DraftLength | None = None  # what passes cost
    enough: jax.Array | float = 0.5  # P(accepted) of a first token from which no other is asked without costs

    @property
    def most_tokens(self) -> int:
        """k, the tokens it proposes at most."""
        return max(drafter.most_tokens for drafter in self.drafters)

    def draft(self, model: ControlledModel, batch: Batch, max_drafts: jax.Array) -> tuple[Batch, Draft]:
        """See `Drafter`."""
        rows, k, record = batch.active.shape[0], self.most_tokens, batch.state.speculation
        none = jnp.zeros(rows, jnp.int32)
        best = Draft(jnp.zeros((rows, k), jnp.int32), none, jnp.zeros((rows, k)), none)
        expected = self._expected_rates(model, batch)
        for number, drafter in enumerate(self.drafters):
            asking = batch._replace(state=batch.state._replace(speculation=record.of(number)))
            kept = self._promising(best, expected[number], asking, record.shift)
            later = [rate for rate in expected[number + 1 :] if rate is not None]
            if (rate := expected[number]) is not None and later:
                kept |= rate < jnp.stack(later).max()
            after, draft = drafter.draft(model, asking._replace(active=batch.active & ~kept), max_drafts)
            batch = after._replace(active=batch.active, state=after.state._replace(speculation=record))
            draft = draft._replace(source=jnp.full(rows, number, jnp.int32))
            best = _replace_rows(best, draft, ~kept & (draft.num_tokens > 0))
        return batch, best

    def _expected_rates(self, model: ControlledModel, batch: Batch) -> list[jax.Array | None]:
        """Expected rate of each drafter, float32 `[]`; None for one that states nothing, or without costs.

        Args:
            model: whose tokens are drafted.
            batch: the rows.
        """
        result, state = [], batch.state
        for number, drafter in enumerate(self.drafters):
            rate = getattr(drafter, "expected_rate", None)
            of_drafter = batch._replace(state=state._replace(speculation=state.speculation.of(number)))
            result.append(None if self.law is None or rate is None else rate(model, of_drafter))
        return result

    def _promising(
        self, best: Draft, expected: jax.Array | None, batch: Batch, shift: jax.Array
    ) -> jax.Array:
        """Whether a row keeps the draft that it has, bool `[rows]`.

        Args:
            best: the draft of each row.
            expected: the rate that is expected of the next drafter, if it states one.
            batch: the rows.
            shift: float32 `[rows, drafters]`, corrections of the probabilities.
        """
        has_draft = best.num_tokens > 0
        if self.law is None or expected is None:
            return has_draft & (best.acceptance[:, 0] >= self.enough)
        of_source = shift[jnp.arange(best.num_tokens.shape[0]), best.source]
        rates = self.law.row_rates(best, batch.active, of_source, batch.state.length)
        return has_draft & (rates >= expected)


def _replace_rows(old: Draft, new: Draft, flag: jax.Array) -> Draft:
    """The new draft, which may be narrower, in the flagged rows, bool `[rows]`; the old one in the others."""
    wider = ((0, 0), (0, old.tokens.shape[1] - new.tokens.shape[1]))
    return Draft(
        jnp.where(flag[:, None], jnp.pad(new.tokens, wider), old.tokens),
        jnp.where(flag, new.num_tokens, old.num_tokens),
        jnp.where(flag[:, None], jnp.pad(new.acceptance, wider), old.acceptance),
        jnp.where(flag, new.source, old.source),
    )
