"""Pass costs: seconds of a forward pass by its number of tokens and by the positions it reads, as measured.

`speculation.measure_pass_costs` measures them on the machine at hand.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from .draft_length import SEGMENTS, DraftLength


class PassCosts(NamedTuple):
    """Seconds of a pass: of its products, of reading the rows' keys and values, and of emission."""

    tokens: tuple[int, ...]  # of a pass, ascending
    seconds: tuple[float, ...]  # of a pass of n tokens, at a context of no positions
    widths: tuple[int, ...]  # tokens of one row, ascending
    seconds_per_position: tuple[float, ...]  # added by each cached position of a row with n tokens
    draft_step: tuple[float, float] | None = None  # of one row's step of the pruned drafter: seconds without
    # context, and added by each cached position; None where it was not measured
    shortest_context: int = 0  # cached positions of a row, below which nothing is drafted from few pages
    head_step: tuple[float, float] | None = None  # as `draft_step`, of a draft head
    emission: tuple[float, float] = (0.0, 0.0)  # of a pass besides the model: of one row, and of each further
    # The same of a plain step, which decides nothing about drafts: a row that drafts nothing takes those.
    step_emission: tuple[float, float] = (0.0, 0.0)

    # Few cached positions are read from the processor's caches, many from memory: what each costs with more
    # than `near_positions` in the batch, at ascending numbers of them, between which it is interpolated.
    near_positions: int = 0
    farther: tuple[tuple[int, tuple[float, ...]], ...] = ()  # at most `SEGMENTS`

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "PassCosts":
        """The costs whose fields were written as JSON. Raises TypeError for other fields."""
        return cls(**{name: _as_tuples(value) for name, value in values.items()})

    def valid(self) -> bool:
        """Whether these are costs: finite, not negative, and as many as there are sizes."""
        pairs = (self.tokens, self.seconds), (self.widths, self.seconds_per_position)
        if not all(len(sizes) == len(seconds) > 0 for sizes, seconds in pairs):
            return False
        points = [self.near_positions, *(positions for positions, _ in self.farther)]
        if points != sorted(set(points)) or len(self.farther) > SEGMENTS:
            return False
        if any(len(slopes) != len(self.widths) for _, slopes in self.farther):
            return False
        steps = *(self.draft_step or ()), *(self.head_step or ()), *self.emission, *self.step_emission
        slopes = [slope for _, slopes in self.farther for slope in slopes]
        numbers = np.array([*self.seconds, *self.seconds_per_position, *steps, *slopes], float)
        return bool(np.isfinite(numbers).all() and (numbers >= 0).all() and self.seconds[0] > 0)

    def covers(self, tokens: int, batch: tuple[int, int] | None) -> bool:
        """Whether passes as large as these were timed.

        Args:
            tokens: the number of tokens of a pass.
            batch: rows, and cached positions of each; None asks for no batch.
        """
        farthest = self.farther[-1][0] if self.farther else 0
        return self.tokens[-1] >= tokens and (batch is None or farthest >= batch[0] * batch[1])

    def up_to(self, tokens: int) -> "PassCosts":
        """The costs with those of a pass of so many tokens, if all that were timed are smaller."""
        last = self.tokens[-1]
        if last >= tokens:
            return self
        more = float(_interpolate([tokens], self.tokens, self.seconds)[0])
        return self._replace(tokens=(*self.tokens, tokens), seconds=(*self.seconds, more))

    def draft_step_costs(self, rows: int) -> tuple[float, float]:
        """Seconds of a step of the pruned drafter for all rows, and those that each cached position adds.

        Args:
            rows: number of rows of the batch.

        Raises:
            ValueError: they were not measured.
        """
        return self._step_costs("draft_step", rows)

    def head_step_costs(self, rows: int) -> tuple[float, float]:
        """Like `draft_step_costs`, for a step of a draft head."""
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
        single, further = np.transpose([self.step_emission if n == 1 else self.emission for n in widths])
        costs += (single + further * (rows - 1)).astype(np.float32)
        slopes = _interpolate(widths, self.widths, self.seconds_per_position)
        points, growth = [self.near_positions], []
        for positions, seconds in self.farther:
            before = slopes + np.sum(growth, 0) if growth else slopes
            growth.append(_interpolate(widths, self.widths, seconds) - before)
            points.append(positions)
        while len(growth) < SEGMENTS:  # in which nothing grows: all laws have one structure
            growth.append(np.zeros_like(slopes))
            points.append(points[-1] + 1)
        bounds = np.stack([points[:-1], points[1:]], 1).astype(np.float32)
        costs, slopes, growth, bounds = jax.device_put((costs, slopes, np.stack(growth), bounds))
        return DraftLength(
            costs, widths=widths, position_costs=slopes, position_growth=growth, growth_bounds=bounds
        )


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _interpolate(
    x: list[int] | tuple[int, ...], known: tuple[int, ...], values: tuple[float, ...]
) -> np.ndarray:
    """Piecewise linear through the known values; beyond the last one in proportion to x. float32."""
    inside = np.interp(x, known, values)
    return np.where(np.asarray(x) > known[-1], values[-1] * np.asarray(x) / known[-1], inside).astype(
        np.float32
    )
