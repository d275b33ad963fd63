"""Drafter protocol: proposes the next tokens of every row, with the probability that they are accepted."""

from typing import NamedTuple, Protocol

import jax

from ..batch import Batch


class Draft(NamedTuple):
    """Tokens proposed for the positions that follow each row's last token."""

    tokens: jax.Array  # int32 [rows, k]
    num_tokens: jax.Array  # int32 [rows], how many of the k are proposed
    acceptance: jax.Array  # float32 [rows, k], P(accepted | those before it were accepted), before correction


class Drafter(Protocol):
    """Proposes tokens. A frozen pytree dataclass, whose calibrated numbers are leaves.

    What it proposes changes how fast a text is generated, never the text.
    """

    @property
    def most_tokens(self) -> int:
        """k, the tokens it proposes at most."""

    def draft(self, batch: Batch) -> Draft:
        """Proposes tokens for every row of the batch.

        Args:
            batch: the rows, with their text (`State.text`).
        """
