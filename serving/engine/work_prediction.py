"""Prediction of the work of sequences from what is known before they begin, learned from recent ones."""

import threading
from collections import deque
from collections.abc import Iterable

import numpy as np

from entropic_jax.control.length_prediction import LengthModel, fit_recent_lengths, serving_order

from .sequence import Sequence

RECENT = 128  # sequences that are learned from
FEATURES = ("prompt_tokens", "max_tokens")
NATURAL_ENDS = ("stop", "length")  # other reasons leave the work unfinished


class _Recent:
    """A sequence of late: its features, and its work as far as that is known."""

    __slots__ = ("complete", "features", "sequence", "work")

    def __init__(self, sequence: Sequence) -> None:
        self.sequence: Sequence | None = sequence  # None once it has ended
        self.features = _features(sequence)
        self.work, self.complete = 0.0, False

    def refresh(self) -> bool:
        """Take over the work done; whether the sequence has ended since the last call."""
        if self.sequence is None:
            return False
        self.work = self.sequence.work_done
        if not self.sequence.ended:
            return False
        self.complete = self.sequence.transcript.finish_reason in NATURAL_ENDS
        self.sequence = None
        return True


class WorkPrediction:
    """Orders sequences by predicted work: highest Gittins index first, or by arrival where nothing is known.

    The work of a sequence is counted in decode steps, to which prefill of a token adds a quarter of one and
    accepted drafts add none. It is predicted from the prompt's length and `max_tokens` by a model of the
    sequences that got a row last, see `control.length_prediction`. The order is that of arrival until 32 of
    them have ended, and where features explain less than a tenth of the variance of ln work: lengths that
    vary little, or limits that say nothing. Entropy is no feature: none is known before a sequence begins.
    """

    def __init__(self) -> None:
        self.recent: deque[_Recent] = deque(maxlen=RECENT)
        self.model: LengthModel | None = None
        self._lock = threading.Lock()  # the engine's thread learns, others ask for the remaining work

    def note_first_row(self, sequence: Sequence) -> None:
        """Learn from this sequence from now on."""
        with self._lock:
            self.recent.append(_Recent(sequence))

    def order(self, sequences: list[Sequence], overdue: np.ndarray) -> np.ndarray:
        """The order in which to serve sequences, int `[sequences]`, the first first.

        Args:
            sequences: the sequences to order.
            overdue: bool `[sequences]`, those that have waited too long; they come first, by arrival.
        """
        with self._lock:
            model = self._refreshed()
        arrival = np.array([s.arrival_time for s in sequences])
        if model is None:
            return np.lexsort((arrival, ~overdue))
        features = _columns(_features(s) for s in sequences)
        age = np.array([s.work_done for s in sequences])
        return serving_order(model, features, age, arrival, overdue, preemptive=False)

    def remaining(self, sequences: list[Sequence]) -> np.ndarray:
        """The expected work that is left of each sequence, in decode steps, `[sequences]`, from any thread.

        Until 32 sequences have ended, it is what the mean of those that have leaves. It is never above what
        `max_tokens` allows, which is also the answer before any has ended.
        """
        with self._lock:
            model = self._refreshed()
            complete = [entry.work for entry in self.recent if entry.complete]
        most = np.array([s.remaining_work for s in sequences], float)
        if not sequences or not complete:
            return most
        age = np.array([s.work_done for s in sequences])
        if model is None:
            return np.clip(np.mean(complete) - age, np.minimum(1.0, most), most)
        return np.minimum(model.forecast(_columns(_features(s) for s in sequences), age).remaining, most)

    def _refreshed(self) -> LengthModel | None:
        """The model of all that has ended. The caller holds the lock."""
        if sum(entry.refresh() for entry in self.recent):
            self._fit()
        return self.model

    def _fit(self) -> None:
        work = np.array([entry.work for entry in self.recent])
        complete = np.array([entry.complete for entry in self.recent])
        features = _columns(entry.features for entry in self.recent)
        self.model = fit_recent_lengths(features, work, complete, FEATURES)


def _features(sequence: Sequence) -> tuple[int, int]:
    return len(sequence.prompt), sequence.request.max_tokens


def _columns(rows: Iterable[tuple[int, int]]) -> dict[str, np.ndarray]:
    return dict(zip(FEATURES, np.array(list(rows), float).T, strict=True))
