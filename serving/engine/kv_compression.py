"""Prompts that are compressed once they are read: when it is time, and what each row has lost by it."""

from collections.abc import Sequence as Seq

import numpy as np

from entropic_jax.methods.policies import CompressionPolicy

from .block_manager import BlockManager
from .device_state import DeviceState
from .programs import Programs
from .sequence import DECODE, Sequence


class KVCompression:
    """The rows whose prompts are still to be compressed, and those that are."""

    def __init__(self, rows: int, compression: CompressionPolicy | None) -> None:
        self.compression = compression
        self.evicted = np.zeros(rows, np.int64)  # positions of a row's text that are not in the cache

    def place(self, sequence: Sequence) -> None:
        """A sequence has a row, and nothing in it is compressed."""
        self.evicted[sequence.row] = 0
        sequence.pending = sequence.private and self.compression is not None

    def _left(self, sequence: Sequence) -> int:
        """Steps for which it has the whole of its prompt."""
        return 0 if self.compression is None else self.compression.delay - sequence.num_scheduled

    def steps(self, running: Seq[Sequence], most: int) -> int:
        """How many steps may run before a prompt is due, `most` at most."""
        return min([most, *(self._left(s) for s in running if s.pending)])

    def due(self, slots: Seq[Sequence | None]) -> list[Sequence]:
        """Those whose time has come."""
        return [s for s in slots if s is not None and s.pending and s.stage == DECODE and self._left(s) <= 0]

    def compress(
        self,
        programs: Programs,
        device_state: DeviceState,
        slots: Seq[Sequence | None],
        block_manager: BlockManager,
    ) -> DeviceState:
        """Compress those that are due, of which nothing may be under way; the account of pages follows."""
        for sequence in self.due(slots):
            sequence.pending = False
            device_state, found = programs.compress(device_state, sequence.row)
            held, self.evicted[sequence.row] = np.asarray(found)
            block_manager.shrink(sequence.row, int(held))
        return device_state
