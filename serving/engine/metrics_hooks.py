"""Metrics hooks of the engine: methods that do nothing, for a subclass to override and count."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .interface import Delta
    from .sequence import Sequence


class MetricsHooks:
    """Called by the engine's thread between launches, so whatever a hook does delays every request.

    Times are those of `time.perf_counter`.
    """

    def admitted(self, sequence: "Sequence") -> None:
        """A sequence left the queue for the first time, between `arrival_time` and `admitted_time`."""

    def emitted(self, sequence: "Sequence", tokens: int, timestamp: float) -> None:
        """A sequence has new tokens.

        Args:
            sequence: its `last_token_time` is that of the tokens before, None at first.
            tokens: how many are new.
            timestamp: the timestamp of these tokens, seconds of `time.perf_counter`.
        """

    def preempted(self, sequence: "Sequence") -> None:
        """A sequence lost its row and will come back."""

    def finished(self, sequence: "Sequence", delta: "Delta") -> None:
        """A sequence has finished; the delta has its reason, usage and summary."""

    def launched(
        self, width: int, steps: int, num_tokens: np.ndarray, metrics: np.ndarray, seconds: float
    ) -> None:
        """A launch has been collected.

        Args:
            width: rows that each step computed.
            steps: steps that ran.
            num_tokens: int `[rows]`, tokens that each row emitted.
            metrics: float32 `[len(TRACE_FIELDS), steps, rows]`; those of row r are `[:, :num_tokens[r], r]`.
            seconds: wall time of the launch.
        """
