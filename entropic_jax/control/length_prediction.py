"""Length prediction: how many tokens a request is still likely to generate, and in what order to serve.

A request that has generated a tokens has the predicted length L = exp(w·x + e), given L > a. The features x
are known while it runs; the residuals e are those of recent requests, so the hazard of an end follows from
them at every age. Pure NumPy, on the host.

Sources: Gittins 1979, *Bandit processes and dynamic allocation indices*, for the index; Aalto, Ayesta and
Righter 2009, *On the Gittins index in the M/G/1 queue*, for its use on lengths.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

FEATURES = ("prompt_tokens", "max_tokens", "recent_length", "mean_entropy")
NUM_RESIDUALS = 32  # quantiles that stand for the distribution of e
FEWEST_FITTED = 32  # recent requests that have ended, from which weights are fitted to them
FEWEST_ENDED = 16  # recent requests that have ended, from which residuals replace those of the calibration
SMALLEST_VARIANCE = 0.1  # of w·x over the runnable requests, from which the features tell them apart
LARGEST_LIGHT_TAIL = 1.2  # squared coefficient of variation of exp(e); 1 is that of an exponential law
LARGEST_UNEXPLAINED = 0.9  # of the variance of ln L, by which a prediction still counts
ROUNDING = 1e-9  # of variances
SHORTEST_HORIZON = 0.25  # of the age
LN2 = float(np.log(2))
LARGEST_EXPONENT = 30.0


class Forecast(NamedTuple):
    """Predictions for each request; each `[requests]`."""

    remaining: np.ndarray  # E[L − a | L > a], tokens
    gittins_index: np.ndarray  # completions per token of work, at best; the highest should run
    explained: float  # variance of w·x over the requests
    tail: (
        float  # squared coefficient of variation of exp(e): above 1, the older a request, the longer it stays
    )


@dataclasses.dataclass(frozen=True)
class LengthModel:
    """A log-linear model of the length with an empirical distribution of residuals.

    Args:
        weights: the weights of the constant and of the logarithm of each of `names`.
        residuals: ascending quantiles of ln L less its prediction.
        names: features in use, some of `FEATURES`.
    """

    weights: np.ndarray
    residuals: np.ndarray
    names: tuple[str, ...] = FEATURES

    def log_length(self, features: Mapping[str, np.ndarray]) -> np.ndarray:
        """w·x of each request, `[requests]`. Each feature is `[requests]` and above −1."""
        return _design(features, self.names) @ self.weights

    def forecast(self, features: Mapping[str, np.ndarray], age: np.ndarray) -> Forecast:
        """Remaining length and Gittins index of each request.

            index = max over atoms l of  P(L ≤ l | L > a) / E[max(min(L, l) − a, a/4) | L > a]

        Args:
            features: by name, each `[requests]`.
            age: a, tokens generated so far, `[requests]`.

        A request older than every atom is expected to double its length.
        """
        center = self.log_length(features)
        exponent = np.clip(center[:, None] + self.residuals, 0.0, LARGEST_EXPONENT)
        atoms = np.exp(exponent)  # ascending, since the residuals are
        age = np.asarray(age, float)[:, None]
        left = np.maximum(atoms - age, 0.0)
        alive = left > 0
        count = alive.sum(1)
        position = np.cumsum(alive, 1)
        # Between two atoms the hazard is unknown: no horizon is shorter than a quarter of the age.
        horizon = np.where(alive, np.maximum(left, SHORTEST_HORIZON * age), 0.0)
        # Of the atoms above a, the first k have ended by the k-th, the others have worked as long as it.
        worked = np.cumsum(horizon, 1) + horizon * (count[:, None] - position)
        with np.errstate(divide="ignore", invalid="ignore"):
            index = np.where(alive, position / worked, 0.0).max(1)
            remaining = left.sum(1) / count
        outlived = count == 0
        index = np.where(outlived, 1 / np.maximum(age[:, 0], 1.0), index)
        remaining = np.where(outlived, np.maximum(age[:, 0], 1.0), remaining)
        factor = np.exp(np.clip(self.residuals, -LARGEST_EXPONENT, LARGEST_EXPONENT))
        tail = float(factor.var() / factor.mean() ** 2)
        return Forecast(remaining, index, float(center.var()), tail)

    def updated(
        self, features: Mapping[str, np.ndarray], age: np.ndarray, ended: np.ndarray
    ) -> "LengthModel":
        """The model with the residuals of recent requests; unchanged if fewer than 16 have ended.

        Where the prediction explains less than a tenth of the variance of ln L among those that have ended,
        it is dropped: all weights become 0.

        Requests that have not ended count as censored at their age (Kaplan–Meier), since under any order but
        that of arrival those that have ended are mostly short.

        Args:
            features: the features of all recent requests, by name, each `[requests]`.
            age: tokens generated so far, `[requests]`.
            ended: bool `[requests]`; `age` is then the length.
        """
        if ended.sum() < FEWEST_ENDED:
            return self
        begun, logarithm = np.asarray(age) > 0, np.log(np.maximum(age, 1))
        residual, weights = logarithm - self.log_length(features), self.weights
        if residual[ended].var() > LARGEST_UNEXPLAINED * logarithm[ended].var() - ROUNDING:
            residual, weights = logarithm, np.zeros_like(weights)
        quantiles = censored_quantiles(residual[begun], ended[begun])
        return dataclasses.replace(self, weights=weights, residuals=quantiles)


def censored_quantiles(values: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """`NUM_RESIDUALS` quantiles of the Kaplan–Meier estimate; what is never seen to end has the value + ln 2.

    Args:
        values: ln of a length, or of an age, less a prediction, `[requests]`.
        ended: bool `[requests]`, whether the value is that of a length; the others are lower bounds.

    >>> censored_quantiles(np.array([0.0, 1.0]), np.array([True, True]))[[0, -1]].tolist()
    [0.0, 1.0]
    """
    order = np.lexsort((~ended, values))  # of equal values, an end comes before a lower bound
    values, ended = values[order], ended[order]
    at_risk = len(values) - np.arange(len(values))
    survival = np.cumprod(np.where(ended, 1 - 1 / at_risk, 1.0))
    points = (np.arange(NUM_RESIDUALS) + 0.5) / NUM_RESIDUALS
    place = np.searchsorted(1 - survival, points - 1e-12)
    return np.append(values, values[-1] + LN2)[place]


def fit_length_model(
    features: Mapping[str, np.ndarray], lengths: np.ndarray, names: tuple[str, ...] = FEATURES
) -> LengthModel:
    """Fit ln L by ridge regression on the logarithms of the features.

    Args:
        features: by name, each `[requests]`; unnamed ones are ignored.
        lengths: tokens generated, at least 1, `[requests]`.
        names: features to use.

    Raises:
        ValueError: for fewer than two requests.

    >>> x = {"max_tokens": np.array([8, 16, 32, 64.0])}
    >>> model = fit_length_model(x, x["max_tokens"] / 2, ("max_tokens",))
    >>> model.forecast(x, np.zeros(4)).remaining.round(1).tolist()
    [4.1, 7.9, 15.8, 32.2]
    """
    if len(lengths) < 2:
        raise ValueError(f"lengths must have at least 2 entries; got {len(lengths)}")
    design, target = _design(features, names), np.log(np.asarray(lengths, float))
    penalty = 1e-2 * np.eye(design.shape[1])
    penalty[0, 0] = 0.0
    weights = np.linalg.solve(design.T @ design + penalty, design.T @ target)
    return LengthModel(weights, _quantiles(target - design @ weights), names)


def fit_recent_lengths(
    features: Mapping[str, np.ndarray], age: np.ndarray, ended: np.ndarray, names: tuple[str, ...]
) -> LengthModel | None:
    """A length model that knows recent requests alone; None before 32 of them have ended.

    The weights are those of the requests that have ended. An order by features selects them by these, which
    does not bias a regression on the same features. The residuals are as in `LengthModel.updated`.

    Args:
        features: the features of all recent requests, by name, each `[requests]`.
        age: work done so far, `[requests]`.
        ended: bool `[requests]`; `age` is then the length.
        names: features to use.
    """
    if ended.sum() < FEWEST_FITTED:
        return None
    kept = {name: np.asarray(features[name])[ended] for name in names}
    model = fit_length_model(kept, np.maximum(np.asarray(age)[ended], 1), names)
    return model.updated(features, age, ended)


def serving_order(
    model: LengthModel,
    features: Mapping[str, np.ndarray],
    age: np.ndarray,
    arrival: np.ndarray,
    overdue: np.ndarray | Any = False,
    preemptive: bool = True,
) -> np.ndarray:
    """The order in which to serve requests: highest Gittins index first, or first come, first served.

    The guard: if the features hardly tell the requests apart and the tail of the residuals is no heavier than
    about that of an exponential law, no order gains anything over that of arrival, and time slicing loses
    much; so it is first come, first served. Without preemption, a heavy tail is no reason either: requests
    that have not begun differ in their features alone.

    Args:
        model: the model of the lengths.
        features: by name, each `[requests]`.
        age: tokens generated, `[requests]`.
        arrival: serial number or time of each request, `[requests]`.
        overdue: bool `[requests]`, requests that have waited too long; they come first, by arrival.
        preemptive: whether the order may take a place from a request that runs.

    Returns:
        Indices of the requests, the first to be served first.
    """
    forecast = model.forecast(features, age)
    overdue = np.broadcast_to(overdue, len(arrival))
    sliced = preemptive and forecast.tail > LARGEST_LIGHT_TAIL
    useful = sliced or forecast.explained >= SMALLEST_VARIANCE
    index = forecast.gittins_index if useful else np.zeros(len(arrival))
    return np.lexsort((arrival, np.where(overdue, 0.0, -index), ~overdue))


def _design(features: Mapping[str, np.ndarray], names: tuple[str, ...]) -> np.ndarray:
    columns = [np.log1p(np.asarray(features[name], float)) for name in names]
    return np.stack([np.ones(len(next(iter(features.values())))), *columns], 1)


def _quantiles(residuals: np.ndarray) -> np.ndarray:
    return np.quantile(residuals, (np.arange(NUM_RESIDUALS) + 0.5) / NUM_RESIDUALS)
