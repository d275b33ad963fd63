"""KV compression of prompts: when each row is due, and how many positions it has lost."""

from collections.abc import Sequence as Seq

import numpy as np

from entropic_jax.methods.policies import CompressionPolicy

from .block_manager import BlockManager
from .device_state import DeviceState
from .programs import Programs
from .sequence import DECODE, Sequence


class KVCompression:
    """Compresses the KV cache of each prompt once, some steps after its prefill."""

    def __init__(self, rows: int, compression: CompressionPolicy | None) -> None:
        self.compression = compression
        self.num_evicted = np.zeros(rows, np.int64)  # positions of a row's text that are not in its cache

    def admit(self, sequence: Sequence) -> None:
        """Take note of a sequence that has just got a row."""
        self.num_evicted[sequence.row] = 0
        sequence.compression_pending = sequence.private_pages and self.compression is not None

    def _steps_left(self, sequence: Sequence) -> int:
        return 0 if self.compression is None else self.compression.delay - sequence.num_scheduled

    def limit_steps(self, running: Seq[Sequence], steps: int) -> int:
        """At most `steps`, and no more than may run before a sequence is due."""
        return min([steps, *(self._steps_left(s) for s in running if s.compression_pending)])

    def due(self, sequences: Seq[Sequence | None]) -> list[Sequence]:
        """The sequences to compress now."""
        return [
            s
            for s in sequences
            if s is not None and s.compression_pending and s.stage == DECODE and self._steps_left(s) <= 0
        ]

    def compress(
        self,
        programs: Programs,
        device_state: DeviceState,
        sequences: Seq[Sequence | None],
        block_manager: BlockManager,
    ) -> DeviceState:
        """Compress the sequences that are due and free their pages.

        Args:
            programs: compiled programs.
            device_state: consumed.
            sequences: by row, None for a free one; none that is due may be in flight.
            block_manager: notified of the pages that become free.
        """
        for sequence in self.due(sequences):
            sequence.compression_pending = False
            device_state, counts = programs.compress(device_state, sequence.row)
            pages, self.num_evicted[sequence.row] = np.asarray(counts)
            block_manager.shrink(sequence.row, int(pages))
        return device_state
