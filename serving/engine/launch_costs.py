"""Launch costs: seconds that launches take, as measured, and the tokens they are expected to emit."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from entropic_jax.speculation.speculator import EXPECTED

from .grammars import Plan
from .program_shapes import DecodeProgram
from .sequence import Sequence

LAUNCH_SECONDS = 0.001  # of a launch without its steps, on the host, before it is measured
DRAFT_SHARE = 0.1  # of a step, that a drafted token costs before it is measured
RUNS_ON = 15 / 16  # P(a run whose mask is guessed does not end with its next token)
RATE = 0.2  # weight of the latest launch in an estimate
KEPT = 0.97  # weight that launches keep with each later one, where they and their steps are told apart
SPREAD = 0.05  # of the numbers of steps, relative to their mean's square, above which they can be
LEAST_SHARE = 0.1  # of a launch's seconds that its steps take, at least


class MeasuredLaunch(NamedTuple):
    """Time of a launch, and the tokens that it emitted."""

    steps: int
    seconds: float
    tokens: float  # emitted
    drafts: float  # tokens drafted
    idle: float  # seconds before it in which the device had no work


class Forecast(NamedTuple):
    """Expected next tokens of some sequences."""

    planned: tuple[int, ...]  # tokens that each plan expects
    free: int  # sequences that emit a token in each step
    free_tokens: float  # that these emit in a step with drafts
    free_drafts: float  # tokens drafted for these in such a step
    runs: tuple[tuple[int, float], ...] = ()  # tokens of each run at most, and those that it emits in a pass

    @property
    def rows(self) -> int:
        """The number of sequences."""
        return len(self.planned) + len(self.runs) + self.free

    def tokens(self, steps: np.ndarray, speculates: bool) -> np.ndarray:
        """Tokens of launches.

        Args:
            steps: number of steps of each launch.
            speculates: whether its steps draft tokens.
        """
        result = steps * (self.free_tokens if speculates else self.free)
        for count in self.planned:
            emitted = np.full_like(steps, 1 + count) if speculates else np.minimum(steps, 1 + count)
            result = result + _until(EXPECTED, emitted)
        for most, rate in self.runs:
            result = result + _until(RUNS_ON, np.minimum(steps * (rate if speculates else 1), most))
        return result

    def drafts(self, steps: np.ndarray) -> np.ndarray:
        """Tokens drafted in launches of `steps` steps that draft."""
        return sum(self.planned) + steps * self.free_drafts


def forecast(running: Iterable[Sequence], plans: Mapping[int, Plan]) -> Forecast:
    """The forecast of sequences that decode.

    Args:
        running: the sequences.
        plans: the plans of those with a grammar, by row.
    """
    planned, runs, free, free_tokens, free_drafts = [], [], 0, 0.0, 0.0
    for sequence in running:
        plan = plans.get(sequence.row)
        run = None if plan is None else plan.run
        if plan is not None and (run is None or (plan.guesses and plan.tokens)):
            planned.append(len(plan.tokens))
            continue
        passes = max(1, len(sequence.generated) - sequence.num_accepted)
        tokens = max(1.0, len(sequence.generated) / passes)
        free_drafts += sequence.num_drafted / passes
        if run is not None and run.tokens is not None:
            runs.append((1 + run.tokens, tokens))
            continue
        free += 1
        free_tokens += tokens
    return Forecast(tuple(planned), free, free_tokens, free_drafts, tuple(runs))


def _until(chance: float, number: np.ndarray) -> np.ndarray:
    """Tokens expected before one fails, of `number` each of which succeeds with this chance."""
    return (1 - chance**number) / (1 - chance)


class LaunchTimes:
    """Seconds of launches by how many steps, or drafted tokens, they have: a line through the recent ones."""

    def __init__(self, launch_seconds: float = LAUNCH_SECONDS) -> None:
        """Start without a launch.

        Args:
            launch_seconds: what a launch takes without any, until launches with other numbers tell it.
        """
        self._launch_seconds = launch_seconds
        self._sums = np.zeros(5)  # of weights, steps, their squares, seconds, and steps times seconds

    def record(self, steps: float, seconds: float) -> None:
        """Note what a launch of so many steps, or drafted tokens, took."""
        self._sums *= KEPT
        self._sums += 1, steps, steps * steps, seconds, steps * seconds

    @property
    def line(self) -> tuple[float, float]:
        """Seconds of a launch without any of them, and of each."""
        weight = self._sums[0]
        steps, squares, seconds, products = (self._sums[1:] / weight).tolist()
        variance = squares - steps * steps
        if variance < SPREAD * steps * steps:
            step = max(seconds - self._launch_seconds, seconds / 2) / steps
        else:
            step = (products - steps * seconds) / variance
        step = min(max(step, LEAST_SHARE * seconds / steps), seconds / steps)
        return seconds - step * steps, step


class LaunchCosts:
    """Running estimates from the launches so far, by batch bucket."""

    def __init__(self) -> None:
        """Start without an estimate."""
        self._launched: set[tuple[int, bool]] = set()  # programs that have run
        self._times: dict[tuple[int, bool], LaunchTimes] = {}  # by width and whether tokens are drafted
        # What drafts add to a launch, by width: one part whatever their number, the other for each token.
        self._draft_times: dict[int, LaunchTimes] = {}
        self._yield: dict[int, float] = {}  # tokens that launches with drafts emit for one that is expected

    def step_seconds(self, width: int, speculates: bool) -> float | None:
        """Seconds of a step; None before the first launch.

        Args:
            width: rows of the program.
            speculates: whether its steps draft tokens.
        """
        times = self._times.get((width, speculates))
        return None if times is None else times.line[1]

    def rates(self, forecast: Forecast, width: int, most: int, speculates: bool) -> np.ndarray:
        """Expected tokens a second of launches of 1 … `most` steps.

        Args:
            forecast: the forecast of the sequences.
            width: rows of the program.
            most: steps of the longest launch.
            speculates: whether its steps draft tokens.
        """
        steps = np.arange(1.0, most + 1)
        launch, step = self._plain(width) or (LAUNCH_SECONDS, LAUNCH_SECONDS)
        tokens, seconds = forecast.tokens(steps, speculates), launch + steps * step
        if speculates:
            tokens = np.maximum(tokens * self._yield.get(width, 1.0), forecast.rows)
            times = self._draft_times.get(width)
            added, of_draft = (0.0, DRAFT_SHARE * step) if times is None else times.line
            seconds = seconds + added + forecast.drafts(steps) * of_draft
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
        self._times.setdefault((width, speculates), LaunchTimes()).record(steps, seconds)
        plain = self._plain(width)
        if speculates and drafts and plain is not None:
            added = max(seconds - plain[0] - steps * plain[1], 0.0)
            self._draft_times.setdefault(width, LaunchTimes(0.0)).record(drafts, added)
        if speculates and expected:
            _update(self._yield, width, tokens / expected)

    def _plain(self, width: int) -> tuple[float, float] | None:
        """Seconds of a launch without drafts, and of its steps; None before the first."""
        times = self._times.get((width, False))
        return None if times is None else times.line


def _update(estimates: dict, key: object, value: float) -> None:
    """Move an estimate towards a new value."""
    previous = estimates.get(key, value)
    estimates[key] = previous + RATE * (value - previous)
