"""Quest: every decode step reads the pages with the highest upper bound of the attention score."""

from typing import Any

import jax.numpy as jnp

from ..attention.page_selection import Selection
from ..pallas.paged_attention import SelectionRules
from ..state import Action, Signal
from ..state.pytree import pytree

PAGE_SIZE = 16
PRUNE_TO_RULES = 0.999  # an ε at which only the selection's rules decide which pages are kept


def page_policy(budget: int = 1024) -> Selection:
    """Selects the K = max(3, budget / 16) pages of highest upper bound of the attention score.

    Source: Tang et al. 2024 (arXiv 2406.10774) and its release: pages of 16, the first two layers dense.
    Differs from the release: ranked per KV group, by the mean over its heads of the softmax of the bounds;
    the newest page is always selected; pages of negligible weight (below 1e-12) are not read to fill up to K.
    """
    rules = SelectionRules(
        sink_pages=0, recent_pages=1, min_pages=max(3, budget // PAGE_SIZE), bound_weight=1.0
    )
    return Selection(information="mass", rules=rules, dense_layers=2, page_size=PAGE_SIZE)


@pytree
class PruneBeyondBudget:
    """Prunes at every step in which a row holds more than the budget.

    Args:
        budget: tokens.
    """

    budget: Any

    def init(self, action: Action) -> tuple[()]:
        """See `Controller`."""
        return ()

    def update(self, signal: Signal, action: Action, state: tuple[()]) -> tuple[Action, tuple[()]]:
        """See `Controller`: writes `dropped_mass_limit`."""
        limit = jnp.where(signal.length < self.budget, 0.0, PRUNE_TO_RULES)
        return action._replace(dropped_mass_limit=limit.astype(action.dropped_mass_limit.dtype)), state
