"""Launch planner: which prompt chunks to prefill, how many steps to decode, and under which constraints."""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from entropic_jax.phases.prefill import PrefillOutput
from entropic_jax.state.constraints import Constraints, no_constraints

from ..executable_cache import load_or_compile
from ..request import Request
from .device_state import DecodeOutput
from .draft_choice import LONGEST_WAIT, TRIAL_STEPS, DraftChoice
from .grammars import Plan
from .interface import LONGEST_FREE_RUN
from .launch_costs import LAUNCH_SECONDS, LaunchCosts, MeasuredLaunch, forecast
from .options import Sizes
from .planned_constraints import SETS_PER_ROW, planned_fields
from .prefill_planner import PrefillPlanner, ScheduledChunk, prefill_key
from .program_shapes import DecodeProgram
from .programs import Programs
from .sequence import Sequence

# Seconds that a launch should take. With free rows, launches stay short so that new requests start prefill
# quickly, shorter still while prompts are in prefill. With all rows taken no request can start, but a row
# that ends should not idle for long while requests wait.
SECONDS_WHILE_PREFILLING, SECONDS_WITH_FREE_ROWS = 0.01, 0.02
SECONDS_WHILE_WAITING, SECONDS_WHEN_FULL = 0.04, 0.06
# Seconds that a prefill chunk should take beside rows that decode, whose next tokens wait for it. With all
# rows taken, launches of steps are longer, and so may chunks be.
SECONDS_OF_CHUNK = 0.03
# Where the device shares its processors with the threads that deliver text, each launch takes time from them.
# With all rows taken, launches are longer by this factor, and with free rows they take these seconds for each
# row, at least: several times as long as it takes to deliver its text.
SHARED_PROCESSORS = 2.5
SHARED_SECONDS_OF_ROW = 0.00075
LONGEST_GAP = 0.01  # seconds of the host between two launches; more, and it had no work
UNTRIED_STEPS = 8  # of a sequence, before the rates of its launches say what drafts are worth to it
LONGEST_DEFERRAL = 0.4  # seconds that decoding rows may wait for others that soon finish their prefill


class InFlight(NamedTuple):
    """The work that one scheduler step gave to the device, until its outputs are collected."""

    running: list[tuple[Sequence, int, int]]  # sequences that decode, with their row and epoch
    steps: int
    tokens: int  # that a sequence may emit in them, at most
    program: DecodeProgram
    start_time: float
    output: DecodeOutput | None
    chunks: list[ScheduledChunk]
    prefill: PrefillOutput | None
    scored: bool
    chunk_shape: tuple[int, int] = (0, 0)  # of the prefill: prompts and tokens of each


