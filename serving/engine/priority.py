"""Ranking of sequences, for admission and preemption: by entropic priority, predicted work, or arrival."""

import itertools
import math
import time
from collections.abc import Iterable

import jax
import numpy as np

from entropic_jax.control.entropy_drop import AR1, new_predictor, predicted_drop
from entropic_jax.control.scheduling import UNKNOWN_END, RowLoad, Scheduling, relative_load

from ..executable_cache import load_or_compile
from .sequence import Sequence
from .work_prediction import WorkPrediction


def _prior_drop(prior: AR1) -> jax.Array:
    """E[ΔH⁺] of a sequence before its first token, nats."""
    return predicted_drop(new_predictor(1), prior)[0]


class Ranking:
    """Orders sequences by the priority their requests state, then by policy.

    The policy `entropic` takes the highest π first, `predicted` the least predicted work (`WorkPrediction`),
    `fcfs` the earliest arrival.

    π is that of `control.scheduling.priority` with the gains of `Scheduling`. The cost C of a sequence is the
    work left to compute (`Sequence.remaining_work`), M the memory that it may come to hold, both relative to
    the largest among those ranked; slack is the fraction of its time to the deadline that is left. E[ΔH⁺] of
    a sequence that has not begun is that of the prior, so short and urgent ones come first among those.

    Waits are counted in rounds, of as many admissions as there are rows. With ageing a sequence waits at most
    B/a + ⌈n/c⌉ rounds, for n waiting sequences and c rows. So that stated priorities starve nobody either, a
    request counts as one more important for every B/a rounds it waits. Under `predicted`, those that have
    waited B/a rounds come first, in order of arrival, which gives the same bound.
    """

    def __init__(self, policy: str, prior: AR1) -> None:
        """`policy` is "entropic", "predicted" or "fcfs"; `prior` describes H₁ before the first token."""
        self.policy, self.law = policy, Scheduling(width=1)
        self.ageing, self.bound = float(self.law.ageing), float(self.law.bound)
        self.prior_drop = float(load_or_compile(_prior_drop, (prior,))[0](prior))
        self.work_prediction = WorkPrediction()
        self.longest_wait = 0.0  # rounds that a sequence has waited for its first row, at most
        self.most_waiting = 0  # sequences that have waited at once, at most

    def rank(self, sequences: Iterable[Sequence], rounds: float, expected_drop: np.ndarray) -> list[Sequence]:
        """The sequences, the first to be served first; sets `Sequence.entropic_priority` of each to its π.

        Args:
            sequences: the sequences to rank.
            rounds: number of admission rounds so far.
            expected_drop: E[ΔH⁺] of each row, nats.
        """
        ordered = list(sequences)
        if not ordered:
            return ordered
        priorities = self.priorities(ordered, rounds, expected_drop).tolist()
        for sequence, priority in zip(ordered, priorities, strict=True):
            sequence.entropic_priority = priority

        def stated(sequence: Sequence) -> float:
            promotions = sequence.rounds_waited(rounds) * self.ageing // self.bound
            return sequence.engine_request.priority - promotions

        if self.policy == "predicted":
            overdue = np.array([s.rounds_waited(rounds) * self.ageing >= self.bound for s in ordered])
            ordered = [ordered[place] for place in self.work_prediction.order(ordered, overdue)]
            return sorted(ordered, key=stated)
        if self.policy == "fcfs":
            return sorted(ordered, key=lambda s: (stated(s), s.arrival_time))
        return sorted(ordered, key=lambda s: (stated(s), -s.entropic_priority, s.arrival_time))

    def note_first_row(self, sequence: Sequence, rounds: float, num_waiting: int) -> None:
        """Record how long a sequence has waited for its first row, and that it begins.

        Args:
            sequence: the sequence that gets its first row.
            rounds: number of admission rounds so far.
            num_waiting: sequences that waited, this one included.
        """
        self.longest_wait = max(self.longest_wait, sequence.rounds_waited(rounds))
        self.most_waiting = max(self.most_waiting, num_waiting)
        self.work_prediction.note_first_row(sequence)

    def longest_allowed(self, rows: int) -> float:
        """Rounds that no sequence may have waited longer than: B/a + ⌈n/c⌉."""
        return self.bound / self.ageing + math.ceil(self.most_waiting / rows)

    def priorities(self, sequences: list[Sequence], rounds: float, expected_drop: np.ndarray) -> np.ndarray:
        """π of each sequence, float64, in nats per unit of load.

        Args:
            sequences: the sequences to rank.
            rounds: number of admission rounds so far.
            expected_drop: E[ΔH⁺] of each row, nats.
        """
        timestamp = time.perf_counter()
        columns = (
            (s.remaining_work, s.max_length, s.slack(timestamp), s.rounds_waited(rounds), s.row)
            for s in sequences
        )
        table = np.fromiter(itertools.chain.from_iterable(columns), float).reshape(-1, 5)
        work, length, slack, wait, row = table.T
        cost, memory = relative_load(work, length, np)
        load = RowLoad(
            cost=cost,
            memory=memory,
            slack=slack,
            expected_end=length,
            true_end=np.full(len(sequences), UNKNOWN_END),
            arrival=np.arange(len(sequences)),
        )
        drops = np.append(expected_drop, self.prior_drop)
        drop = drops[np.where(row >= 0, row, len(expected_drop)).astype(int)]
        return self.law.priority(drop, load, wait, xp=np)
