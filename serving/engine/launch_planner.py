"""What one launch is given: which pieces of prompts, how many steps, which tokens are known or allowed."""

import time
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from entropic_jax.attention.page_selection import PagePolicy
from entropic_jax.sampling.constraints import Constraints, no_constraints

from .device_state import DecodeOutput, PrefillChunk, PrefillOutput
from .options import Sizes
from .programs import Programs
from .sequence import DECODE, Sequence

# Seconds that a launch should take. While rows are free, whoever comes should not wait long for its turn, and
# least of all for its prompt. When all are taken nobody can come, but a row that ends should not stand
# idle for long while jobs wait.
SOON, OPEN, CROWDED, FULL = 0.01, 0.02, 0.04, 0.06
# Where the device shares its processors with those who hand out texts, every launch takes time from it: when
# all rows are taken, launches are longer by this.
SHARED = 2.5
MOST_PUT_OFF = 0.4  # seconds that rows that run may wait for others to read their prompts
# Positions that could be read in the time that it takes to begin a chunk, and a piece of it: for each piece
# the keys before it are read again, so prompts are best read in few.
CHUNK, PIECE = 32, 16

Piece = tuple[Sequence, int, int, int]  # with its epoch, and its positions read before and after


class InFlight(NamedTuple):
    """What one turn gave to the device, and to whom."""

    running: list[tuple[Sequence, int, int]]  # sequence, row, epoch
    steps: int
    width: int
    begun: float
    output: DecodeOutput | None
    pieces: list[Piece]
    prefill: PrefillOutput | None
    scored: bool


