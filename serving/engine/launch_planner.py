"""Launch planner: which prompt chunks to prefill, how many steps to decode, and under which constraints."""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from entropic_jax.phases.prefill import PrefillChunk, PrefillOutput
from entropic_jax.state.constraints import Constraints, no_constraints

from ..executable_cache import load_or_compile
from ..request import Request
from .device_state import DecodeOutput
from .draft_choice import TRIAL_STEPS, DraftChoice
from .grammars import Plan
from .launch_costs import LAUNCH_SECONDS, LaunchCosts, MeasuredLaunch, forecast
from .options import Sizes
from .planned_constraints import SETS_PER_ROW, planned_fields
from .programs import DecodeProgram, Programs
from .sequence import DECODE, Sequence

# Seconds that a launch should take. With free rows, launches stay short so that new requests start prefill
# quickly, shorter still while prompts are in prefill. With all rows taken no request can start, but a row
# that ends should not idle for long while requests wait.
SECONDS_WHILE_PREFILLING, SECONDS_WITH_FREE_ROWS = 0.01, 0.02
SECONDS_WHILE_WAITING, SECONDS_WHEN_FULL = 0.04, 0.06
# Where the device shares its processors with the threads that deliver text, each launch takes time from them.
# With all rows taken, launches are longer by this factor.
SHARED_PROCESSORS = 2.5
LONGEST_GAP = 0.01  # seconds of the host between two launches; more, and it had no work
UNTRIED_STEPS = 8  # of a sequence, before the rates of its launches say what drafts are worth to it
LONGEST_DEFERRAL = 0.4  # seconds that decoding rows may wait for others to finish their prefill
# Cost of a chunk and of each prompt in it, in tokens prefilled in the same time. Every chunk reads the keys
# before it again, so few large chunks are best.
CHUNK_OVERHEAD, PROMPT_OVERHEAD = 32, 16


class ScheduledChunk(NamedTuple):
    """The part of a prompt that a prefill computes."""

    sequence: Sequence
    epoch: int
    begin: int  # positions prefilled before
    end: int  # and after


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


