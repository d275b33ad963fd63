"""Continuous-batching scheduler: each step admits sequences, prefills, decodes, and collects outputs.

The life of a request:

1. The engine encodes its prompt and appends a `Sequence` to `Scheduler.waiting`.
2. Admit: the waiting sequences are ranked (`priority`). The first ones that find a free row, and pages for
   their prompt, get both. Full pages of the prompt that the prefix cache holds are shared.
3. Chunked prefill: the rest of the prompt is prefilled in chunks, one chunk of several prompts a step, within
   the token budget (`prefill_planner`).
4. Decode: one launch runs several decode steps of all sequences whose prefill is complete. The block manager
   reserves the pages that the steps may need. While it cannot, the sequence of lowest priority is preempted:
   it waits again, and once readmitted recomputes its KV cache by prefill or replays its tokens.
5. Collect: the tokens of the launch are appended to their sequences (`output_collector`). Those whose text is
   final are delivered to the request's output stream. A sequence whose mask was guessed wrongly waits again.
6. A sequence that has ended gives back its row and its pages; the prefix cache may keep full pages.

Everything here runs in the engine's thread. Where host and device do not share processors, the host collects
a launch while the device works on the next.
"""

import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from entropic_jax.phases.prefill import PrefillOutput

from .block_manager import BlockManager
from .device_state import DecodeOutput, DeviceState
from .grammar_planner import GrammarPlanner
from .grammars import Plan
from .interface import PrefixCacheReset
from .kv_compression import KVCompression
from .launch_planner import InFlight, LaunchPlanner, has_penalties
from .metrics_hooks import MetricsHooks
from .options import Sizes
from .output_collector import OutputCollector
from .prefill_planner import ScheduledChunk
from .priority import Ranking
from .program_shapes import DecodeProgram
from .programs import Programs
from .running_batch import RunningBatch
from .sequence import DECODE, PREFILL, WAITING, Sequence
from .state_updates import Placement, StateUpdates


class _Prefill(NamedTuple):
    """The prefill work that a step has launched."""

    chunks: list[ScheduledChunk]
    output: PrefillOutput | None
    scored: bool
    shape: tuple[int, int] = (0, 0)  # prompts and tokens of each


class _Decode(NamedTuple):
    """The decode work that a step has launched."""

    running: list[Sequence]
    steps: int
    program: DecodeProgram
    output: DecodeOutput | None


NO_PREFILL = _Prefill([], None, False)
NO_DECODE = _Decode([], 0, DecodeProgram(0, None, False), None)


