"""Suffix drafter: continues the longest match of a row's last tokens in the row's own text.

Source: prompt lookup decoding (Saxena 2023); SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). Differs
from the papers: the match is found on the device, in the tokens themselves, in place of a tree on the
host; a match that overlaps its own continuation is continued periodically.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from ..pallas.longest_match import longest_match
from ..phases.batch import Batch
from ..state.pytree import STATIC, pytree
from .drafter import ControlledModel, Draft

# P(accepted) of the token that follows a match, by the match's length, on some 5000 tokens of held-out code
# sampled at temperature 0.7 and 1. Starting values: each row corrects them by its own record.
ACCEPTANCE = (
    *(0.0, 0.27, 0.45, 0.60, 0.66, 0.68, 0.78, 0.76, 0.76, 0.76, 0.80, 0.82, 0.84, 0.86, 0.88, 0.90, 0.93),
)


@pytree
class SuffixDrafter:
    """Drafts by lookup in the prompt and the generated text; costs no pass of the model."""

    acceptance: jax.Array  # float32 [longest + 1], P(accepted) after a match of 0, 1, … tokens
    most_tokens: Annotated[int, STATIC] = 15  # k, the tokens drafted at most

    @property
    def longest(self) -> int:
        """The longest match that the tables distinguish from longer ones."""
        return self.acceptance.shape[0] - 1

    def draft(self, model: ControlledModel, batch: Batch, max_drafts: jax.Array) -> tuple[Batch, Draft]:
        """See `Drafter`."""
        state = batch.state
        text, last = state.text, state.length + state.evicted
        assert text is not None, "`check_speculation` refuses a state without text"
        matched, end = longest_match(text, last, self.longest)
        # A continuation that reaches the end of the text goes on with its own beginning.
        period = jnp.maximum(last - end, 1)
        offset = jnp.arange(self.most_tokens)
        position = end[:, None] + 1 + offset % period[:, None]
        tokens = jnp.take_along_axis(text, jnp.minimum(position, text.shape[1] - 1), 1)
        known = jnp.minimum(matched[:, None] + offset, self.longest)
        num_tokens = jnp.where(batch.active & (matched > 0), jnp.minimum(max_drafts, self.most_tokens), 0)
        return batch, Draft(tokens, num_tokens, jnp.asarray(self.acceptance)[known])


def suffix_drafter(most_tokens: int = 15) -> SuffixDrafter:
    """A suffix drafter with the default table of acceptance.

    Args:
        most_tokens: k, the tokens drafted at most.
    """
    return SuffixDrafter(jax.device_put(np.asarray(ACCEPTANCE, np.float32)), most_tokens)
