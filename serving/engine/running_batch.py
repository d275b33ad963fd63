"""Running batch: which sequence has which row, how far each row is, and the deltas to be delivered."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..request.transcript import Token
from .block_manager import BlockManager
from .interface import Delta
from .kv_compression import KVCompression
from .launch_planner import InFlight, LaunchPlanner
from .metrics_hooks import MetricsHooks
from .output_stream import QueuedOutputStream, wake
from .sequence import DECODE, ENDED, PREFILL, WAITING, Sequence
from .state_updates import StateUpdates


class RunningBatch:
    """The sequences that have a row. Arrays have one entry a row."""

    def __init__(
        self,
        rows: int,
        block_manager: BlockManager,
        updates: StateUpdates,
        planner: LaunchPlanner,
        kv_compression: KVCompression,
        metrics_hooks: MetricsHooks,
        expected_drop: float,
    ) -> None:
        """Start without a sequence.

        Args:
            rows: number of rows of the batch.
            block_manager: reserves pages.
            updates: collects the changes to the device state.
            planner: notified of the constraints of the rows.
            kv_compression: notified when a sequence is admitted.
            metrics_hooks: notified of each event.
            expected_drop: E[ΔH⁺] of a sequence without a token, nats.
        """
        self.block_manager, self.updates, self.planner = block_manager, updates, planner
        self.kv_compression, self.metrics_hooks = kv_compression, metrics_hooks
        self.sequences: list[Sequence | None] = [None] * rows
        self.limit = np.zeros(rows, np.int64)  # length at which the row is full
        self.length = np.zeros(rows, np.int64)  # of the text, as last collected
        self.steps_in_flight = np.zeros(rows, np.int64)  # given to the device since; each emits a token
        self.tokens_in_flight = np.zeros(rows, np.int64)  # that these steps may emit, at most
        self.prior_drop = expected_drop
        self.expected_drop = np.full(rows, expected_drop)
        self._retracted: list[Sequence] = []  # without a row since `retract`
        self.deltas: list[tuple[QueuedOutputStream, Delta]] = []
        self.on_finish: Callable[[Sequence], None] = lambda sequence: None

    @property
    def occupied(self) -> list[Sequence]:
        """Every sequence with a row."""
        return [s for s in self.sequences if s is not None]

    @property
    def free_rows(self) -> list[int]:
        """Rows without a sequence."""
        return [row for row, sequence in enumerate(self.sequences) if sequence is None]

    @property
    def prefilling(self) -> list[Sequence]:
        """Sequences in prefill."""
        return [s for s in self.occupied if s.stage == PREFILL]

    @property
    def decoding(self) -> list[Sequence]:
        """Sequences in decode that may get another token.

        One whose steps in flight fill its row has none to get, unless a search may take some back.
        """
        unfilled = self.length + self.steps_in_flight < self.limit
        return [s for s in self.occupied if s.stage == DECODE and (s.branches or unfilled[s.row])]

    @property
    def num_growing(self) -> int:
        """How many rows have fewer pages reserved than they may come to need."""
        reserved = self.block_manager.reserved * self.block_manager.page_size
        return sum(bool(reserved[s.row] < self.limit[s.row]) for s in self.occupied)

    def place(self, sequence: Sequence, row: int, limit: int) -> None:
        """Give a row to a sequence.

        Args:
            sequence: its `prefill_tokens` are set.
            row: the row that the sequence gets.
            limit: positions at which the row is full.
        """
        sequence.row, sequence.epoch = row, sequence.epoch + 1
        self.sequences[row], self.limit[row] = sequence, limit
        self.length[row] = len(sequence.prefill_tokens) - 1
        self.steps_in_flight[row] = self.tokens_in_flight[row] = 0
        self.expected_drop[row] = self.prior_drop
        self.kv_compression.admit(sequence)
        # A text that may not end before its row is full has no use for a larger number, nor room for it.
        min_tokens = min(sequence.request.min_tokens, limit + 1)
        self.planner.min_length[row] = len(sequence.prompt) + min_tokens if min_tokens else 0
        self.planner.report_logprobs[row] = sequence.logprobs is not None
        self.planner.drafts[row] = sequence.row_gains.drafts

    def reserve(self, running: list[Sequence], tokens: int) -> bool:
        """Reserve pages for that number of further tokens of each; False where the pool has no room."""
        rows = np.array([s.row for s in running])
        length = np.minimum(self.limit[rows], self.length[rows] + self.tokens_in_flight[rows] + tokens)
        length -= self.kv_compression.num_evicted[rows]
        return self.block_manager.reserve(rows, length, self.updates)

    def launched(self, running: list[Sequence], steps: int, tokens: int) -> None:
        """Take note of steps given to the device.

        Args:
            running: sequences that decode in them.
            steps: steps of the launch.
            tokens: the tokens that each sequence may emit in the steps, at most.
        """
        rows = [s.row for s in running]
        for sequence in running:
            sequence.num_scheduled += steps
        self.steps_in_flight[rows] += steps
        self.tokens_in_flight[rows] += tokens

    def collected(self, row: int, length: int, launch: InFlight) -> None:
        """Take note of the length of a row after a launch.

        Args:
            row: the row of a sequence that decoded in it.
            length: the length of its text.
            launch: the launch that has been collected.
        """
        self.length[row] = length
        self.steps_in_flight[row] -= launch.steps
        self.tokens_in_flight[row] -= launch.tokens
        if launch.program.speculates:  # its end has released the pages that drafts did not come to need
            most = min(self.limit[row], length + self.tokens_in_flight[row])
            self.block_manager.trim(row, max(length, int(most)))

    def vacate(self, sequence: Sequence) -> None:
        """Take the row and the pages from a sequence."""
        row = sequence.row
        self.updates.freed_rows.append(row)
        self.block_manager.free(row)
        self.sequences[row] = None
        self.planner.min_length[row], self.planner.report_logprobs[row] = 0, False
        sequence.row, sequence.epoch = -1, sequence.epoch + 1

    def retract(self, sequence: Sequence) -> None:
        """Take the row from a sequence whose latest tokens there were drawn under a wrong mask.

        They are not among its tokens. It waits for a row again, where it replays its tokens, and guesses no
        masks any more.
        """
        self.vacate(sequence)
        sequence.stage, sequence.plan, sequence.saved_row = WAITING, None, None
        sequence.retracted = True
        self._retracted.append(sequence)

    def take_retracted(self) -> list[Sequence]:
        """The sequences that `retract` has taken a row from since the last call."""
        retracted, self._retracted = self._retracted, []
        return retracted

    def end(self, sequence: Sequence, reason: Any, error: str | None = None, timed_out: bool = False) -> None:
        """End a sequence for a reason from outside its text, and send the tokens held back.

        Args:
            sequence: the sequence to end.
            reason: its finish reason.
            error: message of an error that ended it.
            timed_out: whether its time was up.
        """
        tokens = sequence.transcript.finish(reason, error)
        if sequence.row >= 0:
            self.vacate(sequence)
        self.finish(sequence, tokens, timed_out)

    def finish(self, sequence: Sequence, tokens: list[Token], timed_out: bool = False) -> None:
        """Send the last delta of a sequence.

        Args:
            sequence: a sequence that has no row any more.
            tokens: not sent yet.
            timed_out: whether its time was up.
        """
        sequence.stage = ENDED
        delta = sequence.delta(tokens, timed_out=timed_out)
        self.on_finish(sequence)
        self.metrics_hooks.finished(sequence, delta)
        self.send(sequence, delta)

    def send(self, sequence: Sequence, delta: Delta) -> None:
        """Keep a delta until the next `deliver`."""
        self.deltas.append((sequence.output_stream, delta))

    def deliver(self) -> None:
        """Put all deltas into their output streams and wake the readers, once for all."""
        if self.deltas:
            deltas, self.deltas = self.deltas, []
            for output_stream, delta in deltas:
                output_stream.put(delta)
            wake(output_stream for output_stream, _ in deltas)