class Scheduler:
    """Decides which sequences prefill and decode next. `step` is one iteration."""

    def __init__(
        self,
        programs: Programs,
        device_state: DeviceState,
        sizes: Sizes,
        block_manager: BlockManager,
        updates: StateUpdates,
        ranking: Ranking,
        metrics_hooks: MetricsHooks,
        tokenizer: Any,
        *,
        exact: bool,
        overlapped: bool,
        chunked: bool = True,
    ) -> None:
        """An empty scheduler.

        Args:
            programs: compiled programs of the model.
            device_state: without a sequence.
            sizes: the sizes of the rows, the page pool and the programs.
            block_manager: the block manager of the pool.
            updates: changes to be made to the device state.
            ranking: order in which sequences are served.
            metrics_hooks: called at each event.
            tokenizer: the model's tokenizer.
            exact: whether prefill chunks begin at the same positions whatever was cached before.
            overlapped: whether the device gets its next launch before the last is collected. Where the device
                shares its processors with this thread, that gains nothing and delays admissions.
            chunked: as in `LaunchPlanner`.
        """
        self.overlapped, self.exact = overlapped, exact
        self.programs, self.device_state, self.sizes = programs, device_state, sizes
        self.block_manager, self.updates, self.ranking = block_manager, updates, ranking
        self.planner = LaunchPlanner(programs, sizes, overlapped, chunked)
        self.kv_compression = KVCompression(sizes.rows, sizes.shapes.compression)
        self.batch = RunningBatch(
            sizes.rows,
            block_manager,
            updates,
            self.planner,
            self.kv_compression,
            metrics_hooks,
            ranking.prior_drop,
        )
        self.grammar_planner = GrammarPlanner(sizes.shapes.planned_tokens, sizes.shapes.plan is None)
        self.collector = OutputCollector(self.batch, sizes.page_size, tokenizer, exact)
        self.waiting: list[Sequence] = []
        self.paused = False  # no sequence that waits may begin
        self.all_await_programs = False  # no sequence that waits can run before another program is compiled
        self.in_flight: deque[InFlight] = deque()
        self.rounds = 0.0  # of admissions; a round is as many as there are rows
        self.preemptions = 0
        self.on_dequeue: Callable[[], None] = lambda: None  # a request has left the queue

    def step(self) -> bool:
        """Run one iteration; False if nothing can run before a request comes or a program is compiled."""
        self._admit()
        # A grammar's masks follow from the last tokens, so every launch must be collected before the next.
        constrained = any(s.grammar is not None for s in self.batch.occupied)
        if constrained:
            self.collect_all()
        start_time = time.perf_counter()
        self.apply_updates()
        prefill = self._prefill()
        decode = self._decode(constrained, beside_chunk=prefill.output is not None)
        busy = prefill.output is not None or decode.output is not None
        if busy:
            self._launch(start_time, prefill, decode)
        # Deliver while the device works: the readers compete with this thread for the interpreter.
        self.batch.deliver()
        self._collect(keep=int(busy and self.overlapped and not constrained))
        self.waiting += self.batch.take_retracted()
        batch, waiting = self.batch, self.waiting and not (self.all_await_programs or self.paused)
        return bool(batch.occupied or self.in_flight or waiting or self.updates or batch.deltas)

    def apply_updates(self) -> None:
        """Apply the host's changes to the device state."""
        if self.updates:
            for batch in self.updates.batches():
                self.device_state = self.programs.apply(self.device_state, batch)

    def reset_prefix_cache(self) -> PrefixCacheReset:
        """Drop the cached prefixes that no sequence uses; says how many pages that were."""
        return self.block_manager.reset_prefix_cache(self.updates)

    # Admit.

    def _admit(self) -> None:
        """Give free rows to the waiting sequences, in the order of their priority."""
        free = self.batch.free_rows
        self.all_await_programs = False
        if not free or not self.waiting or self.paused:
            return
        self.waiting = self.ranking.rank(self.waiting, self.rounds, self.batch.expected_drop)
        await_programs = []
        for place, sequence in enumerate(self.waiting):
            if free and not self.planner.can_run(sequence, self.batch.occupied):
                await_programs.append(sequence)  # others may overtake it
                continue
            # Nobody overtakes the first that finds no pages.
            if not free or not self._place(sequence, free[0]):
                self.waiting = [*await_programs, *self.waiting[place:]]
                return
            free.pop(0)
            self.rounds += 1 / self.sizes.rows
        self.waiting = await_programs
        # When fewer rows are occupied, a sequence may need no further program.
        self.all_await_programs = bool(await_programs) and not self.batch.occupied

    def _place(self, sequence: Sequence, row: int) -> bool:
        """Give a row and pages to a sequence; False where the pool has no room."""
        request = sequence.request
        replays = bool(sequence.generated) and sequence.needs_replay(self.exact)
        prefill_tokens = sequence.prompt if replays else (*sequence.prompt, *sequence.generated)
        target = len(prefill_tokens) - 1
        limit = min(len(sequence.prompt) - 1 + request.max_tokens, self.sizes.context, self.sizes.longest)
        shared_pages = self._allocate(sequence, row, target, limit)
        if shared_pages is None:
            return False
        sequence.prefill_tokens = prefill_tokens
        sequence.num_prefilled = len(shared_pages) * self.sizes.page_size
        sequence.num_replay_tokens = len(sequence.generated) if replays else 0
        sequence.num_scheduled = sequence.num_replayed = 0
        sequence.stage = PREFILL if sequence.num_prefilled < target else DECODE
        if sequence.admitted_time is None:
            self._note_first_admission(sequence)
        self.batch.place(sequence, row, limit)
        history = None
        if has_penalties(request):
            history = sequence.prompt, [] if replays else sequence.generated
        self.updates.placements.append(
            Placement(
                row=row,
                request=request,
                token=prefill_tokens[-1],
                limit=limit,
                stop_tokens=sequence.stop_tokens,
                shared_pages=shared_pages,
                prefilled=sequence.stage == DECODE,
                gains=sequence.row_gains.values,
                history=history,
                text=(*sequence.prompt, *sequence.generated),
                branches=sequence.branches,
                adapter=sequence.adapter.number,
            )
        )
        if sequence.saved_row is not None and not replays:
            self.apply_updates()
            self.device_state = self.programs.restore_row(self.device_state, row, sequence.saved_row)
        if not sequence.prompt_scored and target == 0:
            self.collector.send_prompt(sequence)
        return True

    def _allocate(self, sequence: Sequence, row: int, target: int, limit: int) -> list[int] | None:
        """Reserve pages for `target` prefilled positions and one more; returns those that are shared."""
        page_size = self.sizes.page_size
        # Logprobs of the prompt come from its prefill, so all of it must be prefilled.
        hashes = sequence.page_hashes[: target // page_size] if sequence.prompt_scored else []
        return self.block_manager.allocate(
            row,
            hashes,
            target + 1,
            self.batch.num_growing,
            self.updates,
            multiple=self.sizes.chunk // page_size if self.exact else 1,
            spare=self.sizes.spare(sequence.branches, target + 1, limit),
        )

    def _note_first_admission(self, sequence: Sequence) -> None:
        self.ranking.note_first_row(sequence, self.rounds, len(self.waiting))
        sequence.admitted_time, sequence.cached_tokens = time.perf_counter(), sequence.num_prefilled
        self.on_dequeue()
        self.batch.metrics_hooks.admitted(sequence)

    # Prefill.

    def _prefill(self) -> _Prefill:
        """Prefill one chunk of the prompts that are not complete."""
        prefilling = self.batch.prefilling
        if not prefilling:
            return NO_PREFILL
        seconds = self.planner.seconds_of_chunk(len(self.batch.decoding), len(prefilling), bool(self.waiting))
        chunk, scheduled, scored = self.planner.prefills.chunk(prefilling, seconds)
        self.device_state, output = self.programs.prefill(self.device_state, chunk, scored)
        prompts, columns = chunk.tokens.shape
        return _Prefill(scheduled, output, scored, (prompts, columns - 1))

    # Decode.

    def _decode(self, constrained: bool, *, beside_chunk: bool) -> _Decode:
        """Launch decode steps of the sequences whose prefill is complete, perhaps after a prefill chunk."""
        prefilling, waiting = self.batch.prefilling, bool(self.waiting)
        self._compress()
        if self.planner.defer_decode(len(self.batch.decoding), prefilling, waiting):
            return NO_DECODE
        plans: dict[int, Plan] = {}
        held: set[int] = set()
        if constrained:
            plans, held = self.grammar_planner.plans(self.batch.decoding, not prefilling, self.end)
        running, steps, speculates = self._reserve_pages(len(prefilling), plans, held, beside_chunk)
        if not running:
            return NO_DECODE
        self.apply_updates()
        program = self.planner.decode_program(running, speculates)
        constraints = self.planner.constraints(plans)
        forced, held_rows = self.planner.forced_tokens(running, steps), self.planner.held_rows(held)
        self.device_state, output = self.programs.decode(
            self.device_state, steps, constraints, forced, held_rows, program
        )
        self.batch.launched(running, steps, self._tokens(steps, speculates))
        return _Decode(running, steps, program, output)

    def _tokens(self, steps: int, speculates: bool) -> int:
        """Tokens that a sequence emits in that number of steps, at most."""
        return steps * self.sizes.shapes.tokens(speculates)

    def _compress(self) -> None:
        """Compress the KV cache of prompts that are due."""
        if self.kv_compression.due(self.batch.sequences):
            self.collect_all()  # which may end some of them
            self.apply_updates()
            self.device_state = self.kv_compression.compress(
                self.programs, self.device_state, self.batch.sequences, self.block_manager
            )

    def _reserve_pages(
        self, prefilling: int, plans: dict[int, Plan], held: Collection[int], beside_chunk: bool
    ) -> tuple[list[Sequence], int, bool]:
        """The sequences that decode, their steps and whether these draft tokens, with pages reserved.

        Where pages run short, first the steps become fewer, then nothing is drafted, then a sequence is
        preempted. Sequences in the rows `held` wait.
        """
        while running := [s for s in self.batch.decoding if s.row not in held]:
            drafts = self.planner.speculates(running, plans, beside_chunk=beside_chunk)
            for speculates in (True, False) if drafts else (False,):
                steps = self._num_steps(running, prefilling, plans, speculates)
                while steps and not self.batch.reserve(running, self._tokens(steps, speculates)):
                    steps //= 2
                if steps:
                    return running, steps, speculates
            self._preempt()
        return [], 0, False

    def _num_steps(
        self, running: list[Sequence], prefilling: int, plans: dict[int, Plan], speculates: bool
    ) -> int:
        """Steps of a launch of these sequences, if there are pages for them."""
        batch, rows = self.batch, [s.row for s in running]
        limit = int((batch.limit - batch.length - batch.steps_in_flight)[rows].max())
        steps = self.planner.num_steps(
            running, limit, prefilling, bool(self.waiting), speculates=speculates, plans=plans
        )
        return self.kv_compression.limit_steps(running, steps)

    def _preempt(self) -> None:
        """Take the row from the sequence of lowest priority; it waits again, and keeps its tokens."""
        self.collect_all()
        occupied = self.batch.occupied
        if len(occupied) < 2:  # the others have ended; the last has the whole pool to itself
            if (running := self.batch.decoding) and not self.batch.reserve(running, 1):
                raise RuntimeError("a sequence alone in the pool finds no page, although the pool holds it")
            return
        # Sequences that branch have all their pages reserved, and cannot be recomputed from their tokens.
        preemptible = [s for s in occupied if not s.branches]
        if not preemptible:
            return  # the sequence that needed pages has ended
        victim = self.ranking.rank(preemptible, self.rounds, self.batch.expected_drop)[-1]
        if victim.stage == DECODE and not victim.needs_replay(self.exact):
            victim.saved_row = self.programs.save_row(self.device_state, victim.row)
        victim.preemptions += 1
        self.preemptions += 1
        self.batch.metrics_hooks.preempted(victim)
        self.batch.vacate(victim)
        victim.stage = WAITING
        if not victim.prompt_scored:
            victim.prompt_scores = []
        self.waiting.append(victim)

    # Launch and collect.

    def _launch(self, start_time: float, prefill: _Prefill, decode: _Decode) -> None:
        """Remember the work given to the device until it is collected."""
        running = [(s, s.row, s.epoch) for s in decode.running]
        self.in_flight.append(
            InFlight(
                running=running,
                steps=decode.steps,
                tokens=self._tokens(decode.steps, decode.program.speculates),
                program=decode.program,
                start_time=start_time,
                output=decode.output,
                chunks=prefill.chunks,
                prefill=prefill.output,
                scored=prefill.scored,
                chunk_shape=prefill.shape,
            )
        )

    def _collect(self, keep: int) -> None:
        """Collect launches until `keep` are left in flight."""
        while len(self.in_flight) > keep:
            self.collector.collect(self.in_flight.popleft())

    def collect_all(self) -> None:
        """Collect every launch in flight."""
        self._collect(keep=0)

    # End.

    def end(self, sequence: Sequence, reason: Any, error: str | None = None, timed_out: bool = False) -> None:
        """End a sequence wherever it is.

        Args:
            sequence: waiting or running; one that has ended is left alone.
            reason: its finish_reason.
            error: the message of its last delta.
            timed_out: whether its timeout has passed.
        """
        if sequence.ended:
            return
        if sequence.row < 0:
            self.waiting.remove(sequence)
        if sequence.admitted_time is None:
            self.on_dequeue()
        self.batch.end(sequence, reason, error, timed_out)
