"""Pass costs: seconds of a forward pass by its number of tokens and by the positions it reads, as measured.

`speculation.measure_pass_costs` measures them on the machine at hand.
"""

from typing import NamedTuple

import jax
import numpy as np

from .draft_length import DraftLength


class PassCosts(NamedTuple):
    """Seconds of a pass: those of its products, and those of reading the rows' keys and values."""

    tokens: tuple[int, ...]  # of a pass, ascending
    seconds: tuple[float, ...]  # of a pass of n tokens, at a context of no positions
    widths: tuple[int, ...]  # tokens of one row, ascending
    seconds_per_position: tuple[float, ...]  # added by each cached position of a row with n tokens

    draft_step: tuple[float, float] | None = None  # of one row's step of the pruned drafter: seconds without
    # context, and added by each cached position; None where it was not measured
    shortest_context: int = 0  # cached positions of a row, below which nothing is drafted from few pages
    head_step: tuple[float, float] | None = None  # as `draft_step`, of a draft head

    def valid(self) -> bool:
        """Whether these are costs: finite, not negative, and as many as there are sizes."""
        pairs = (self.tokens, self.seconds), (self.widths, self.seconds_per_position)
        if not all(len(sizes) == len(seconds) > 0 for sizes, seconds in pairs):
            return False
        steps = *(self.draft_step or ()), *(self.head_step or ())
        numbers = np.array([*self.seconds, *self.seconds_per_position, *steps], float)
        return bool(np.isfinite(numbers).all() and (numbers >= 0).all() and self.seconds[0] > 0)

    def draft_step_costs(self, rows: int) -> tuple[float, float]:
        """Seconds of a step of the pruned drafter for all rows, and those that each cached position adds.

        Args:
            rows: number of rows of the batch.

        Raises:
            ValueError: they were not measured.
        """
        return self._step_costs("draft_step", rows)

    def head_step_costs(self, rows: int) -> tuple[float, float]:
        """As `draft_step_costs`, of a step of a draft head."""
        return self._step_costs("head_step", rows)

    def _step_costs(self, name: str, rows: int) -> tuple[float, float]:
        """The costs of a step of one row, a field of this tuple, for all rows of a batch."""
        if (step := getattr(self, name)) is None:
            raise ValueError(f"{name} must have been measured to draft with it; got None")
        single, batch = (float(_interpolate([n], self.tokens, self.seconds)[0]) for n in (1, rows))
        return step[0] * (batch / single if single > 0 else 1.0), step[1]

    def law(self, rows: int, widths: tuple[int, ...]) -> DraftLength:
        """The draft-length law of a batch, interpolated between the sizes that were measured.

        Args:
            rows: number of rows of the batch.
            widths: compiled sizes of a pass, tokens a row.
        """
        costs = _interpolate([rows * width for width in widths], self.tokens, self.seconds)
        slopes = _interpolate(widths, self.widths, self.seconds_per_position)
        return DraftLength(jax.device_put(costs), widths=widths, position_costs=jax.device_put(slopes))


def _interpolate(
    x: list[int] | tuple[int, ...], known: tuple[int, ...], values: tuple[float, ...]
) -> np.ndarray:
    """Piecewise linear through the known values; beyond the last one in proportion to x. float32."""
    inside = np.interp(x, known, values)
    return np.where(np.asarray(x) > known[-1], values[-1] * np.asarray(x) / known[-1], inside).astype(
        np.float32
    )
