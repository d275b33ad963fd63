"""Launch costs: seconds that launches take, as measured, and the tokens they are expected to emit."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from entropic_jax.speculation.speculator import EXPECTED

from .grammars import Plan
from .program_shapes import DecodeProgram
from .sequence import Sequence

LAUNCH_SECONDS = 0.001  # of a launch without its steps, on the host: what one launch fewer saves
DRAFT_SHARE = 0.1  # of a step, that a drafted token costs before it is measured
RATE = 0.2  # weight of the latest launch in an estimate


class MeasuredLaunch(NamedTuple):
    """What a launch took, and what it emitted."""

    steps: int
    seconds: float
    tokens: float  # emitted
    drafts: float  # tokens drafted
    idle: float  # seconds before it in which the device had no work


class Forecast(NamedTuple):
    """What the next tokens of some sequences are expected to be."""

    planned: tuple[int, ...]  # tokens that each plan expects
    free: int  # sequences that emit a token in each step
    free_tokens: float  # that these emit in a step with drafts
    free_drafts: float  # tokens drafted for these in such a step

    def tokens(self, steps: int, speculates: bool) -> float:
        """Tokens of a launch.

        Args:
            steps: number of steps of the launch.
            speculates: whether the steps draft tokens.
        """
        emitted = (1 + count if speculates else min(steps, 1 + count) for count in self.planned)
        of_plans = sum((1 - EXPECTED**number) / (1 - EXPECTED) for number in emitted)
        return of_plans + steps * (self.free_tokens if speculates else self.free)

    def drafts(self, steps: int) -> float:
        """Tokens drafted in a launch of `steps` steps that draft."""
        return sum(self.planned) + steps * self.free_drafts


def forecast(running: Iterable[Sequence], plans: Mapping[int, Plan]) -> Forecast:
    """The forecast of sequences that decode.

    Args:
        running: the sequences.
        plans: the plans of those with a grammar, by row.
    """
    planned, free, free_tokens, free_drafts = [], 0, 0.0, 0.0
    for sequence in running:
        plan = plans.get(sequence.row)
        if plan is not None and plan.pausing is None:
            planned.append(len(plan.tokens))
            continue
        free += 1
        passes = max(1, len(sequence.generated) - sequence.num_accepted)
        free_tokens += max(1.0, len(sequence.generated) / passes)
        free_drafts += sequence.num_drafted / passes
    return Forecast(tuple(planned), free, free_tokens, free_drafts)


class LaunchCosts:
    """Running estimates from the launches so far, by batch bucket."""

    def __init__(self) -> None:
        """Start without an estimate."""
        self._launched: set[tuple[int, bool]] = set()  # programs that have run
        self._step_seconds: dict[tuple[int, bool], float] = {}  # by width and whether tokens are drafted
        self._draft_seconds: dict[int, float] = {}  # that a drafted token adds to a step
        self._yield: dict[int, float] = {}  # tokens that launches with drafts emit for one that is expected

    def step_seconds(self, width: int, speculates: bool) -> float | None:
        """Seconds of a step; None before the first launch.

        Args:
            width: rows of the program.
            speculates: whether its steps draft tokens.
        """
        return self._step_seconds.get((width, speculates))

    def rate(self, forecast: Forecast, width: int, steps: int, speculates: bool) -> float:
        """Expected tokens a second of a launch.

        Args:
            forecast: the forecast of the sequences.
            width: rows of the program.
            steps: number of steps of the launch.
            speculates: whether its steps draft tokens.
        """
        step = self._step_seconds.get((width, False), LAUNCH_SECONDS)
        tokens, seconds = forecast.tokens(steps, speculates), LAUNCH_SECONDS + steps * step
        if speculates:
            tokens = max(tokens * self._yield.get(width, 1.0), len(forecast.planned) + forecast.free)
            seconds += forecast.drafts(steps) * self._draft_seconds.get(width, DRAFT_SHARE * step)
        return tokens / seconds

    def record(self, program: DecodeProgram, measured: MeasuredLaunch, expected: float | None) -> None:
        """Update the estimates by a launch.

        Args:
            program: the program that ran.
            measured: what it took and emitted.
            expected: tokens that it was expected to emit; None without plans.
        """
        steps, seconds, tokens, drafts, _ = measured
        width, speculates = program.width, program.speculates
        if (width, speculates) not in self._launched:  # it may have waited for its program
            self._launched.add((width, speculates))
            return
        _update(self._step_seconds, (width, speculates), max(seconds - LAUNCH_SECONDS, seconds / 2) / steps)
        plain = self._step_seconds.get((width, False))
        if speculates and drafts and plain is not None:
            added = seconds - LAUNCH_SECONDS - steps * plain
            _update(self._draft_seconds, width, max(added, 0.0) / drafts)
        if speculates and expected:
            _update(self._yield, width, tokens / expected)


def _update(estimates: dict, key: object, value: float) -> None:
    """Move an estimate towards a new value."""
    previous = estimates.get(key, value)
    estimates[key] = previous + RATE * (value - previous)
