"""Drafter protocol: proposes the next tokens of every row, with the probability that they are accepted."""

from typing import Any, NamedTuple, Protocol

import jax

from ..phases.batch import Batch
from ..state.decoder import Decoder


class Draft(NamedTuple):
    """Tokens proposed for the positions that follow each row's last token."""

    tokens: jax.Array  # int32 [rows, k]
    num_tokens: jax.Array  # int32 [rows], how many of the k are proposed
    acceptance: jax.Array  # float32 [rows, k], P(accepted | those before it were accepted), before correction
    source: jax.Array | int = 0  # int32 [rows], the drafter of a cascade that proposes them


class ControlledModel(NamedTuple):
    """The model and the control law whose next tokens are to be drafted."""

    decoder: Decoder
    params: Any
    controller: Any  # of the rows of the batch


class Drafter(Protocol):
    """Proposes tokens. A frozen pytree dataclass, whose calibrated numbers are leaves.

    What it proposes changes how fast a text is generated, never the text.
    """

    @property
    def most_tokens(self) -> int:
        """k, the tokens it proposes at most."""

    def draft(self, model: ControlledModel, batch: Batch, max_drafts: jax.Array) -> tuple[Batch, Draft]:
        """Proposes tokens for every active row of the batch.

        Args:
            model: whose tokens they are to be.
            batch: the rows, with their text (`State.text`) and the corrections of the drafter's probabilities
                (`State.speculation`, float32 `[rows, 1]`).
            max_drafts: int32 `[rows]`, tokens of a row that can be verified at most.

        Returns:
            The batch, in which only the cache past each row's length and the costs in the ledger may have
            changed, and the draft, whose `num_tokens` are at most `max_drafts`.
        """
