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

from entropic_jax.methods.entropix_moves import Tally
from entropic_jax.state import FAILED, FINISH_REASONS, RUNNING

from ..transcript import Token
from . import grammars
from .block_manager import Pages
from .device_state import Board, Output, Read
from .interface import Delta
from .kv_compression import Shrinking
from .launch_planner import Flight, Launches, Piece
from .metrics_hooks import Observer
from .options import Sizes
from .output_stream import QueuedTicket, wake
from .prefix_cache import ROOT, extend
from .priority import Ranking
from .programs import Programs
from .sequence import DECODE, ENDED, PREFILL, WAITING, Sequence, alternatives
from .state_updates import Edits, Placement

NOT_NUMBERS = "the model computed logits that are not numbers"


class Batcher:
    """The rows, the sequences that wait for one, and what is under way."""

    def __init__(
        self,
        programs: Programs,
        board: Board,
        sizes: Sizes,
        pages: Pages,
        edits: Edits,
        ranking: Ranking,
        observer: Observer,
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
        self.programs, self.board, self.sizes, self.pages, self.edits = programs, board, sizes, pages, edits
        self.ranking, self.observer, self.tokenizer, self.exact = ranking, observer, tokenizer, exact
        rows = sizes.rows
        self.waiting: list[Sequence] = []
        self.seats: list[Sequence | None] = [None] * rows
        self.flights: deque[Flight] = deque()
        self.limit = np.zeros(rows, np.int64)
        self.known = np.zeros(rows, np.int64)  # length of a running row when it was last heard of
        self.ahead = np.zeros(rows, np.int64)  # steps under way since
        self.shrinking = Shrinking(rows, sizes.shapes.compression)
        self.drops = np.full(rows, ranking.drop)
        self.rounds = 0.0
        self.preemptions = 0
        self.tally = np.zeros(len(Tally._fields), np.int64)  # of searches
        self.collected = time.perf_counter()
        self.launches = Launches(programs, sizes, overlapped)
        self.told: list[tuple[QueuedTicket, Delta]] = []
        self.left_queue: Callable[[], None] = lambda: None
        self.finished: Callable[[Sequence], None] = lambda sequence: None

    # One turn.

    def turn(self) -> bool:
        """Give the device work, and collect what came of the turn before. False if there is nothing to do."""
        self._admit()
        careful = any(s is not None and s.job.grammar is not None for s in self.seats)
        if careful:
            self._collect_all()
        begun = time.perf_counter()
        self._flush()
        pieces, read, scored = self._read()
        running, steps, width, output = self._decode(careful)
        busy = read is not None or output is not None
        if busy:
            placed = [(s, s.row, s.epoch) for s in running]
            self.flights.append(Flight(placed, steps, width, begun, output, pieces, read, scored))
        self.deliver()  # while the device works: who is woken competes with this thread for the interpreter
        while len(self.flights) > (busy and self.overlapped and not careful):
            self._collect(self.flights.popleft())
        seated = any(s is not None for s in self.seats)
        return bool(seated or self.flights or self.waiting or self.edits or self.told)

    def _flush(self) -> None:
        if self.edits:
            for commands in self.edits.take():
                self.board = self.programs.apply(self.board, commands)

    def deliver(self) -> None:
        """Hand out what there is to tell, all at once."""
        if self.told:
            told, self.told = self.told, []
            for ticket, delta in told:
                ticket.put(delta)
            wake(ticket for ticket, _ in told)

    def _tell(self, sequence: Sequence, delta: Delta) -> None:
        self.told.append((sequence.ticket, delta))

    # Placing.

    def _admit(self) -> None:
        free = [row for row, sequence in enumerate(self.seats) if sequence is None]
        if not free or not self.waiting:
            return
        self.waiting = self.ranking.rank(self.waiting, self.rounds, self.drops)
        kept = []
        for index, sequence in enumerate(self.waiting):
            if not free or not self._place(sequence, free[0]):
                kept = self.waiting[index:]  # no one overtakes whoever is next but finds no pages
                break
            free.pop(0)
            self.rounds += 1 / len(self.seats)
        self.waiting = kept

    def _place(self, sequence: Sequence, row: int) -> bool:
        request = sequence.job.request
        replays = bool(sequence.generated) and sequence.replays(self.exact)
        reading = sequence.prompt if replays else (*sequence.prompt, *sequence.generated)
        target = len(reading) - 1
        keys = sequence.prompt_keys if sequence.scored else []
        keys = keys[: target // self.sizes.page_size]
        held = self.pages.reserved * self.sizes.page_size
        others = sum(s is not None and bool(held[s.row] < self.limit[s.row]) for s in self.seats)
        whole_chunks = self.sizes.chunk // self.sizes.page_size if self.exact else 1
        limit = min(len(sequence.prompt) - 1 + request.max_tokens, self.sizes.context, self.sizes.longest)
        spare = self.sizes.spare(sequence.branches, target + 1, limit)
        shared = self.pages.take(row, keys, target + 1, others, self.edits, whole_chunks, spare)
        if shared is None:
            return False
        now = time.perf_counter()
        if sequence.admitted is None:
            self.ranking.first_row(sequence, self.rounds, len(self.waiting))
        sequence.row, sequence.reading, sequence.epoch = row, reading, sequence.epoch + 1
        sequence.read = len(shared) * self.sizes.page_size
        sequence.replay, sequence.told = (len(sequence.generated) if replays else 0), 0
        sequence.replayed = 0
        sequence.stage = PREFILL if sequence.read < target else DECODE
        if sequence.admitted is None:
            sequence.admitted, sequence.cached_tokens = now, sequence.read
            self.left_queue()
            self.observer.admitted(sequence)
        self.seats[row], self.limit[row] = sequence, limit
        self.known[row], self.ahead[row] = target, 0
        self.shrinking.place(sequence)
        self.launches.least[row] = len(sequence.prompt) + request.min_tokens if request.min_tokens else 0
        self.launches.reported[row] = sequence.job.alternatives is not None
        self.drops[row] = self.ranking.drop
        history = None
        if request.repetition_penalty != 1 or request.presence_penalty or request.frequency_penalty:
            history = sequence.prompt, [] if replays else sequence.generated
        self.edits.placed.append(
            Placement(
                row,
                request,
                reading[-1],
                limit,
                sequence.stops,
                shared,
                sequence.stage == DECODE,
                sequence.knobs.gains,
                history,
                sequence.branches,
            )
        )
        if sequence.parked is not None and not replays:
            self._flush()
            self.board = self.programs.unpark(self.board, row, sequence.parked)
        if not sequence.scored and target == 0:
            self._tell_prompt(sequence)
        return True

    # Giving the device work.

    def _read(self) -> tuple[list[Piece], Read | None, bool]:
        reading = [s for s in self.seats if s is not None and s.stage == PREFILL]
        if not reading:
            return [], None, False
        chunk, pieces, scored = self.launches.chunk(reading)
        self.board, read = self.programs.read(self.board, chunk, scored)
        return pieces, read, scored

    def _decode(self, careful: bool) -> tuple[list[Sequence], int, int, Output | None]:
        reading = sum(s is not None and s.stage == PREFILL for s in self.seats)
        if self.shrinking.due(self.seats):
            self._collect_all()  # some may end
            self._flush()
            self.board = self.shrinking.compress(self.programs, self.board, self.seats, self.pages)
        masks = grammars.masks(self._running(), self.end) if careful else {}
        running, steps = self._running(), 0
        if not careful and self.launches.puts_off(len(running), reading, bool(self.waiting)):
            return [], 0, 0, None
        while running:
            most = int((self.limit - self.known - self.ahead)[[s.row for s in running]].max())
            steps = 1 if careful else self.launches.steps(running, most, reading, bool(self.waiting))
            steps = self.shrinking.steps(running, steps)
            while not (enough := self._reserve(running, steps)) and steps > 1:
                steps //= 2
            if enough:
                break
            self._preempt()
            running = self._running()
        if not running:
            return [], 0, 0, None
        self._flush()
        kind = self.launches.kind(running)
        constraints, forced = self.launches.constraints(masks), self.launches.forced(running, steps)
        self.board, output = self.programs.decode(self.board, steps, constraints, forced, kind)
        for s in running:
            s.told += steps
            self.ahead[s.row] += steps
        return running, steps, kind[0], output

    def _running(self) -> list[Sequence]:
        """Those that decode and may get a token more than those under way, which a search may take back."""
        more = self.known + self.ahead < self.limit
        return [s for s in self.seats if s is not None and s.stage == DECODE and (s.branches or more[s.row])]

    def _reserve(self, running: list[Sequence], steps: int) -> bool:
        """Make sure of the pages that the steps need."""
        rows = np.array([s.row for s in running])
        length = np.minimum(self.limit[rows], self.known[rows] + self.ahead[rows] + steps)
        length -= self.shrinking.evicted[rows]
        return self.pages.reserve(rows, length, self.edits)

    # Giving way.

    def _preempt(self) -> None:
        """Take the row from the sequence of least priority; it comes back with all its tokens."""
        self._collect_all()
        seated = [s for s in self.seats if s is not None]
        if len(seated) < 2:  # what was collected has ended; one alone has the whole pool
            if (running := self._running()) and not self._reserve(running, 1):
                raise RuntimeError("a sequence alone finds no page, in a pool that it was to fit into")
            return
        yielding = [s for s in seated if not s.branches]
        if not yielding:
            return  # the others had all that they need, and who had not has ended
        victim = self.ranking.rank(yielding, self.rounds, self.drops)[-1]
        if victim.stage == DECODE and not victim.replays(self.exact):
            victim.parked = self.programs.park(self.board, victim.row)
        victim.preemptions += 1
        self.preemptions += 1
        self.observer.preempted(victim)
        self._vacate(victim)
        victim.stage = WAITING
        if not victim.scored:
            victim.prompt_scores = []
        self.waiting.append(victim)

    def _vacate(self, sequence: Sequence) -> None:
        row = sequence.row
        self.edits.ended.append(row)
        self.pages.leave(row)
        self.seats[row] = None
        self.launches.least[row], self.launches.reported[row] = 0, False
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
        while self.flights:
            self._collect(self.flights.popleft())

    def _collect(self, flight: Flight) -> None:
        if flight.read is not None:
            self._collect_read(flight, flight.read)
        if flight.output is not None:
            self._collect_output(flight, flight.output)

    def _collect_read(self, flight: Flight, read: Read) -> None:
        enough, table = np.asarray(read.enough), np.asarray(read.table)
        scores = [np.asarray(x) for x in read.scores] if flight.scored else ()
        for place, (sequence, epoch, begin, end) in enumerate(flight.pieces):
            if sequence.epoch != epoch:
                continue
            if not enough[place]:
                raise RuntimeError(f"the pages of row {sequence.row} were reserved, and were not there")
            whole = min(end, len(sequence.prompt)) // self.sizes.page_size
            self.pages.learn(sequence.row, sequence.prompt_keys[:whole], table[place], self.edits)
            if flight.scored:
                logprob, token, values = (x[place] for x in scores)
                count = sequence.job.prompt_alternatives or 0
                sequence.prompt_scores += [
                    (float(logprob[i]), alternatives(token[i], values[i], count)) for i in range(end - begin)
                ]
                if end == len(sequence.prompt) - 1:
                    self._tell_prompt(sequence)

    def _tell_prompt(self, sequence: Sequence) -> None:
        sequence.scored = True
        tokens = sequence.prompt_tokens(self.tokenizer.stream(skip_special=False))
        self._tell(sequence, sequence.delta(prompt=tokens, cached_tokens=sequence.cached_tokens))

    def _collect_output(self, flight: Flight, output: Output) -> None:
        counts = np.asarray(output.count)  # waits for the device
        now = time.perf_counter()
        steps = int(output.steps)
        self.collected, spent = now, now - max(flight.begun, self.collected)
        if steps and flight.read is None:
            self.launches.took(flight.width, steps, spent)
        tokens, status = np.asarray(output.token).T.tolist(), np.asarray(output.status).tolist()
        measures, lengths = np.asarray(output.measures), np.asarray(output.length)
        ran = np.arange(measures.shape[1])[:, None] < counts
        sums = np.where(ran, measures, 0.0).sum(1)
        self.drops[:] = np.asarray(output.forecast)
        spent_on = np.asarray(output.seconds).tolist()
        self.tally += np.asarray(output.tally)
        tops = None
        for sequence, row, epoch in flight.running:
            if sequence.epoch != epoch:
                continue
            count = int(counts[row])
            self.known[row] = lengths[row]
            self.ahead[row] -= flight.steps
            sequence.spent = spent_on[row]
            first = 0
            if sequence.replayed < sequence.replay:
                first = min(count, sequence.replay - sequence.replayed)
                sequence.replayed += first
            if sequence.job.alternatives is not None:
                tops = tops or tuple(np.asarray(x) for x in output.likeliest)
                top = tuple(x[first:, row] for x in tops)
            else:
                top = None
            if count > first:
                column, total = measures[:, first:, row], None if first else sums[:, row]
                settled = sequence.extend(tokens[row][first:count], column, total, top)
                self._enter(sequence, settled, tokens[row][first:count], output, now)
            if not sequence.ended and status[row] != RUNNING:
                self.end(
                    sequence, FINISH_REASONS[status[row]], NOT_NUMBERS if status[row] == FAILED else None
                )
        self.observer.launched(flight.width, steps, counts, measures, spent)

    def _enter(
        self, sequence: Sequence, settled: list[Token], tokens: list[int], output: Output, now: float
    ) -> None:
        """A sequence has new tokens: hand out those that are settled, and see whether it has ended."""
        grammar, transcript = sequence.job.grammar, sequence.transcript
        if grammar is not None and transcript.finish_reason is None:
            settled += grammars.follow(sequence, grammar, tokens[0])
        if sequence.first_token is None:
            sequence.first_token = now
        self.observer.emitted(sequence, len(tokens), now)
        sequence.last_token = now
        if transcript.finish_reason is not None:
            self._remember(sequence, output)
            self._vacate(sequence)
            self._close(sequence, settled)
        elif settled:
            self._tell(sequence, sequence.delta(settled, cached_tokens=sequence.cached_tokens))

    def _remember(self, sequence: Sequence, output: Output) -> None:
        """Let the prefix cache keep what was generated, for a prompt that continues this text."""
        if sequence.replays(self.exact) or self.pages.prefix is None:
            return  # these pages are not what reading the text would make of it
        size = self.sizes.page_size
        text = (*sequence.prompt, *sequence.generated)[:-1]
        known = sequence.prompt_keys
        keys = [*known, *extend(known[-1] if known else ROOT, text[len(known) * size :], size)]
        self.pages.learn(sequence.row, keys, np.asarray(output.table)[sequence.row], self.edits)

    def _close(self, sequence: Sequence, tokens: list[Token], timed_out: bool = False) -> None:
        sequence.stage = ENDED
        delta = sequence.delta(tokens, timed_out=timed_out)
        self.finished(sequence)
        self.observer.finished(sequence, delta)
        self._tell(sequence, delta)
