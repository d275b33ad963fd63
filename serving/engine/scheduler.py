"""The turns of the engine: who is placed, what is read, how far all decode, and what came of it.

Everything here happens in the engine's thread. What is given to the device is remembered as a flight until
its outcome is collected: one turn later, while the device works on the next, where the two do not share their
processors.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from entropic_jax.methods.entropix_branches import Tally
from entropic_jax.state import FAILED, FINISH_REASONS, RUNNING

from ..transcript import Token
from . import grammars
from .block_manager import BlockManager
from .device_state import DecodeOutput, DeviceState, PrefillOutput
from .interface import Delta
from .kv_compression import KVCompression
from .launch_planner import InFlight, LaunchPlanner, Piece
from .metrics_hooks import MetricsHooks
from .options import Sizes
from .output_stream import QueuedOutputStream, wake
from .prefix_cache import ROOT_HASH, page_hashes
from .priority import Ranking
from .programs import Programs
from .sequence import DECODE, ENDED, PREFILL, WAITING, Sequence, alternatives
from .state_updates import Placement, StateUpdates

NOT_NUMBERS = "the model computed logits that are not numbers"


class Scheduler:
    """The rows, the sequences that wait for one, and what is under way."""

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
    ) -> None:
        """`exact`: what is read is read in pieces that begin at the same positions whatever came before.

        `overlapped`: the device is given its next work before the outcome of the last is looked at. Where it
        shares its processors with this thread that gains nothing, and who ends or comes waits longer.
        """
        self.overlapped = overlapped
        self.programs, self.device_state, self.sizes, self.block_manager, self.updates = (
            programs,
            device_state,
            sizes,
            block_manager,
            updates,
        )
        self.ranking, self.metrics_hooks, self.tokenizer, self.exact = (
            ranking,
            metrics_hooks,
            tokenizer,
            exact,
        )
        rows = sizes.rows
        self.waiting: list[Sequence] = []
        self.slots: list[Sequence | None] = [None] * rows
        self.in_flight: deque[InFlight] = deque()
        self.limit = np.zeros(rows, np.int64)
        self.known = np.zeros(rows, np.int64)  # length of a running row when it was last heard of
        self.ahead = np.zeros(rows, np.int64)  # steps under way since
        self.kv_compression = KVCompression(rows, sizes.shapes.compression)
        self.drops = np.full(rows, ranking.drop)
        self.rounds = 0.0
        self.preemptions = 0
        self.tally = np.zeros(len(Tally._fields), np.int64)  # of searches
        self.collected = time.perf_counter()
        self.planner = LaunchPlanner(programs, sizes, overlapped)
        self.deltas: list[tuple[QueuedOutputStream, Delta]] = []
        self.left_queue: Callable[[], None] = lambda: None
        self.finished: Callable[[Sequence], None] = lambda sequence: None

    # One turn.

    def step(self) -> bool:
        """Give the device work, and collect what came of the turn before. False if there is nothing to do."""
        self._admit()
        careful = any(s is not None and s.engine_request.grammar is not None for s in self.slots)
        if careful:
            self._collect_all()
        begun = time.perf_counter()
        self._flush()
        pieces, read, scored = self._read()
        running, steps, width, output = self._decode(careful)
        busy = read is not None or output is not None
        if busy:
            placed = [(s, s.row, s.epoch) for s in running]
            self.in_flight.append(InFlight(placed, steps, width, begun, output, pieces, read, scored))
        self.deliver()  # while the device works: who is woken competes with this thread for the interpreter
        while len(self.in_flight) > (busy and self.overlapped and not careful):
            self._collect(self.in_flight.popleft())
        seated = any(s is not None for s in self.slots)
        return bool(seated or self.in_flight or self.waiting or self.updates or self.deltas)

    def _flush(self) -> None:
        if self.updates:
            for batch in self.updates.batches():
                self.device_state = self.programs.apply(self.device_state, batch)

    def deliver(self) -> None:
        """Hand out what there is to tell, all at once."""
        if self.deltas:
            deltas, self.deltas = self.deltas, []
            for output_stream, delta in deltas:
                output_stream.put(delta)
            wake(output_stream for output_stream, _ in deltas)

    def _tell(self, sequence: Sequence, delta: Delta) -> None:
        self.deltas.append((sequence.output_stream, delta))

    # Placing.

    def _admit(self) -> None:
        free = [row for row, sequence in enumerate(self.slots) if sequence is None]
        if not free or not self.waiting:
            return
        self.waiting = self.ranking.rank(self.waiting, self.rounds, self.drops)
        kept = []
        for index, sequence in enumerate(self.waiting):
            if not free or not self._place(sequence, free[0]):
                kept = self.waiting[index:]  # no one overtakes whoever is next but finds no pages
                break
            free.pop(0)
            self.rounds += 1 / len(self.slots)
        self.waiting = kept

    def _place(self, sequence: Sequence, row: int) -> bool:
        request = sequence.engine_request.request
        replays = bool(sequence.generated) and sequence.replays(self.exact)
        reading = sequence.prompt if replays else (*sequence.prompt, *sequence.generated)
        target = len(reading) - 1
        keys = sequence.prompt_keys if sequence.scored else []
        keys = keys[: target // self.sizes.page_size]
        held = self.block_manager.reserved * self.sizes.page_size
        others = sum(s is not None and bool(held[s.row] < self.limit[s.row]) for s in self.slots)
        whole_chunks = self.sizes.chunk // self.sizes.page_size if self.exact else 1
        limit = min(len(sequence.prompt) - 1 + request.max_tokens, self.sizes.context, self.sizes.longest)
        spare = self.sizes.spare(sequence.branches, target + 1, limit)
        shared = self.block_manager.allocate(row, keys, target + 1, others, self.updates, whole_chunks, spare)
        if shared is None:
            return False
        now = time.perf_counter()
        if sequence.admitted is None:
            self.ranking.first_row(sequence, self.rounds, len(self.waiting))
        sequence.row, sequence.prefill_tokens, sequence.epoch = row, reading, sequence.epoch + 1
        sequence.num_prefilled = len(shared) * self.sizes.page_size
        sequence.num_replay_tokens, sequence.num_scheduled = (len(sequence.generated) if replays else 0), 0
        sequence.num_replayed = 0
        sequence.stage = PREFILL if sequence.num_prefilled < target else DECODE
        if sequence.admitted is None:
            sequence.admitted, sequence.cached_tokens = now, sequence.num_prefilled
            self.left_queue()
            self.metrics_hooks.admitted(sequence)
        self.slots[row], self.limit[row] = sequence, limit
        self.known[row], self.ahead[row] = target, 0
        self.kv_compression.place(sequence)
        self.planner.least[row] = len(sequence.prompt) + request.min_tokens if request.min_tokens else 0
        self.planner.reported[row] = sequence.engine_request.alternatives is not None
        self.drops[row] = self.ranking.drop
        history = None
        if request.repetition_penalty != 1 or request.presence_penalty or request.frequency_penalty:
            history = sequence.prompt, [] if replays else sequence.generated
        self.updates.placements.append(
            Placement(
                row,
                request,
                reading[-1],
                limit,
                sequence.stops,
                shared,
                sequence.stage == DECODE,
                sequence.row_gains.gains,
                history,
                sequence.branches,
            )
        )
        if sequence.parked is not None and not replays:
            self._flush()
            self.device_state = self.programs.unpark(self.device_state, row, sequence.parked)
        if not sequence.scored and target == 0:
            self._tell_prompt(sequence)
        return True

    # Giving the device work.

    def _read(self) -> tuple[list[Piece], PrefillOutput | None, bool]:
        reading = [s for s in self.slots if s is not None and s.stage == PREFILL]
        if not reading:
            return [], None, False
        chunk, pieces, scored = self.planner.chunk(reading)
        self.device_state, read = self.programs.prefill(self.device_state, chunk, scored)
        return pieces, read, scored

    def _decode(self, careful: bool) -> tuple[list[Sequence], int, int, DecodeOutput | None]:
        reading = sum(s is not None and s.stage == PREFILL for s in self.slots)
        if self.kv_compression.due(self.slots):
            self._collect_all()  # some may end
            self._flush()
            self.device_state = self.kv_compression.compress(
                self.programs, self.device_state, self.slots, self.block_manager
            )
        masks = grammars.masks(self._running(), self.end) if careful else {}
        running, steps = self._running(), 0
        if not careful and self.planner.puts_off(len(running), reading, bool(self.waiting)):
            return [], 0, 0, None
        while running:
            most = int((self.limit - self.known - self.ahead)[[s.row for s in running]].max())
            steps = 1 if careful else self.planner.steps(running, most, reading, bool(self.waiting))
            steps = self.kv_compression.steps(running, steps)
            while not (enough := self._reserve(running, steps)) and steps > 1:
                steps //= 2
            if enough:
                break
            self._preempt()
            running = self._running()
        if not running:
            return [], 0, 0, None
        self._flush()
        kind = self.planner.kind(running)
        constraints, forced = self.planner.constraints(masks), self.planner.forced(running, steps)
        self.device_state, output = self.programs.decode(self.device_state, steps, constraints, forced, kind)
        for s in running:
            s.num_scheduled += steps
            self.ahead[s.row] += steps
        return running, steps, kind[0], output

    def _running(self) -> list[Sequence]:
        """Those that decode and may get a token more than those under way, which a search may take back."""
        more = self.known + self.ahead < self.limit
        return [s for s in self.slots if s is not None and s.stage == DECODE and (s.branches or more[s.row])]

    def _reserve(self, running: list[Sequence], steps: int) -> bool:
        """Make sure of the pages that the steps need."""
        rows = np.array([s.row for s in running])
        length = np.minimum(self.limit[rows], self.known[rows] + self.ahead[rows] + steps)
        length -= self.kv_compression.evicted[rows]
        return self.block_manager.reserve(rows, length, self.updates)

    # Giving way.

    def _preempt(self) -> None:
        """Take the row from the sequence of least priority; it comes back with all its tokens."""
        self._collect_all()
        seated = [s for s in self.slots if s is not None]
        if len(seated) < 2:  # what was collected has ended; one alone has the whole pool
            if (running := self._running()) and not self._reserve(running, 1):
                raise RuntimeError("a sequence alone finds no page, in a pool that it was to fit into")
            return
        yielding = [s for s in seated if not s.branches]
        if not yielding:
            return  # the others had all that they need, and who had not has ended
        victim = self.ranking.rank(yielding, self.rounds, self.drops)[-1]
        if victim.stage == DECODE and not victim.replays(self.exact):
            victim.parked = self.programs.park(self.device_state, victim.row)
        victim.preemptions += 1
        self.preemptions += 1
        self.metrics_hooks.preempted(victim)
        self._vacate(victim)
        victim.stage = WAITING
        if not victim.scored:
            victim.prompt_scores = []
        self.waiting.append(victim)

    def _vacate(self, sequence: Sequence) -> None:
        row = sequence.row
        self.updates.freed_rows.append(row)
        self.block_manager.free(row)
        self.slots[row] = None
        self.planner.least[row], self.planner.reported[row] = 0, False
        sequence.row, sequence.epoch = -1, sequence.epoch + 1

    def end(self, sequence: Sequence, reason: Any, error: str | None = None, timed_out: bool = False) -> None:
        """End a sequence wherever it is: the tokens held back are handed out, its row and pages returned."""
        if sequence.ended:
            return
        tokens = sequence.transcript.finish(reason, error)
        if sequence.row >= 0:
            self._vacate(sequence)
        else:
            self.waiting.remove(sequence)
        if sequence.admitted is None:
            self.left_queue()
        self._close(sequence, tokens, timed_out)

    # Collecting.

    def _collect_all(self) -> None:
        while self.in_flight:
            self._collect(self.in_flight.popleft())

    def _collect(self, launch: InFlight) -> None:
        if launch.prefill is not None:
            self._collect_read(launch, launch.prefill)
        if launch.output is not None:
            self._collect_output(launch, launch.output)

    def _collect_read(self, launch: InFlight, prefill: PrefillOutput) -> None:
        granted, table = np.asarray(prefill.granted), np.asarray(prefill.table)
        scores = [np.asarray(x) for x in prefill.scores] if launch.scored else ()
        for place, (sequence, epoch, begin, end) in enumerate(launch.pieces):
            if sequence.epoch != epoch:
                continue
            if not granted[place]:
                raise RuntimeError(f"the pages of row {sequence.row} were reserved, and were not there")
            whole = min(end, len(sequence.prompt)) // self.sizes.page_size
            self.block_manager.cache_prefix(
                sequence.row, sequence.prompt_keys[:whole], table[place], self.updates
            )
            if launch.scored:
                logprob, token, values = (x[place] for x in scores)
                count = sequence.engine_request.prompt_alternatives or 0
                sequence.prompt_scores += [
                    (float(logprob[i]), alternatives(token[i], values[i], count)) for i in range(end - begin)
                ]
                if end == len(sequence.prompt) - 1:
                    self._tell_prompt(sequence)

    def _tell_prompt(self, sequence: Sequence) -> None:
        sequence.scored = True
        tokens = sequence.prompt_tokens(self.tokenizer.stream(skip_special=False))
        self._tell(sequence, sequence.delta(prompt=tokens, cached_tokens=sequence.cached_tokens))

    def _collect_output(self, launch: InFlight, output: DecodeOutput) -> None:
        counts = np.asarray(output.count)  # waits for the device
        now = time.perf_counter()
        steps = int(output.steps)
        self.collected, spent = now, now - max(launch.begun, self.collected)
        if steps and launch.prefill is None:
            self.planner.took(launch.width, steps, spent)
        tokens, status = np.asarray(output.token).T.tolist(), np.asarray(output.status).tolist()
        metrics, lengths = np.asarray(output.metrics), np.asarray(output.length)
        ran = np.arange(metrics.shape[1])[:, None] < counts
        sums = np.where(ran, metrics, 0.0).sum(1)
        self.drops[:] = np.asarray(output.forecast)
        spent_on = np.asarray(output.seconds).tolist()
        self.tally += np.asarray(output.tally)
        tops = None
        for sequence, row, epoch in launch.running:
            if sequence.epoch != epoch:
                continue
            count = int(counts[row])
            self.known[row] = lengths[row]
            self.ahead[row] -= launch.steps
            sequence.spent = spent_on[row]
            first = 0
            if sequence.num_replayed < sequence.num_replay_tokens:
                first = min(count, sequence.num_replay_tokens - sequence.num_replayed)
                sequence.num_replayed += first
            if sequence.engine_request.alternatives is not None:
                tops = tops or tuple(np.asarray(x) for x in output.likeliest)
                top = tuple(x[first:, row] for x in tops)
            else:
                top = None
            if count > first:
                column, total = metrics[:, first:, row], None if first else sums[:, row]
                settled = sequence.extend(tokens[row][first:count], column, total, top)
                self._enter(sequence, settled, tokens[row][first:count], output, now)
            if not sequence.ended and status[row] != RUNNING:
                self.end(
                    sequence, FINISH_REASONS[status[row]], NOT_NUMBERS if status[row] == FAILED else None
                )
        self.metrics_hooks.launched(launch.width, steps, counts, metrics, spent)

    def _enter(
        self, sequence: Sequence, settled: list[Token], tokens: list[int], output: DecodeOutput, now: float
    ) -> None:
        """A sequence has new tokens: hand out those that are settled, and see whether it has ended."""
        grammar, transcript = sequence.engine_request.grammar, sequence.transcript
        if grammar is not None and transcript.finish_reason is None:
            settled += grammars.follow(sequence, grammar, tokens[0])
        if sequence.first_token is None:
            sequence.first_token = now
        self.metrics_hooks.emitted(sequence, len(tokens), now)
        sequence.last_token = now
        if transcript.finish_reason is not None:
            self._remember(sequence, output)
            self._vacate(sequence)
            self._close(sequence, settled)
        elif settled:
            self._tell(sequence, sequence.delta(settled, cached_tokens=sequence.cached_tokens))

    def _remember(self, sequence: Sequence, output: DecodeOutput) -> None:
        """Let the prefix cache keep what was generated, for a prompt that continues this text."""
        if sequence.replays(self.exact) or self.block_manager.prefix is None:
            return  # these pages are not what reading the text would make of it
        size = self.sizes.page_size
        text = (*sequence.prompt, *sequence.generated)[:-1]
        known = sequence.prompt_keys
        keys = [*known, *page_hashes(known[-1] if known else ROOT_HASH, text[len(known) * size :], size)]
        self.block_manager.cache_prefix(
            sequence.row, keys, np.asarray(output.table)[sequence.row], self.updates
        )

    def _close(self, sequence: Sequence, tokens: list[Token], timed_out: bool = False) -> None:
        sequence.stage = ENDED
        delta = sequence.delta(tokens, timed_out=timed_out)
        self.finished(sequence)
        self.metrics_hooks.finished(sequence, delta)
        self._tell(sequence, delta)
