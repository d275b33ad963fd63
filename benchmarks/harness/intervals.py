"""Areas under ROC curves and shares, with 95 % intervals over texts: tokens of a text are not independent."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

RESAMPLES = 2000
LEVELS = 1024  # of a score, that a resampled area tells apart
TAILS = 0.025, 0.975


class Interval(NamedTuple):
    """A value and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """The probability that a positive case has a higher score than a negative one; ties count half.

    Args:
        scores: float `[cases]`.
        positive: bool `[cases]`.

    >>> auc(np.array([1.0, 2.0, 3.0, 2.0]), np.array([False, False, True, True]))
    0.875
    """
    number, others = int(positive.sum()), int((~positive).sum())
    if not number or not others:
        return float("nan")
    ranks = stats.rankdata(scores)
    return float((ranks[positive].sum() - number * (number + 1) / 2) / (number * others))


def auc_interval(scores: Sequence[np.ndarray], positive: Sequence[np.ndarray], seed: int = 0) -> Interval:
    """The area over the cases of all texts, and its interval by a bootstrap over texts.

    Args:
        scores: float `[cases]` of each text.
        positive: bool `[cases]` of each text.
        seed: the seed of the resampling.
    """
    pooled = np.concatenate(list(scores))
    value = auc(pooled, np.concatenate(list(positive)))
    if np.isnan(value) or len(scores) < 2:
        return Interval(value, float("nan"), float("nan"))
    edges = np.unique(np.quantile(pooled, np.linspace(0, 1, LEVELS + 1)[1:-1]))
    counts = np.zeros((2, len(scores), len(edges) + 1))
    for text, (values, flags) in enumerate(zip(scores, positive, strict=True)):
        level = np.searchsorted(edges, values, side="left")
        for flag in (0, 1):
            counts[flag, text] = np.bincount(level[flags == bool(flag)], minlength=len(edges) + 1)
    weights = resampled(len(scores), seed)
    negatives, positives = weights @ counts[0], weights @ counts[1]
    below = np.cumsum(negatives, 1) - negatives / 2
    pairs = positives.sum(1) * negatives.sum(1)
    areas = (positives * below).sum(1)[pairs > 0] / pairs[pairs > 0]
    return Interval(value, *map(float, np.quantile(areas, TAILS)))


def share_interval(hits: Sequence[float], cases: Sequence[float]) -> Interval:
    """A share over the cases of all texts, with Wilson's interval for as many cases as theirs are worth.

    The variance of the share between texts, over that of independent cases, is the design effect (Kish 1965);
    cases count as their number divided by it.

    Args:
        hits: the number of each text.
        cases: the number of each text, among which the hits are.
    """
    h, n = np.asarray(hits, float), np.asarray(cases, float)
    total = n.sum()
    if not total:
        return Interval(float("nan"), float("nan"), float("nan"))
    share, texts = h.sum() / total, int((n > 0).sum())
    independent = share * (1 - share) / total
    effect = 1.0
    if texts > 1 and independent > 0:
        between = texts / (texts - 1) * ((h - share * n) ** 2).sum() / total**2
        effect = max(1.0, between / independent)
    worth, z = total / effect, float(stats.norm.ppf(TAILS[1]))
    middle = (share + z * z / (2 * worth)) / (1 + z * z / worth)
    reach = z / (1 + z * z / worth) * np.sqrt(share * (1 - share) / worth + z * z / (4 * worth * worth))
    return Interval(float(share), float(max(0.0, middle - reach)), float(min(1.0, middle + reach)))


def ratio_interval(above: Sequence[float], below: Sequence[float], seed: int = 0) -> Interval:
    """The quotient of two sums over texts, and its interval by a bootstrap over texts.

    Args:
        above: the terms of the numerator, one a text.
        below: the terms of the denominator.
        seed: the seed of the resampling.
    """
    a, b = np.asarray(above, float), np.asarray(below, float)
    value = float(a.sum() / b.sum())
    if len(a) < 2:
        return Interval(value, float("nan"), float("nan"))
    weights = resampled(len(a), seed)
    return Interval(value, *map(float, np.quantile((weights @ a) / (weights @ b), TAILS)))


def resampled(texts: int, seed: int = 0) -> np.ndarray:
    """How often each text is drawn in each resample, int `[resamples, texts]`."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(texts, np.full(texts, 1 / texts), RESAMPLES)
