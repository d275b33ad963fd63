"""Temperature scaling: fits the belief temperature T_cal in one pass over logits; calibration error."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import entropy

BINS = 15
GRID = np.exp2(np.arange(-8, 9) / 2)  # 1/T, from 1/16 to 16

Batch = tuple[jax.Array | np.ndarray, jax.Array | np.ndarray]
"""Logits float32 `[n, vocabulary]` and the tokens int32 `[n]` that they predict; −1 for padding."""


@jax.jit
def _slopes(logits: jax.Array, tokens: jax.Array, temperatures: jax.Array) -> jax.Array:
    known, token = tokens >= 0, jnp.maximum(tokens, 0)

    def at(temperature):
        tempered = entropy.at_temperature(logits, temperature)
        loss = entropy.surprisal(logits / temperature, token, tempered.log_normaliser)
        terms = jnp.stack([loss - tempered.entropy, tempered.varentropy])
        return jnp.where(known, terms, 0.0).sum(-1)

    return jax.lax.map(at, temperatures)


def fit_temperature(batches: Iterable[Batch]) -> float:
    """Fits T_cal, the temperature at which softmax(z / T) gives held-out tokens the highest likelihood.

        d NLL / d ln(1/T) = Σ (−ln p(token) − H_T),   d² NLL / d ln(1/T)² = the same + Σ V_T

    In the calibrated model, the mean surprisal equals the mean entropy. The loss is convex in 1/T. One pass
    suffices and no logits are kept: slope and curvature are summed at 17 temperatures, √2 apart, and the root
    is that of their cubic interpolant, about 1e-4 off.

    Args:
        batches: logits, and the tokens that they predict.

    Returns:
        T_cal in [1/16, 16], the nearer end where the minimum lies outside.

    Raises:
        ValueError: without tokens, or if a token has no finite loss.

    >>> logits = 2 * jnp.log(jnp.array([[0.75, 0.25]] * 4))  # twice too sure
    >>> round(fit_temperature([(logits, jnp.array([0, 0, 0, 1]))]), 3)
    2.0
    """
    sums, tokens = np.zeros((len(GRID), 2)), 0
    temperatures = jnp.asarray(1 / GRID, jnp.float32)
    for logits, targets in batches:
        targets = jnp.asarray(targets, jnp.int32)
        sums += np.asarray(_slopes(jnp.asarray(logits, jnp.float32), targets, temperatures), np.float64)
        tokens += int((targets >= 0).sum())
    if tokens == 0:
        raise ValueError("batches must hold at least one token; got none")
    if not np.isfinite(sums).all():
        raise ValueError("batches must give every target a finite loss; got a logit of −∞ or NaN")
    slope, variance = sums.T / tokens
    return float(np.exp(-_root(np.log(GRID), slope, slope + variance)))


def _root(x: np.ndarray, value: np.ndarray, slope: np.ndarray) -> float:
    """The root of an increasing function, by the cubic between the two points around it."""
    if value[0] >= 0 or value[-1] <= 0:
        return float(x[0] if value[0] >= 0 else x[-1])
    right = int(np.flatnonzero(value > 0)[0])
    left, width = right - 1, x[right] - x[right - 1]

    def cubic(t: float) -> float:
        h = (1 + 2 * t) * (1 - t) ** 2, t * t * (3 - 2 * t)
        steep = t * (1 - t) ** 2 * slope[left] - t * t * (1 - t) * slope[right]
        return h[0] * value[left] + h[1] * value[right] + width * steep

    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if cubic(middle) < 0 else (low, middle)
    return float(x[left] + width * (low + high) / 2)


def expected_calibration_error(confidence: Any, correct: Any, bins: int = BINS) -> float:
    """Expected calibration error: mean distance between confidence in the likeliest token and accuracy.

        Σ_b (n_b / n) |mean confidence of b − share correct in b|

    Bins hold equally many tokens. With bins of equal width, most tokens of a language model share one.

    Args:
        confidence: probability of the likeliest token, `[n]`, in [0, 1].
        correct: bool `[n]`.
        bins: number of bins.

    Returns:
        The error, in [0, 1].

    Raises:
        ValueError: for no tokens, or shapes that differ.

    >>> round(expected_calibration_error([0.9] * 4, [True, True, True, False], bins=1), 3)
    0.15
    """
    confidence, correct = np.asarray(confidence, np.float64), np.asarray(correct, np.float64)
    if confidence.size == 0 or confidence.shape != correct.shape:
        raise ValueError(
            "confidence and correct must have one shape [n], n ≥ 1; "
            f"got {confidence.shape} and {correct.shape}"
        )
    parts = np.array_split(np.argsort(confidence, kind="stable"), bins)
    distance = sum(abs((confidence[part] - correct[part]).sum()) for part in parts)
    return float(distance / confidence.size)
