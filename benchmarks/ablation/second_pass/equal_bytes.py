"""Second passes against fixed ε at equal bytes, evaluated on recorded passes.

A step reads the weights and the pages of its first pass. Where H₁ of that pass is above a threshold, the row
is read again with other pages, and the weights are read a second time, once for all rows of a batch that are
read again. Both passes and the threshold are chosen on half of the texts and evaluated on the other half.

A single pass whose ε follows H₁ of the step before is compared in the same way.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...harness.intervals import TAILS, Interval, resampled
from .quartiles import signals
from .record import DENSE, Passes, Sizes

SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)  # of the steps, that are read again
AGAIN = ("cheap pass", "cheap pass, shuffled", "dense pass")  # signals of second passes
LATE = ("step before", "step before, shuffled")  # signals that a single pass can follow
LEAST = 1e-9  # nats, below which a KL is not compared


class Curve(NamedTuple):
    """Bytes and KL of a step with fixed ε, means of each text, `[ε, texts]`; the most bytes come first."""

    bytes_read: np.ndarray
    divergence: np.ndarray


class Rule(NamedTuple):
    """Two passes and the threshold of H₁ between them."""

    first: str
    second: str
    threshold: float


class Outcome(NamedTuple):
    """Bytes that a rule reads and its loss; means over the steps of each text, `[texts]`."""

    bytes_read: np.ndarray
    divergence: np.ndarray
    again: np.ndarray  # share of the steps above the threshold


class Recorded(NamedTuple):
    """Passes, and how their bytes are counted."""

    passes: Passes
    sizes: Sizes
    rows: int  # of a batch: texts that follow one another share the weights of their passes

    def fixed(self, name: str) -> Outcome:
        """A single pass at every step."""
        read, lost = (x[name][:, 1:].mean(1) for x in (self.passes.positions, self.passes.divergence))
        cost = self.sizes.weights / self.rows + self.sizes.position * read
        return Outcome(cost, lost, np.zeros_like(lost))

    def two_passes(self, rule: Rule, signal: np.ndarray) -> Outcome:
        """A first pass at every step, and a second one where the signal is above the threshold."""
        again = signal > rule.threshold
        batches = again.reshape(-1, self.rows, again.shape[1]).any(1).repeat(self.rows, 0)
        read, lost = (x for x in (self.passes.positions, self.passes.divergence))
        weights = self.sizes.weights / self.rows * (1 + batches)
        first, second = read[rule.first][:, 1:], read[rule.second][:, 1:]
        cost = weights + self.sizes.position * (first + np.where(again, second, 0.0))
        kept = np.where(again, lost[rule.second][:, 1:], lost[rule.first][:, 1:])
        return Outcome(cost.mean(1), kept.mean(1), again.mean(1))

    def single_pass(self, rule: Rule, signal: np.ndarray) -> Outcome:
        """A single pass at every step, which one of the two being decided by the signal."""
        above = signal > rule.threshold
        read, lost = (
            np.where(above, x[rule.second][:, 1:], x[rule.first][:, 1:]).mean(1)
            for x in (self.passes.positions, self.passes.divergence)
        )
        return Outcome(self.sizes.weights / self.rows + self.sizes.position * read, lost, above.mean(1))


def fixed_curve(recorded: Recorded) -> Curve:
    """Dense attention and every fixed ε."""
    names = [DENSE, *(name for name in recorded.passes.entropy if name.startswith("ε"))]
    outcomes = [recorded.fixed(name) for name in names]
    return Curve(np.stack([x.bytes_read for x in outcomes]), np.stack([x.divergence for x in outcomes]))


def at_bytes(curve_bytes: np.ndarray, curve_divergence: np.ndarray, level: float) -> float:
    """KL of fixed ε at a number of bytes: ln KL is linear between two values of ε, KL between ε and dense.

    Below the fewest bytes of the curve it is that of the largest ε, which reads more.

    Args:
        curve_bytes: from the most to the fewest, `[ε]`.
        curve_divergence: at them; 0 at the first.
        level: bytes of a step.
    """
    x, y = curve_bytes[::-1], curve_divergence[::-1]
    if level <= x[0] or level >= x[-1]:
        return float(y[0] if level <= x[0] else y[-1])
    right = int(np.searchsorted(x, level, side="right"))
    part = (level - x[right - 1]) / (x[right] - x[right - 1])
    if y[right] <= LEAST:
        return float(y[right - 1] * (1 - part))
    return float(np.exp((1 - part) * np.log(y[right - 1]) + part * np.log(y[right])))


def rules_of(recorded: Recorded, signal_name: str, texts: np.ndarray) -> list[tuple[Rule, Outcome]]:
    """Every rule: the thresholds are quantiles of the signal over some of the texts.

    Args:
        recorded: the passes.
        signal_name: a name of `AGAIN`, or of `LATE`, which choose between values of ε.
        texts: the texts that thresholds are taken from.
    """
    late = signal_name in LATE
    names = [name for name in recorded.passes.entropy if name.startswith(("ε", DENSE)) or not late]
    evaluate = recorded.single_pass if late else recorded.two_passes
    mean_read = {name: recorded.passes.positions[name].mean() for name in names}
    rules = []
    for first in names:
        signal = signals(recorded.passes, first)[signal_name]
        for second in names:
            if mean_read[second] <= mean_read[first]:
                continue
            for share in SHARES:
                rule = Rule(first, second, float(np.quantile(signal[texts], 1 - share)))
                rules.append((rule, evaluate(rule, signal)))
    return rules


def compare(recorded: Recorded, levels: list[float]) -> list[dict[str, Any]]:
    """The best rule of every signal at bytes of fixed ε, and its KL over that of fixed ε at the same bytes.

    Args:
        recorded: the passes.
        levels: bytes of a step, which a rule may not exceed on the texts that it is chosen on.

    Returns:
        A row for each level: `bytes`, `fixed` (KL), and by signal the `ratio` with its interval, the share of
        the steps read `again`, and the `rules` of both halves. A signal without a rule within the bytes is
        missing.
    """
    count = len(next(iter(recorded.passes.entropy.values())))
    number = np.arange(count)
    # Whole batches: the rows of a batch share what is chosen.
    half = (number // recorded.rows) % 2 if count >= 2 * recorded.rows else number % 2
    curve = fixed_curve(recorded)
    names = AGAIN + (LATE if recorded.rows == 1 else ())
    known = {
        name: [rules_of(recorded, name, np.flatnonzero(half == part)) for part in (0, 1)] for name in names
    }
    rows = []
    for level in levels:
        row: dict[str, Any] = {"bytes": level, "signals": {}}
        row["fixed"] = at_bytes(curve.bytes_read.mean(1), curve.divergence.mean(1), level)
        for name in names:
            chosen = [best(known[name][part], half == part, level) for part in (0, 1)]
            if chosen[0] is not None and chosen[1] is not None:
                row["signals"][name] = evaluated(curve, half, (chosen[0], chosen[1]))
        rows.append(row)
    return rows


def best(
    rules: list[tuple[Rule, Outcome]], chosen_on: np.ndarray, level: float
) -> tuple[Rule, Outcome] | None:
    """The rule of the smallest KL among those that read no more than `level`; None if all read more.

    Args:
        rules: with their outcomes.
        chosen_on: bool `[texts]`.
        level: bytes of a step.
    """
    within = [x for x in rules if x[1].bytes_read[chosen_on].mean() <= level]
    return min(within, key=lambda x: x[1].divergence[chosen_on].mean(), default=None)


def evaluated(
    curve: Curve, half: np.ndarray, chosen: tuple[tuple[Rule, Outcome], tuple[Rule, Outcome]]
) -> dict[str, Any]:
    """KL of the chosen rules over that of fixed ε at their bytes, on the texts that they were not chosen on.

    Args:
        curve: fixed ε.
        half: 0 or 1 for each text.
        chosen: the rule chosen on each half, with its outcome on all texts.
    """

    def ratio(weights: np.ndarray) -> tuple[float, float]:
        """KL of the rules over KL of fixed ε with a weight for every text; KL of fixed ε; both in sums."""
        above = below = 0.0
        for part, (_, outcome) in enumerate(chosen):
            w = weights * (half != part)
            total = w.sum()
            if not total:
                continue
            level = float(w @ outcome.bytes_read) / total
            lost = at_bytes(curve.bytes_read @ w / total, curve.divergence @ w / total, level)
            above += float(w @ outcome.divergence)
            below += lost * total
        return above / max(below, LEAST), below / weights.sum()

    value, fixed = ratio(np.ones(len(half)))
    ratios = np.array([ratio(w.astype(float))[0] for w in resampled(len(half))])
    again = [float(outcome.again[half != part].mean()) for part, (_, outcome) in enumerate(chosen)]
    return {
        "ratio": Interval(value, *map(float, np.quantile(ratios, TAILS))),
        "fixed": fixed,
        "again": float(np.mean(again)),
        "rules": [f"{rule.first} → {rule.second}" for rule, _ in chosen],
    }


def most_again(recorded: Recorded, level: float) -> float:
    """The largest share of steps that a single row can read again, densely, within a number of bytes a step.

    Negative where the cheapest first pass alone reads more.

    Args:
        recorded: the passes.
        level: bytes of a step.
    """
    least = min(recorded.fixed(name).bytes_read.mean() for name in recorded.passes.entropy)
    return float((level - least) / recorded.fixed(DENSE).bytes_read.mean())


def summary(recorded: Recorded, names: Sequence[str]) -> dict[str, Any]:
    """`compare` at the bytes of fixed ε.

    Args:
        recorded: the passes.
        names: those of the passes with a fixed ε whose bytes are compared at.

    Returns:
        `dense` (bytes of a dense step) and `levels`: a row of `compare` for each ε, with its name, and
        `most_again` where a batch is one row.
    """
    levels = [float(recorded.fixed(name).bytes_read.mean()) for name in names]
    rows = compare(recorded, levels)
    for name, row in zip(names, rows, strict=True):
        row["name"] = name
        if recorded.rows == 1:
            row["most_again"] = most_again(recorded, row["bytes"])
    return {"dense": float(recorded.fixed(DENSE).bytes_read.mean()), "levels": rows}
