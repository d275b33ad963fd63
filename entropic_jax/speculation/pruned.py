"""Pruned drafter: the model itself on few pages of the KV cache."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..attention.window_pages import WindowPages
from ..phases.batch import Batch
from ..state.pytree import STATIC, pytree
from .autoregressive import AutoregressiveDrafter
from .draft_length import DraftLength

WINDOW = WindowPages()
# P(accepted) by the draft's entropy, nats, and its mean, of the embedded model with `WINDOW` on held-out code
# at temperature 0.7 and 1, after 2048 and 7936 tokens. Each row corrects them by its own record.
ENTROPY_EDGES, ACCEPTANCE, MEAN_ACCEPTANCE = (0.3, 1.5, 2.7), (0.998, 0.97, 0.93, 0.905), 0.935


@pytree
class PrunedDrafter(AutoregressiveDrafter):
    """Drafts with the model on the pages of a window; costs a step of the model per token."""

    mean_acceptance: jax.Array | float = MEAN_ACCEPTANCE  # P: of a token before it is drafted
    shortest_context: jax.Array | int = 2048  # positions, below which nothing is drafted
    pages: Annotated[WindowPages, STATIC] = WINDOW

    def reader(self, batch: Batch) -> Any:
        """See `AutoregressiveDrafter`."""
        state = batch.state
        return self.pages.reader(state.cache, jnp.where(batch.active, state.length + 1, 0))


def pruned_drafter(
    most_tokens: int = 7,
    pages: WindowPages = WINDOW,
    law: DraftLength | None = None,
    step_costs: tuple[float, float] = (0.5, 0.0),
    shortest_context: int = 2048,
) -> PrunedDrafter:
    """A pruned drafter with the default table of acceptance.

    Args:
        most_tokens: k, the tokens drafted at most.
        pages: the choice of pages that the drafts read.
        law: what passes cost; None drafts as if they cost nothing.
        step_costs: the costs of a draft step of the batch, in the law's unit of time: without context, and
            what each cached position of a row adds.
        shortest_context: cached positions of a row below which nothing is drafted.
    """
    numbers = (np.asarray(x, np.float32) for x in (ACCEPTANCE, ENTROPY_EDGES, step_costs))
    acceptance, edges, costs = jax.device_put(tuple(numbers))
    return PrunedDrafter(
        acceptance,
        edges,
        law=law,
        step_costs=costs,
        shortest_context=jax.device_put(np.int32(shortest_context)),
        pages=pages,
        most_tokens=most_tokens,
    )
