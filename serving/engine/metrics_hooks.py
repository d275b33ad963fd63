"""What the engine tells whoever counts: methods that do nothing, to be overridden."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .interface import Delta
    from .sequence import Sequence


class MetricsHooks:
    """Called by the engine's thread, between launches: what is done here delays everyone.

    Times are those of `time.perf_counter`.
    """

    def admitted(self, sequence: "Sequence") -> None:
        """A job left the queue for the first time: it waited from `sequence.arrival` to `.admitted`."""

    def emitted(self, sequence: "Sequence", tokens: int, now: float) -> None:
        """A sequence has new tokens; `sequence.last_token` is the time of those before, None at first."""

    def preempted(self, sequence: "Sequence") -> None:
        """A sequence lost its row and will come back."""

    def finished(self, sequence: "Sequence", delta: "Delta") -> None:
        """A job has ended; the delta has its reason, usage and summary."""

    def launched(
        self, width: int, steps: int, counts: np.ndarray, metrics: np.ndarray, seconds: float
    ) -> None:
        """A launch of `width` rows ran `steps` steps in so many seconds.

        Row r emitted `counts[r]` tokens; `measures[m, :counts[r], r]` are theirs, m as in
        `transcript.TRACE_FIELDS`, entropies in nats, cost in roofline seconds.
        """
