"""Quest: every step reads the pages that could matter most to its query."""

from typing import Any

import jax.numpy as jnp

from ..attention.page_selection import Selection
from ..control.controller import pytree
from ..pallas.paged_attention import Rules
from ..state import Action, Signal

PAGE = 16
ALL_BUT_THE_RULES = 0.999  # a drop at which only the rules decide what stays


def page_policy(budget: int = 1024) -> Selection:
    """The K = max(3, budget / 16) pages of greatest upper bound of the attention score.

    Source: Tang et al. 2024 (arXiv 2406.10774) and its release: pages of 16, the first two layers dense.
    Differs from the release: ranked per KV group, by the mean over its heads of the softmax of the bounds;
    the newest page is always among them; pages of no weight (below 1e-12) are not read to fill up to K.
    """
    rules = Rules(sink=0, recent=1, least=max(3, budget // PAGE), guard=1.0)
    return Selection(information="mass", rules=rules, dense_layers=2, page_size=PAGE)


@pytree
class Always:
    """Select at every step, but where the row holds no more than the budget."""

    budget: Any

    def init(self, action: Action) -> tuple[()]:
        return ()

    def update(self, signal: Signal, action: Action, state: tuple[()]) -> tuple[Action, tuple[()]]:
        dropped_mass_limit = jnp.where(signal.length < self.budget, 0.0, ALL_BUT_THE_RULES)
        return action._replace(
            dropped_mass_limit=dropped_mass_limit.astype(action.dropped_mass_limit.dtype)
        ), state
