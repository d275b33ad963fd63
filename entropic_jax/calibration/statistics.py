"""Calibration statistics: fits T_cal to a text and measures what the set-points of the laws derive from."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import entropy
from ..state.decoder import Decoder
from .record import LEVELS, Calibration
from .teacher_forcing import split_sequences, teacher_forced
from .temperature import expected_calibration_error, fit_temperature

LOW, MIDDLE, HIGH = (LEVELS.index(level) for level in (0.25, 0.5, 0.75))
MIN_TOKENS = 64  # fewer give no useful statistics
MIN_THRESHOLD_WIDTH = 1e-3  # nats between `low_entropy` and `high_entropy`
HIGHEST_CORRELATION = 0.999


class _TokenStatistics(NamedTuple):
    """Per-token statistics under softmax(z) and under softmax(z / T_cal); each array `[tokens]`."""

    plain_entropy: Any
    entropy: Any
    varentropy: Any
    loss: Any
    calibrated_loss: Any
    confidence: Any
    calibrated_confidence: Any
    correct: Any


@jax.jit
def _token_statistics(logits: jax.Array, tokens: jax.Array, temperature: jax.Array) -> _TokenStatistics:
    token, scaled = jnp.maximum(tokens, 0), logits / temperature
    plain, belief = entropy.entropy_statistics(logits), entropy.entropy_statistics(scaled)
    return _TokenStatistics(
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
    on_progress: Callable[[int], object] = lambda count: None,
) -> Calibration:
    """Calibrates a model on token sequences that it was not trained on.

    No page is pruned meanwhile.

    Args:
        decoder: the model's functions.
        params: the model's parameters.
        sequences: token ids.
        context: most positions that the model attends to; longer sequences are split.
        tokens: most tokens to predict, each of them twice; None is all.
        on_progress: called with the number of tokens just processed.

    Raises:
        ValueError: for fewer than 64 tokens to predict.
    """
    cut_sequences = split_sequences(sequences, context, tokens)
    total = sum(len(piece) - 1 for piece in cut_sequences)
    if total < MIN_TOKENS:
        raise ValueError(
            f"sequences must have at least {MIN_TOKENS} tokens to predict (all but the first of each); "
            f"got {total}"
        )

    def batches() -> Iterator[tuple[int, jax.Array, np.ndarray]]:
        for number, logits, targets in teacher_forced(decoder, params, cut_sequences):
            yield number, logits, targets
            on_progress(int((targets >= 0).sum()))

    temperature = fit_temperature((logits, targets) for _, logits, targets in batches())
    parts: list[list[_TokenStatistics]] = [[] for _ in cut_sequences]
    for number, logits, targets in batches():
        batch_statistics = jax.device_get(
            _token_statistics(logits, jnp.asarray(targets), jnp.float32(temperature))
        )
        parts[number].append(_TokenStatistics(*(np.asarray(x)[targets >= 0] for x in batch_statistics)))
    entropy_series = [np.concatenate([part.entropy for part in piece]).astype(np.float64) for piece in parts]
    rows = [part for piece in parts for part in piece]
    all_tokens = _TokenStatistics(*(np.concatenate(column) for column in zip(*rows, strict=True)))
    quantiles = tuple(float(x) for x in np.quantile(all_tokens.entropy, LEVELS))
    mean, scale, correlation = autoregression(entropy_series)
    return Calibration(
        temperature=temperature,
        tokens=total,
        loss=float(all_tokens.loss.mean(dtype=np.float64)),
        calibrated_loss=float(all_tokens.calibrated_loss.mean(dtype=np.float64)),
        error=expected_calibration_error(all_tokens.confidence, all_tokens.correct),
        calibrated_error=expected_calibration_error(all_tokens.calibrated_confidence, all_tokens.correct),
        quantiles=quantiles,
        plain_quantiles=tuple(float(x) for x in np.quantile(all_tokens.plain_entropy, LEVELS)),
        varentropy_quantiles=tuple(float(x) for x in np.quantile(all_tokens.varentropy, LEVELS)),
        target_entropy=quantiles[MIDDLE],
        low_entropy=quantiles[LOW],
        high_entropy=max(quantiles[HIGH], quantiles[LOW] + MIN_THRESHOLD_WIDTH),
        mean=mean,
        scale=scale,
        correlation=correlation,
    )


def autoregression(series: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """Fits one AR(1) process to all series by least squares: mean μ, innovation scale σ, correlation ρ.

        x[t+1] − μ = ρ (x[t] − μ) + σ · noise

    Pairs are taken within a series only. ρ is clipped to [−0.999, 0.999], and 0 for constant series.
    """
    mean = float(np.concatenate(series).mean())
    before = np.concatenate([x[:-1] for x in series]) - mean
    after = np.concatenate([x[1:] for x in series]) - mean
    power = float(before @ before)
    correlation = float(before @ after) / power if power > 0 else 0.0
    correlation = float(np.clip(correlation, -HIGHEST_CORRELATION, HIGHEST_CORRELATION))
    rest = after - correlation * before
    return mean, float(np.sqrt(np.mean(rest * rest))) if rest.size else 0.0, correlation
