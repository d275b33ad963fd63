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


class DraftRecord(NamedTuple):
    """Record of each row's drafts (`State.speculation`)."""

    shift: jax.Array  # float32 [rows, drafters], correction of the log-odds of each drafter's probabilities
    idle: jax.Array  # int32 [rows], passes in a row without a drafted token
    rest: jax.Array  # int32 [rows], plain steps until drafters are asked again

    def of(self, number: int) -> "DraftRecord":
        """The record of one drafter, counted from 0."""
        return self._replace(shift=self.shift[:, number : number + 1])


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
            batch: the rows, with their text (`State.text`) and the record of their drafts
                (`State.speculation`), which is that of this drafter alone.
            max_drafts: int32 `[rows]`, tokens of a row that can be verified at most.

        Returns:
            The batch, in which only the cache past each row's length and the costs in the ledger may have
            changed, and the draft, whose `num_tokens` are at most `max_drafts`.
        """