class LaunchPlanner:
    """Chooses the size of each launch, from a running estimate of the time that a step takes."""

    def __init__(self, programs: Programs, sizes: Sizes, overlapped: bool) -> None:
        """Start without an estimate of the time of a step.

        Args:
            programs: Compiled programs.
            sizes: The sizes of rows, pages and programs.
            overlapped: As in `Scheduler`.
        """
        self.programs, self.sizes = programs, sizes
        factor = 1 if overlapped else SHARED_PROCESSORS
        self.seconds_while_waiting = SECONDS_WHILE_WAITING * factor
        self.seconds_when_full = SECONDS_WHEN_FULL * factor
        self.min_length = np.zeros(sizes.rows, np.int32)
        self.report_logprobs = np.zeros(sizes.rows, bool)
        self.drafts = np.zeros(sizes.rows, bool)
        positions = 1 + sizes.shapes.planned_tokens
        num_sets = 1 + positions + SETS_PER_ROW * sizes.rows
        vocabulary = programs.decoder.shape.vocabulary
        constraints = partial(no_constraints, sizes.rows, vocabulary, positions, num_sets)
        self._constraints = load_or_compile(constraints, ())[0]()
        # Tokens to replay where there are none.
        self.nothing_forced = jax.device_put(np.full((sizes.shapes.capacity, sizes.rows), -1, np.int32))
        self.may_prune = len(sizes.shapes.page_policies) > 1  # whether sequences may leave pages unread
        self.last_decode = 0.0  # time at which rows last got steps, or there was none to give steps to
        self.costs, self.draft_choice = LaunchCosts(), DraftChoice()
        self._expected_tokens = 0.0  # of the latest launch with plans

    def prefill_chunk(self, sequences: list[Sequence]) -> tuple[PrefillChunk, list[ScheduledChunk], bool]:
        """The next chunk of the prompts in prefill, which counts as prefilled from here on.

        A chunk holds either prompts whose logprobs are requested or others, and the result says which.
        """
        sequences = sorted(sequences, key=lambda s: (s.engine_request.priority, s.admitted_time))
        scored = not sequences[0].prompt_scored
        sequences = [s for s in sequences if s.prompt_scored != scored]
        remaining = [len(s.prefill_tokens) - 1 - s.num_prefilled for s in sequences]
        prompts, size = self._chunk_shape(remaining, scored)
        chunk, scheduled = empty_chunk(prompts, size, self.sizes.rows), []
        for index, sequence in enumerate(sequences[:prompts]):
            length = len(sequence.prefill_tokens) - 1
            begin, end = sequence.num_prefilled, min(sequence.num_prefilled + size, length)
            chunk.rows[index], chunk.num_tokens[index] = sequence.row, end - begin
            chunk.tokens[index, : end - begin + 1] = sequence.prefill_tokens[begin : end + 1]
            chunk.total[index] = length
            sequence.num_prefilled = end
            if end == length:
                sequence.stage = DECODE
            scheduled.append(ScheduledChunk(sequence, sequence.epoch, begin, end))
        return chunk, scheduled, scored

    def _chunk_shape(self, remaining: list[int], scored: bool) -> tuple[int, int]:
        """The available shape (prompts, tokens) that prefills most for its cost; the first prompt is in it.

        A sparse prefill method works on segments of fixed length, which no chunk may cut.
        """
        segment = self.sizes.shapes.segment or 0
        uncut = [min(tokens, segment) for tokens in remaining]

        def throughput(shape: tuple[int, int]) -> float:
            prompts, size = shape
            tokens = sum(min(size, tokens) for tokens in remaining[:prompts])
            return tokens / (prompts * (size + PROMPT_OVERHEAD) + CHUNK_OVERHEAD)

        shapes = [shape for shape in self.sizes.shapes.chunks if max(uncut[: shape[0]]) <= shape[1]]
        available = [shape for shape in shapes if self.programs.available(_prefill_key(shape, scored))]
        return max(available or shapes, key=throughput)

    def can_run(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Whether programs are available that run a sequence along with others; else they are compiled next.

        Args:
            sequence: Waits for a row.
            running: Every sequence with a row.
        """
        shapes, request = self.sizes.shapes, sequence.request
        keys: list[tuple] = [("apply", has_penalties(request))]
        if shapes.compression is not None:
            keys.append(("compress",))
        segment = min(len(sequence.prompt) - 1, shapes.segment or 0)
        chunks = [
            _prefill_key(shape, not sequence.prompt_scored) for shape in shapes.chunks if shape[1] >= segment
        ]
        if not any(map(self.programs.available, chunks)):
            keys.append(_prefill_key(shapes.longest_chunk, not sequence.prompt_scored))
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
        """Those of the programs that can be chosen."""
        return (program for program in programs if self.programs.available(("decode", *program)))

    def speculates(self, running: list[Sequence], plans: Mapping[int, Plan]) -> bool:
        """Whether to draft tokens for these sequences.

        Drafts are verified densely, so there are none beside a sequence that may leave pages unread. A
        sequence that replays known tokens, or for which nothing is drafted, advances by one token a step in
        any case. Chooses the kind of launch with the higher measured rate; with grammar plans, the one with
        the higher expected rate.

        Args:
            running: Sequences that decode.
            plans: The plans of sequences with a grammar, by row.
        """
        if not (
            self.sizes.shapes.speculates
            and any(s.row_gains.drafts for s in running)
            and not any(s.row_gains.pruning for s in running)
            and any(s.num_scheduled >= s.num_replay_tokens for s in running)
            and any(self._available(self._decode_programs(running, speculates=True)))
        ):
            return False
        width = self.decode_program(running, speculates=True).width
        if not plans:
            drafted = [s for s in running if s.row_gains.drafts]
            untried = sum(s.num_scheduled < UNTRIED_STEPS for s in drafted) / len(running)
            return self.draft_choice.drafts(width, untried)
        expected, shapes = forecast(running, plans), self.sizes.shapes
        plain, drafts = (
            max(self.costs.rate(expected, width, steps, flag) for steps in range(1, shapes.capacity + 1))
            for flag in (False, True)
        )
        return drafts >= plain

    def decode_program(self, running: list[Sequence], speculates: bool) -> DecodeProgram:
        """The program that decodes these sequences."""
        programs = list(self._decode_programs(running, speculates))
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
            running: Sequences that decode.
            limit: Steps, at most.
            prefilling: Number of sequences in prefill.
            waiting: Whether requests wait for a row.
            speculates: Whether the steps draft tokens.
            plans: The plans of sequences with a grammar, by row.
        """
        if plans and self.sizes.shapes.plan is not None:
            return 1
        if len(running) + prefilling < self.sizes.rows:
            if any(s.num_scheduled == 0 for s in running):
                return 1  # the first token of a sequence does not wait for a second
            seconds = SECONDS_WHILE_PREFILLING if prefilling else SECONDS_WITH_FREE_ROWS
        elif waiting or prefilling:
            # The more sequences are in prefill, the sooner they should share the steps.
            seconds = self.seconds_while_waiting * len(running) / (len(running) + prefilling)
        else:
            seconds = self.seconds_when_full
        if any(plan.pausing is None for plan in plans.values()):
            seconds = min(seconds, SECONDS_WITH_FREE_ROWS)  # at its end, paused rows go on
        width = self.decode_program(running, speculates).width
        steps = int(seconds / (self.costs.step_seconds(width, speculates) or seconds))
        steps = max(1, min(steps, limit, self.sizes.shapes.capacity))
        if not plans and self.draft_choice.tries(width, speculates):
            steps = min(steps, TRIAL_STEPS)
        if plans:
            expected = forecast(running, plans)
            steps = max(range(1, steps + 1), key=lambda n: self.costs.rate(expected, width, n, speculates))
            self._expected_tokens = expected.tokens(steps, speculates)
        return steps

    def defer_decode(self, running: int, prefilling: int, waiting: bool) -> bool:
        """Whether decoding rows should wait for those in prefill, which will soon share their steps.

        With all rows taken, a step costs the same however few rows decode, so it pays to wait for more.

        Args:
            running: How many rows decode.
            prefilling: How many rows are in prefill.
            waiting: Whether a sequence waits for a row.
        """
        timestamp = time.perf_counter()
        full = waiting or running + prefilling == self.sizes.rows
        small = 0 < running < (7 if full else 1) * prefilling
        if small and timestamp - self.last_decode < LONGEST_DEFERRAL:
            return True
        self.last_decode = timestamp
        return False

    def record_launch(self, launch: InFlight, measured: MeasuredLaunch) -> None:
        """Update the estimates of what launches cost by a launch that has been collected."""
        planned = any(sequence.grammar is not None for sequence, _, _ in launch.running)
        expected = self._expected_tokens if planned else None
        self.costs.record(launch.program, measured, expected)
        steps, seconds, tokens, _, idle = measured
        if not planned and (steps > 1 or seconds > SECONDS_WHILE_PREFILLING):  # not for a first token alone
            width, speculates, rows = launch.program.width, launch.program.speculates, len(launch.running)
            # Launches differ in length, and what each costs beside its steps is no part of their rate.
            of_steps = max(seconds - LAUNCH_SECONDS, seconds / 2)
            self.draft_choice.record(width, speculates, tokens / rows, of_steps + min(idle, LONGEST_GAP))

    def forced_tokens(self, running: list[Sequence], steps: int) -> Any:
        """Tokens that rows replay, int32 `[capacity, rows]`; -1 elsewhere.

        Args:
            running: Sequences that decode.
            steps: Number of steps of the launch.
        """
        if all(s.num_scheduled >= s.num_replay_tokens for s in running):
            return self.nothing_forced
        forced = np.full(self.nothing_forced.shape, -1, np.int32)
        for s in running:
            tokens = s.generated[s.num_scheduled : min(s.num_scheduled + steps, s.num_replay_tokens)]
            forced[: len(tokens), s.row] = tokens
        return forced

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
    return bool(request.repetition_penalty != 1 or request.presence_penalty or request.frequency_penalty)


def _prefill_key(shape: tuple[int, int], scored: bool) -> tuple:
    """The key of a prefill program; its tokens have one more column, the token after the chunk."""
    return "prefill", shape[0], shape[1] + 1, scored


def empty_chunk(prompts: int, size: int, rows: int) -> PrefillChunk:
    """A chunk without a prompt, of the shape of others.

    Args:
        prompts: How many the chunk has room for.
        size: Tokens of a prompt that it has room for.
        rows: Number of rows of the batch; a chunk's row with this number stands for none.
    """
    return PrefillChunk(
        rows=np.full(prompts, rows, np.int32),
        tokens=np.zeros((prompts, size + 1), np.int32),
        num_tokens=np.zeros(prompts, np.int32),
        total=np.zeros(prompts, np.int32),
    )