class LaunchPlanner:
    """Puts launches together, and learns how long a step takes."""

    def __init__(self, programs: Programs, sizes: Sizes, overlapped: bool) -> None:
        """`overlapped` as in `Scheduler`."""
        self.sizes = sizes
        self.crowded, self.full = (aim * (1 if overlapped else SHARED) for aim in (CROWDED, FULL))
        self.least = np.zeros(sizes.rows, np.int32)
        self.reported = np.zeros(sizes.rows, bool)
        self._constraints = no_constraints(sizes.rows, programs.decoder.shape.vocabulary)
        self.unforced = jnp.full((sizes.shapes.capacity, sizes.rows), -1, jnp.int32)
        self.stepped = 0.0  # when rows last had steps, or there were none that could
        self._step_seconds: dict[int, float] = {}

    def chunk(self, reading: list[Sequence]) -> tuple[PrefillChunk, list[Piece], bool]:
        """The next pieces of prompts that are being read, and whether they are scored; they count as read."""
        reading = sorted(reading, key=lambda s: (s.engine_request.priority, s.admitted))
        scored = not reading[0].scored
        reading = [s for s in reading if s.scored != scored]
        prompts, size = self._shape([len(s.prefill_tokens) - 1 - s.num_prefilled for s in reading])
        chunk = empty_chunk(prompts, size, self.sizes.rows)
        pieces = []
        for place, sequence in enumerate(reading[:prompts]):
            begin, end = (
                sequence.num_prefilled,
                min(sequence.num_prefilled + size, len(sequence.prefill_tokens) - 1),
            )
            chunk.rows[place], chunk.num_tokens[place] = sequence.row, end - begin
            chunk.tokens[place, : end - begin + 1] = sequence.prefill_tokens[begin : end + 1]
            sequence.num_prefilled = end
            if end == len(sequence.prefill_tokens) - 1:
                sequence.stage = DECODE
            chunk.total[place] = len(sequence.prefill_tokens) - 1
            pieces.append((sequence, sequence.epoch, begin, end))
        return chunk, pieces, scored

    def _shape(self, rest: list[int]) -> tuple[int, int]:
        """The compiled shape that reads most for its size; the first prompt is always in it.

        Where pieces have a length of their own, none is cut shorter.
        """
        segment = self.sizes.shapes.segment
        whole = [min(left, segment or 0) for left in rest]

        def worth(shape: tuple[int, int]) -> float:
            prompts, size = shape
            return sum(min(size, left) for left in rest[:prompts]) / (prompts * (size + PIECE) + CHUNK)

        fit = [shape for shape in self.sizes.shapes.chunks if max(whole[: shape[0]]) <= shape[1]]
        return max(fit, key=worth)

    def width(self, running: int) -> int:
        """The narrowest program that so many rows fit into."""
        return next(width for width in self.sizes.shapes.widths if width >= running)

    def kind(self, running: list[Sequence]) -> tuple[int, PagePolicy | None, bool]:
        """What decodes them: its width, what its steps read, and whether its sampler draws for some."""
        shapes = self.sizes.shapes
        page_policy = shapes.page_policies[-1 if any(s.row_gains.pruning for s in running) else 0]
        samples = shapes.samplers[-1 if any(s.row_gains.sampler for s in running) else 0]
        return self.width(len(running)), page_policy, samples

    def steps(self, running: list[Sequence], most: int, reading: int, waiting: bool) -> int:
        """How many steps to run, `most` at most, beside so many prompts that are being read."""
        if len(running) + reading < self.sizes.rows:
            if any(s.num_scheduled == 0 for s in running):
                return 1  # the first token of a sequence waits for no second
            aim = SOON if reading else OPEN
        else:
            # The more prompts are being read, the sooner they should share the steps.
            share = len(running) / (len(running) + reading)
            aim = self.crowded * share if waiting or reading else self.full
        steps = int(aim / self._step_seconds.get(self.width(len(running)), aim))
        return max(1, min(steps, most, self.sizes.shapes.capacity))

    def puts_off(self, running: int, reading: int, waiting: bool) -> bool:
        """Whether rows that run wait a while for those that read, which will soon share their steps.

        With all rows taken, a step costs as much however few of them run: it pays to wait for more.
        """
        now = time.perf_counter()
        full = waiting or running + reading == self.sizes.rows
        if 0 < running < (7 if full else 1) * reading and now - self.stepped < MOST_PUT_OFF:
            return True
        self.stepped = now
        return False

    def took(self, width: int, steps: int, seconds: float) -> None:
        """A launch took so long."""
        before = self._step_seconds.get(width, seconds / steps)
        self._step_seconds[width] = before + 0.2 * (seconds / steps - before)

    def forced(self, running: list[Sequence], steps: int):
        """The tokens that rows are told again, int32 `[capacity, rows]`, −1 elsewhere."""
        if all(s.num_scheduled >= s.num_replay_tokens for s in running):
            return self.unforced
        forced = np.full(self.unforced.shape, -1, np.int32)
        for s in running:
            known = s.generated[s.num_scheduled : min(s.num_scheduled + steps, s.num_replay_tokens)]
            forced[: len(known), s.row] = known
        return forced

    def constraints(self, masks: dict[int, np.ndarray]) -> Constraints:
        """What the rows are held to, those of `masks` to the tokens whose bits are set.

        Copied: the device reads it while the host goes on.
        """
        given: dict[str, Any] = dict(least=self.least.copy(), reported=self.reported.copy())
        if not masks:
            return self._constraints._replace(**given)
        constrained, allowed = (
            np.zeros(self.sizes.rows, bool),
            np.zeros(self._constraints.allowed.shape, np.int32),
        )
        for row, mask in masks.items():
            constrained[row] = True
            allowed[row, : mask.size] = mask[: allowed.shape[1]]
        given |= dict(constrained=constrained, allowed=allowed)
        return self._constraints._replace(**given)


def empty_chunk(prompts: int, size: int, rows: int) -> PrefillChunk:
    """A chunk of no prompt."""
    return PrefillChunk(
        np.full(prompts, rows, np.int32),
        np.zeros((prompts, size + 1), np.int32),
        np.zeros(prompts, np.int32),
        np.zeros(prompts, np.int32),
    )
