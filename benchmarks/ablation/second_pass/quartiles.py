"""Prediction of a pass's harm by a signal: mean KL by quartile of the signal, with intervals over texts."""

from typing import Any

import numpy as np

from ...harness.intervals import TAILS, Interval, resampled
from .record import DENSE, Passes

SIGNALS = ("cheap pass", "dense pass", "step before", "cheap pass, shuffled", "step before, shuffled")


def signals(passes: Passes, cheap: str, seed: int = 0) -> dict[str, np.ndarray]:
    """H₁ by the names of `SIGNALS`, `[texts, steps − 1]`: the first step has no step before it.

    Args:
        passes: what was recorded.
        cheap: the name of the first pass of a step.
        seed: the seed of the signals that are shuffled between the steps of each text.
    """
    entropy, dense = passes.entropy[cheap][:, 1:], passes.entropy[DENSE]
    rng = np.random.default_rng(seed)
    shuffled = [rng.permuted(x, axis=1) for x in (entropy, dense[:, :-1])]
    return dict(zip(SIGNALS, (entropy, dense[:, 1:], dense[:, :-1], *shuffled), strict=True))


def by_quartile(divergence: np.ndarray, signal: np.ndarray) -> dict[str, Any]:
    """The mean divergence in each quartile of the signal, and the highest quartile's over the lowest's.

    Quartiles are those of all steps. Intervals are of a bootstrap over texts.

    Args:
        divergence: KL of each step, nats, `[texts, steps]`.
        signal: the signal of each step, of the same shape.

    Returns:
        `means`, four intervals, and `ratio`, an interval.
    """
    quartile = np.searchsorted(np.quantile(signal, (0.25, 0.5, 0.75)), signal, side="right")
    member = quartile[None] == np.arange(4)[:, None, None]
    count, total = member.sum(2), np.where(member, divergence[None], 0.0).sum(2)  # [4, texts]
    mean = total.sum(1) / count.sum(1)
    weights = resampled(len(divergence))
    means = (weights @ total.T) / np.maximum(weights @ count.T, 1)  # [resamples, 4]
    ratios = means[:, 3] / np.maximum(means[:, 0], 1e-12)
    ratio = Interval(float(mean[3] / mean[0]), *map(float, np.quantile(ratios, TAILS)))
    intervals = [
        Interval(float(value), *map(float, np.quantile(column, TAILS)))
        for value, column in zip(mean, means.T, strict=True)
    ]
    return {"means": intervals, "ratio": ratio}


def correlation(divergence: np.ndarray, signal: np.ndarray) -> float:
    """Spearman's correlation of the divergence with the signal, over all steps."""
    from scipy import stats

    return float(stats.spearmanr(divergence.ravel(), signal.ravel()).statistic)
