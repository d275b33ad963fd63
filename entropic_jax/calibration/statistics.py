"""From text to a calibration: fit, then measure what the controllers' set-points are derived from."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import entropy
from ..loop import Decoder
from .record import LEVELS, Calibration
from .teacher_forcing import pieces, teacher_forced
from .temperature import expected_calibration_error, fit_temperature

LOW, MIDDLE, HIGH = (LEVELS.index(level) for level in (0.25, 0.5, 0.75))
LEAST_TOKENS = 64  # fewer say nothing
LEAST_WIDTH = 1e-3  # nats between the thresholds of pruning
HIGHEST_CORRELATION = 0.999


class _Measures(NamedTuple):
    """Of each token, under softmax(z) and under softmax(z / T_cal)."""

    plain_entropy: Any
    entropy: Any
    varentropy: Any
    loss: Any
    calibrated_loss: Any
    confidence: Any
    calibrated_confidence: Any
    correct: Any


@jax.jit
def _measure(logits: jax.Array, tokens: jax.Array, temperature: jax.Array) -> _Measures:
    token, scaled = jnp.maximum(tokens, 0), logits / temperature
    plain, belief = entropy.entropy_statistics(logits), entropy.entropy_statistics(scaled)
    return _Measures(
        plain_entropy=plain.entropy,
        entropy=belief.entropy,
        varentropy=belief.varentropy,
        loss=entropy.surprisal(logits, token, plain.log_normaliser),
        calibrated_loss=entropy.surprisal(scaled, token, belief.log_normaliser),
        confidence=jnp.exp(logits.max(-1) - plain.log_normaliser),
        calibrated_confidence=jnp.exp(scaled.max(-1) - belief.log_normaliser),
        correct=jnp.take_along_axis(logits, token[:, None], 1)[:, 0] >= logits.max(-1),
    )


def calibrate(
    decoder: Decoder,
    params: Any,
    sequences: Sequence[Sequence[int]],
    *,
    context: int,
    tokens: int | None = None,
    advance: Callable[[int], object] = lambda count: None,
) -> Calibration:
    """Calibrate a model on token sequences that it was not trained on.

    `context` is the most positions the model attends to: a longer sequence is cut. At most `tokens` are
    predicted, twice; `advance` is told how many were just done. Reads with nothing pruned, at temperature 1
    and T_cal. Raises ValueError where fewer than 64 tokens are to be predicted.
    """
    cut = pieces(sequences, context, tokens)
    total = sum(len(piece) - 1 for piece in cut)
    if total < LEAST_TOKENS:
        raise ValueError(
            f"sequences have {total} tokens to predict; accepted are at least {LEAST_TOKENS}, all but the "
            "first of each"
        )

    def batches() -> Iterator[tuple[int, jax.Array, np.ndarray]]:
        for number, logits, wanted in teacher_forced(decoder, params, cut):
            yield number, logits, wanted
            advance(int((wanted >= 0).sum()))

    temperature = fit_temperature((logits, wanted) for _, logits, wanted in batches())
    parts: list[list[_Measures]] = [[] for _ in cut]
    for number, logits, wanted in batches():
        measures = jax.device_get(_measure(logits, jnp.asarray(wanted), jnp.float32(temperature)))
        parts[number].append(_Measures(*(np.asarray(x)[wanted >= 0] for x in measures)))
    along = [np.concatenate([part.entropy for part in piece]).astype(np.float64) for piece in parts]
    rows = [part for piece in parts for part in piece]
    every = _Measures(*(np.concatenate(column) for column in zip(*rows, strict=True)))
    quantiles = tuple(float(x) for x in np.quantile(every.entropy, LEVELS))
    mean, scale, correlation = autoregression(along)
    return Calibration(
        temperature=temperature,
        tokens=total,
        loss=float(every.loss.mean(dtype=np.float64)),
        calibrated_loss=float(every.calibrated_loss.mean(dtype=np.float64)),
        error=expected_calibration_error(every.confidence, every.correct),
        calibrated_error=expected_calibration_error(every.calibrated_confidence, every.correct),
        quantiles=quantiles,
        plain_quantiles=tuple(float(x) for x in np.quantile(every.plain_entropy, LEVELS)),
        varentropy_quantiles=tuple(float(x) for x in np.quantile(every.varentropy, LEVELS)),
        target_entropy=quantiles[MIDDLE],
        low_entropy=quantiles[LOW],
        high_entropy=max(quantiles[HIGH], quantiles[LOW] + LEAST_WIDTH),
        mean=mean,
        scale=scale,
        correlation=correlation,
    )


def autoregression(series: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """Mean μ, scale σ of the innovations and correlation ρ of one AR(1) for all series, by least squares.

        x[t+1] − μ = ρ (x[t] − μ) + σ · noise

    Neighbours are taken within a series only. ρ is held in [−0.999, 0.999], and 0 where nothing varies.
    """
    mean = float(np.concatenate(series).mean())
    before = np.concatenate([x[:-1] for x in series]) - mean
    after = np.concatenate([x[1:] for x in series]) - mean
    power = float(before @ before)
    correlation = float(before @ after) / power if power > 0 else 0.0
    correlation = float(np.clip(correlation, -HIGHEST_CORRELATION, HIGHEST_CORRELATION))
    rest = after - correlation * before
    return mean, float(np.sqrt(np.mean(rest * rest))) if rest.size else 0.0, correlation
