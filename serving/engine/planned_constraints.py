"""Planned constraints: the plans of all rows as arrays for one launch, with equal token sets stored once."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from entropic_jax.state.constraints import ANYTHING, NOTHING, Constraints
from entropic_jax.state.row_subset import Shared

from .grammars import Plan

SETS_PER_ROW = 4  # room for token sets, besides those of one full plan; at least 2


class TokenSets:
    """A table of token sets, each stored once."""

    def __init__(self, shape: tuple[int, int]) -> None:
        """An empty table.

        Args:
            shape: number of sets, and words of 32 bits in each.
        """
        self.table = np.zeros(shape, np.int32)
        self._places: dict[bytes, int] = {}

    def place(self, bits: np.ndarray) -> int:
        """The place of a set; -1 if there is no room for it.

        Args:
            bits: int32 `[words]`, or one word for all of them.
        """
        key, count = bits.tobytes(), len(self._places)
        if key not in self._places:
            if count == len(self.table):
                return -1
            words = slice(None) if bits.size == 1 else slice(bits.size)
            self.table[count, words] = bits[: self.table.shape[1]]
            self._places[key] = count
        return self._places[key]


def planned_fields(plans: Mapping[int, Plan], blank: Constraints) -> dict[str, Any]:
    """The fields of constraints that state plans, each as far as there is room for its masks.

    Args:
        plans: by row.
        blank: constraints of the same shape.
    """
    rows, positions = blank.mask.shape
    sets = TokenSets(blank.sets.value.shape)
    masked, pausing = np.zeros(rows, bool), np.zeros(rows, np.int32)
    mask, expected = np.zeros((rows, positions), np.int32), np.full((rows, positions), NOTHING, np.int32)
    for row, plan in plans.items():  # for these, there is room
        masked[row], mask[row] = True, sets.place(plan.masks[0])
        if plan.run is not None:
            pausing[row] = sets.place(plan.run.pausing)
    for row, plan in plans.items():
        last = 0
        for place, token in enumerate(plan.tokens):
            number = sets.place(plan.masks[place + 1])
            if number < 0:
                break
            expected[row, place], mask[row, place + 1 :] = token, number
            last = place + 1
        if plan.run is not None and last == len(plan.tokens):
            # What the last position states holds for all after it, too, so that a guess may not reach it.
            guessed = None if plan.run.tokens is None else min(last + plan.run.tokens, positions - 1)
            expected[row, last:guessed] = ANYTHING
    return dict(masked=masked, sets=Shared(sets.table), mask=mask, expected=expected, pausing=pausing)
