"""Macro: in which order sequences are served, and which gives way, by entropic priority or by arrival."""

import itertools
import math
import time
from collections.abc import Iterable

import numpy as np

from entropic_jax.control.entropy_drop import AR1, new_predictor, predicted_drop
from entropic_jax.control.scheduling import SMALLEST_LOAD, Scheduling

from .sequence import Sequence


class Ranking:
    """Orders sequences: by the number that a job states first, then by π (or, `fcfs`, by arrival).

        π = clip(E[ΔH⁺] / max(α C + β M + γ slack, 0.05), 0, B) + a · rounds waited

    C is what is left to compute of a sequence, in tokens to generate (`Sequence.left`), M the memory that it
    may come to hold, both relative to the largest at hand; slack is the share of its time to the deadline
    that is left, 1 without one. E[ΔH⁺] of a sequence that has not begun is that of the prior, so among those
    the short and the urgent come first. A round is as many admissions as there are rows: with the ageing, a
    sequence waits at most B/a + ⌈n/c⌉ rounds, n being those that wait and c the rows. The gains are those of
    `Scheduling`. So that a stated priority starves nobody either, a job counts as one more important for
    every B/a rounds it waits.
    """

    def __init__(self, policy: str, prior: AR1) -> None:
        self.policy, self.law = policy, Scheduling(width=1)
        self.drop = float(predicted_drop(new_predictor(1), prior)[0])  # of a sequence without a token
        self.longest = 0.0  # rounds that a sequence has waited for its first row, at most
        self.crowd = 0  # sequences that have waited at once, at most

    def rank(self, sequences: Iterable[Sequence], rounds: float, drops: np.ndarray) -> list[Sequence]:
        """The sequences, the first to be served first; each is told its π. `drops` are E[ΔH⁺] of the rows."""
        ordered = list(sequences)
        if not ordered:
            return ordered
        score = self.priorities(ordered, rounds, drops).tolist()
        for sequence, priority in zip(ordered, score, strict=True):
            sequence.priority = priority
        risen = lambda s: s.engine_request.priority - s.waited(rounds) * self.law.ageing // self.law.bound
        if self.policy == "fcfs":
            return sorted(ordered, key=lambda s: (risen(s), s.arrival))
        return sorted(ordered, key=lambda s: (risen(s), -s.priority, s.arrival))

    def first_row(self, sequence: Sequence, rounds: float, waiting: int) -> None:
        """A sequence, one of so many that wait, gets its first row: note how long it has waited."""
        self.longest = max(self.longest, sequence.waited(rounds))
        self.crowd = max(self.crowd, waiting)

    def longest_allowed(self, rows: int) -> float:
        """Rounds that no sequence may have waited longer than: B/a + ⌈n/c⌉."""
        return self.law.bound / self.law.ageing + math.ceil(self.crowd / rows)

    def priorities(self, sequences: list[Sequence], rounds: float, drops: np.ndarray) -> np.ndarray:
        """π of each, in nats per unit of load."""
        law, now = self.law, time.perf_counter()
        rows = ((s.left, s.most, s.slack(now), s.waited(rounds), s.row) for s in sequences)
        flat = np.fromiter(itertools.chain.from_iterable(rows), float).reshape(-1, 5)
        left, size, slack, waited, row = flat.T
        known = np.append(drops, self.drop)
        drop = known[np.where(row >= 0, row, len(drops)).astype(int)]
        load = law.cost * left / max(left.max(), 1) + law.memory * size / max(size.max(), 1)
        load = np.maximum(load + law.slack * slack, SMALLEST_LOAD)
        return np.clip(drop / load, 0.0, law.bound) + law.ageing * waited
