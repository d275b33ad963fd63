"""Cascade of drafters, the cheapest first: a row asks the next one where its draft is not promising."""

from typing import Any

import jax
import jax.numpy as jnp

from ..batch import Batch
from ..control.controller import pytree
from .drafter import ControlledModel, Draft


@pytree
class Cascade:
    """Drafts with the first drafter whose first token is likely enough to be accepted.

    A row for which none is gets the draft of the last drafter that had one.
    """

    drafters: tuple[Any, ...]  # of `Drafter`
    enough: jax.Array | float = 0.5  # P(accepted) of a draft's first token from which no other is asked

    @property
    def most_tokens(self) -> int:
        """k, the tokens it proposes at most."""
        return max(drafter.most_tokens for drafter in self.drafters)

    def draft(self, model: ControlledModel, batch: Batch, most: jax.Array) -> tuple[Batch, Draft]:
        """See `Drafter`."""
        rows, k = batch.active.shape[0], self.most_tokens
        best = Draft(jnp.zeros((rows, k), jnp.int32), jnp.zeros(rows, jnp.int32), jnp.zeros((rows, k)))
        for drafter in self.drafters:
            promising = (best.num_tokens > 0) & (best.acceptance[:, 0] >= self.enough)
            asking = batch._replace(active=batch.active & ~promising)
            after, draft = drafter.draft(model, asking, most)
            batch = after._replace(active=batch.active)
            best = _replace_rows(best, draft, ~promising & (draft.num_tokens > 0))
        return batch, best


def _replace_rows(old: Draft, new: Draft, flag: jax.Array) -> Draft:
    """The new draft, which may be narrower, in the flagged rows, bool `[rows]`; the old one in the others."""
    wider = ((0, 0), (0, old.tokens.shape[1] - new.tokens.shape[1]))
    return Draft(
        jnp.where(flag[:, None], jnp.pad(new.tokens, wider), old.tokens),
        jnp.where(flag, new.num_tokens, old.num_tokens),
        jnp.where(flag[:, None], jnp.pad(new.acceptance, wider), old.acceptance),
    )