class LaunchPlanner:
    """Chooses the size of each launch, from a running estimate of the time that a step takes."""

    def __init__(self, programs: Programs, sizes: Sizes, overlapped: bool, chunked: bool = True) -> None:
        """Start without an estimate of the time of a step.

        Args:
            programs: compiled programs.
            sizes: the sizes of rows, pages and programs.
            overlapped: as in `Scheduler`.
            chunked: whether prefill is cut into chunks so that decoding rows wait for a short time only.
        """
        self.programs, self.sizes, self.chunked = programs, sizes, chunked
        self.prefills = PrefillPlanner(programs, sizes)
        factor = 1 if overlapped else SHARED_PROCESSORS
        self.seconds_while_waiting = SECONDS_WHILE_WAITING * factor
        self.seconds_when_full = SECONDS_WHEN_FULL * factor
        self.seconds_of_row = 0.0 if overlapped else SHARED_SECONDS_OF_ROW
        self.min_length = np.zeros(sizes.rows, np.int32)
        self.report_logprobs = np.zeros(sizes.rows, bool)
        self.drafts = np.zeros(sizes.rows, bool)
        planned = sizes.shapes.planned_tokens
        positions = 1 + max(planned, LONGEST_FREE_RUN) if planned else 1
        num_sets = 2 + planned + SETS_PER_ROW * sizes.rows
        vocabulary = programs.decoder.shape.vocabulary
        constraints = partial(no_constraints, sizes.rows, vocabulary, positions, num_sets)
        self._constraints = load_or_compile(constraints, ())[0]()
        # Tokens to replay where there are none.
        self.nothing_forced = jax.device_put(np.full((sizes.shapes.capacity, sizes.rows), -1, np.int32))
        self.may_prune = len(sizes.shapes.page_policies) > 1  # whether sequences may leave pages unread
        self.last_decode = 0.0  # time at which rows last got steps, or there was none to give steps to
        self.costs, self.draft_choice = LaunchCosts(), DraftChoice()
        self._expected_tokens = 0.0  # of the latest launch with plans
        self._planned_plain = 0  # launches with plans since the last that drafted

    def can_run(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Whether programs are available that run a sequence along with others; else they are compiled next.

        Args:
            sequence: waits for a row.
            running: every sequence with a row.
        """
        shapes, request = self.sizes.shapes, sequence.request
        keys: list[tuple] = [("apply", has_penalties(request))]
        if shapes.compression is not None:
            keys.append(("compress",))
        segment = min(len(sequence.prompt) - 1, shapes.segment or 0)
        chunks = [
            prefill_key(shape, not sequence.prompt_scored) for shape in shapes.chunks if shape[1] >= segment
        ]
        if not any(map(self.programs.available, chunks)):
            keys.append(prefill_key(shapes.longest_chunk, not sequence.prompt_scored))
        together = [*running, sequence]
        if not any(self._available(self._decode_programs(together, False))):
            keys.append(("decode", *next(self._decode_programs(together, False))))
        missing = [key for key in keys if not self.programs.require(key)]
        return not missing

    def _decode_programs(self, running: list[Sequence], speculates: bool) -> Iterator[DecodeProgram]:
        """The programs that can decode these sequences, the cheapest first.

        One that may leave pages unread, or has a sampler, decodes the sequences that want neither as well.
        """
        shapes = self.sizes.shapes
        prunes = any(s.row_gains.pruning for s in running)
        samples = any(s.row_gains.sampler for s in running)
        policies = shapes.page_policies[-1:] if prunes else shapes.page_policies
        samplers = shapes.samplers[-1:] if samples else shapes.samplers
        for width in shapes.drafting_widths if speculates else shapes.widths:
            if width >= len(running):
                for policy, sampler in itertools.product(policies, samplers):
                    if not speculates or (policy, sampler) == (policies[0], False):
                        yield DecodeProgram(width, policy, sampler, speculates)

    def _available(self, programs: Iterable[DecodeProgram]) -> Iterator[DecodeProgram]:
        """The programs that can be chosen."""
        return (program for program in programs if self.programs.available(("decode", *program)))

    def speculates(self, running: list[Sequence], plans: Mapping[int, Plan], *, beside_chunk: bool) -> bool:
        """Whether to draft tokens for these sequences.

        Drafts are verified densely, so there are none beside a sequence that may leave pages unread. A
        sequence that replays known tokens, or for which nothing is drafted, advances by one token a step in
        any case. Chooses the kind of launch with the higher measured rate; with grammar plans, the one with
        the higher expected rate.

        Args:
            running: sequences that decode.
            plans: the plans of sequences with a grammar, by row.
            beside_chunk: whether the launch also prefills a chunk, so that its rate does not count.
        """
        if not (
            self.sizes.shapes.speculates
            and any(s.row_gains.drafts for s in running)
            and not any(s.row_gains.pruning for s in running)
            and any(s.num_scheduled >= s.num_replay_tokens for s in running)
        ):
            return False
        programs = list(self._decode_programs(running, speculates=True))
        if programs and self.programs.memory.is_out(("decode", *programs[0])):
            if self._drafts_pay(running, plans, programs[0].width, beside_chunk=beside_chunk):
                self.programs.memory.misses(("decode", *programs[0]))
                self.draft_choice.postpone(programs[0].width)
            return False  # plain steps run until it is in memory
        if not any(self._available(programs)):
            return False
        width = self.decode_program(running, speculates=True).width
        return self._drafts_pay(running, plans, width, beside_chunk=beside_chunk)

    def _drafts_pay(
        self, running: list[Sequence], plans: Mapping[int, Plan], width: int, *, beside_chunk: bool
    ) -> bool:
        """Whether launches that draft tokens have, or are expected to have, the higher rate.

        Args:
            running: sequences that decode.
            plans: the plans of sequences with a grammar, by row.
            width: rows of the program that drafts.
            beside_chunk: as in `speculates`.
        """
        if not plans:
            drafted = [s for s in running if s.row_gains.drafts]
            untried = sum(s.num_scheduled < UNTRIED_STEPS for s in drafted) / len(running)
            return self.draft_choice.drafts(width, untried, recorded=not beside_chunk)
        expected, shapes = forecast(running, plans), self.sizes.shapes
        plain, drafts = (
            self.costs.rates(expected, width, shapes.capacity, flag).max() for flag in (False, True)
        )
        # Where nothing is expected to be drafted, both rates are the same, and a pass costs more than a step.
        # The slower kind is tried from time to time: what it takes may have changed.
        due = self._planned_plain >= LONGEST_WAIT and expected.drafts(np.ones(1)).sum() > 0
        pays = bool(drafts > plain) or due
        self._planned_plain = 0 if pays else self._planned_plain + 1
        return pays

    def decode_program(self, running: list[Sequence], speculates: bool) -> DecodeProgram:
        """The program that decodes these sequences."""
        programs = list(self._decode_programs(running, speculates))
        self.programs.memory.misses(("decode", *programs[0]))
        return next(self._available(programs), programs[0])

    def num_steps(
        self,
        running: list[Sequence],
        limit: int,
        prefilling: int,
        waiting: bool,
        *,
        speculates: bool,
        plans: Mapping[int, Plan],
    ) -> int:
        """How many steps a launch should have.

        Args:
            running: sequences that decode.
            limit: steps, at most.
            prefilling: number of sequences in prefill.
            waiting: whether requests wait for a row.
            speculates: whether the steps draft tokens.
            plans: the plans of sequences with a grammar, by row.
        """
        if plans and self.sizes.shapes.plan is not None:
            return 1
        if len(running) + prefilling < self.sizes.rows:
            if any(s.num_scheduled == 0 for s in running):
                return 1  # the first token of a sequence does not wait for a second
            deliveries = self.seconds_of_row * len(running)
            seconds = SECONDS_WHILE_PREFILLING if prefilling else max(SECONDS_WITH_FREE_ROWS, deliveries)
        elif waiting or prefilling:
            # The more sequences are in prefill, the sooner they should share the steps.
            seconds = self.seconds_while_waiting * len(running) / (len(running) + prefilling)
        else:
            seconds = self.seconds_when_full
        if any(plan.run is None or plan.guesses for plan in plans.values()):
            seconds = min(seconds, SECONDS_WITH_FREE_ROWS)  # at its end, paused rows go on
        width = self.decode_program(running, speculates).width
        steps = int(seconds / (self.costs.step_seconds(width, speculates) or seconds))
        steps = max(1, min(steps, limit, self.sizes.shapes.capacity))
        if not plans and self.draft_choice.begins_try(width, speculates):
            steps = min(steps, TRIAL_STEPS)
        if plans:
            expected = forecast(running, plans)
            steps = 1 + int(self.costs.rates(expected, width, steps, speculates).argmax())
            self._expected_tokens = float(expected.tokens(np.asarray(float(steps)), speculates))
        return steps

    def seconds_of_chunk(self, running: int, prefilling: int, waiting: bool) -> float | None:
        """Seconds that the next prefill chunk should take at most; None is no bound.

        Args:
            running: how many rows decode, and wait for the chunk.
            prefilling: how many rows are in prefill.
            waiting: whether a sequence waits for a row.
        """
        if not self.chunked or not running:
            return None
        full = waiting or running + prefilling == self.sizes.rows
        return max(SECONDS_OF_CHUNK, self.seconds_while_waiting) if full else SECONDS_OF_CHUNK

    def defer_decode(self, running: int, prefilling: list[Sequence], waiting: bool) -> bool:
        """Whether decoding rows should wait for those in prefill, which will soon share their steps.

        With all rows taken, a step costs the same however few rows decode, so it pays to wait for more. It
        does not where a prompt in prefill is long, or with free rows.

        Args:
            running: how many rows decode.
            prefilling: the sequences in prefill.
            waiting: whether a sequence waits for a row.
        """
        timestamp = time.perf_counter()
        full = waiting or running + len(prefilling) == self.sizes.rows
        fewer = 0 < running < 7 * len(prefilling)
        left = LONGEST_DEFERRAL - (timestamp - self.last_decode)
        if full and fewer and left > 0 and self.prefills.seconds_left(prefilling) <= LONGEST_DEFERRAL:
            return True
        self.last_decode = timestamp
        return False

    def record_prefill(self, launch: InFlight, seconds: float, steps: int = 0) -> None:
        """Update the estimate of what chunks cost by a launch that has been collected.

        Args:
            launch: with a prefill chunk, and perhaps decode steps after it.
            seconds: what both took.
            steps: decode steps that ran.
        """
        if steps:
            width, speculates = launch.program.width, launch.program.speculates
            step = self.costs.step_seconds(width, speculates)
            if step is None:
                return
            seconds -= steps * step
        seconds = max(seconds - LAUNCH_SECONDS, LAUNCH_SECONDS)
        self.prefills.record(launch.chunks, launch.chunk_shape, launch.scored, seconds)

    def record_launch(self, launch: InFlight, measured: MeasuredLaunch) -> None:
        """Update the estimates of what launches cost by a launch that has been collected."""
        planned = any(sequence.grammar is not None for sequence, _, _ in launch.running)
        expected = self._expected_tokens if planned else None
        self.costs.record(launch.program, measured, expected)
        steps, seconds, tokens, drafts, idle = measured
        if not planned and (steps > 1 or seconds > SECONDS_WHILE_PREFILLING):  # not for a first token alone
            width, speculates, rows = launch.program.width, launch.program.speculates, len(launch.running)
            # Launches differ in length, and what each costs beside its steps is no part of their rate.
            of_steps = max(seconds - LAUNCH_SECONDS, seconds / 2)
            seconds = of_steps + min(idle, LONGEST_GAP)
            self.draft_choice.record(width, speculates, tokens / rows, seconds, drafts / rows)

    def forced_tokens(self, running: list[Sequence], steps: int) -> Any:
        """Tokens that rows replay, int32 `[capacity, rows]`; -1 elsewhere.

        Args:
            running: sequences that decode.
            steps: number of steps of the launch.
        """
        if all(s.num_scheduled >= s.num_replay_tokens for s in running):
            return self.nothing_forced
        forced = np.full(self.nothing_forced.shape, -1, np.int32)
        for s in running:
            tokens = s.generated[s.num_scheduled : min(s.num_scheduled + steps, s.num_replay_tokens)]
            forced[: len(tokens), s.row] = tokens
        return forced

    def held_rows(self, rows: Iterable[int]) -> np.ndarray:
        """Bool `[rows]`: these rows take no part in a launch."""
        held = np.zeros(self.sizes.rows, bool)
        held[list(rows)] = True
        return held

    def constraints(self, plans: Mapping[int, Plan]) -> Constraints:
        """The constraints of a launch; `plans` of the sequences with a grammar, by row.

        Host arrays are copied, since the device reads them while the host goes on.
        """
        fields: dict[str, Any] = dict(
            min_length=self.min_length.copy(),
            report_logprobs=self.report_logprobs.copy(),
            drafts=self.drafts.copy(),
        )
        if plans:
            fields |= planned_fields(plans, self._constraints)
        return self._constraints._replace(**fields)


def has_penalties(request: Request) -> bool:
    """Whether a request's penalties need the history of its tokens."""
    additive = request.presence_penalty or request.frequency_penalty or request.dry_multiplier
    return bool(request.repetition_penalty != 1 or additive)
