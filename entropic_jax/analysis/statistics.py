"""Means with their uncertainty, and configurations compared pair by pair."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

Rows = list[dict[str, Any]]


class Estimate(NamedTuple):
    """A mean, the ends of its 95 % interval, and how likely chance alone strays as far from 0."""

    mean: float
    low: float
    high: float
    p: float


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and interval by Student's t over independent values; fewer than two have no interval.

    >>> [round(x, 3) for x in estimate([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484, 0.074]
    """
    from scipy import stats

    x = np.asarray(values, float)
    mean = float(x.mean())
    if len(x) < 2:
        return Estimate(mean, math.nan, math.nan, math.nan)
    error = float(x.std(ddof=1)) / math.sqrt(len(x))
    if error == 0:
        return Estimate(mean, mean, mean, 1.0 if mean == 0 else 0.0)
    reach = float(stats.t.ppf(0.975, len(x) - 1)) * error
    return Estimate(mean, mean - reach, mean + reach, float(2 * stats.t.sf(abs(mean) / error, len(x) - 1)))


def compared(rows: Rows, base: Rows, field: str, *keys: str) -> Estimate:
    """The change of a field against the baseline, in per cent, over pairs that agree in `keys`.

    Ratios are averaged as logarithms, so that a change and its inverse cancel.

    Args:
        rows: measurements.
        base: measurements of the baseline.
        field: name of the value that is compared, above 0.
        *keys: names of the fields that a pair has in common.
    """
    known = {tuple(r[k] for k in keys): r[field] for r in base}
    pairs = [(r[field], known.get(tuple(r[k] for k in keys))) for r in rows]
    change = estimate([math.log(value / other) for value, other in pairs if value > 0 and other])
    return _percent(change)


def differences(rows: Rows, base: Rows, field: str, *keys: str) -> Estimate:
    """The difference of a field from the baseline, in its own unit, over pairs that agree in `keys`.

    Args:
        rows: measurements.
        base: measurements of the baseline.
        field: name of the value that is compared.
        *keys: names of the fields that a pair has in common.
    """
    known = {tuple(r[k] for k in keys): r[field] for r in base}
    return estimate([r[field] - known[tuple(r[k] for k in keys)] for r in rows])


def _percent(logarithm: Estimate) -> Estimate:
    """A change in per cent, of one that is a logarithm."""
    mean, low, high, p = logarithm
    percent = lambda x: 100 * math.expm1(x)
    return Estimate(percent(mean), percent(low), percent(high), p)


def beyond_product(rows: Rows, field: str, combined: str, parts: Sequence[str], *keys: str) -> Estimate:
    """By how many per cent `combined` gains more than the product of what `parts` gain, over `off`.

    Above 0 the scales help one another, below they overlap.

    Args:
        rows: measurements of all presets, `off` among them.
        field: name of the value, above 0.
        combined: name of the preset that combines the parts.
        parts: names of the presets that it combines.
        *keys: names of the fields that measurements to be compared have in common.
    """
    by_name = {name: {_values(r, keys): r[field] for r in group} for (name,), group in split(rows, "preset")}
    excess = []
    for compared, base in by_name["off"].items():
        gain = lambda name: math.log(by_name[name][compared] / base)
        if all(compared in by_name[name] for name in (combined, *parts)):
            excess.append(gain(combined) - sum(map(gain, parts)))
    result = estimate(excess)
    return _percent(result)


def split(rows: Rows, *keys: str) -> Iterable[tuple[tuple[Any, ...], Rows]]:
    """Rows grouped by some of their fields, in the order of their first appearance."""
    groups: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        groups.setdefault(_values(row, keys), []).append(row)
    yield from groups.items()


def _values(row: dict[str, Any], keys: Iterable[str]) -> tuple[Any, ...]:
    """Some of the fields of a row."""
    return tuple(row[key] for key in keys)


def middle(rows: Rows, field: str) -> float:
    """The median of a field over rows."""
    return statistics.median(r[field] for r in rows)


def mean(rows: Rows, field: str) -> float:
    """The mean of a field over rows."""
    return statistics.fmean(r[field] for r in rows)


def rate(rows: Rows, above: str, below: str) -> float:
    """The quotient of two sums.

    Args:
        rows: measurements.
        above: name of the field that is summed in the numerator.
        below: name of the field that is summed in the denominator.
    """
    return sum(r[above] for r in rows) / max(sum(r[below] for r in rows), 1e-30)


def worded(value: Estimate, digits: int = 1) -> str:
    """`+0.4 (+0.1 … +0.7)`, with a star where p < 0.05."""
    if math.isnan(value.low):
        return f"{value.mean:+.{digits}f}"
    star = " *" if value.p < 0.05 else ""
    return f"{value.mean:+.{digits}f} ({value.low:+.{digits}f} … {value.high:+.{digits}f}){star}"


def spread(value: Estimate, digits: int = 3) -> str:
    """`1.23 ± 0.04`."""
    reach = value.high - value.mean
    return f"{value.mean:.{digits}f}" + (f" ± {reach:.{digits}f}" if reach > 0 else "")
