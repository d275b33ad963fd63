"""Logits on which estimators of entropy are compared: Zipf–Mandelbrot, normal, and of a model."""

from pathlib import Path

import numpy as np

from entropic_jax import models
from entropic_jax.calibration import split_sequences, teacher_forced

TOKENS_EACH = 256  # read of a text, from its beginning


def zipf(vocabulary: int, rows: int) -> np.ndarray:
    """Zipf–Mandelbrot laws, p ∝ (rank + offset)^−s, s in [0.5, 3]; float32 `[rows, vocabulary]`."""
    random = np.random.default_rng(0)
    power, offset = random.uniform(0.5, 3, (rows, 1)), random.exponential(3, (rows, 1))
    return (-power * np.log(1 + random.permutation(vocabulary) + offset)).astype(np.float32)


def normal(vocabulary: int, rows: int) -> np.ndarray:
    """Independent normal logits with deviations from 0.5 to 8."""
    random = np.random.default_rng(1)
    scale = np.geomspace(0.5, 8, rows, dtype=np.float32)[:, None]
    return scale * random.standard_normal((rows, vocabulary), np.float32)


def model_logits(directory: Path, texts: list[Path], tokens: int) -> np.ndarray:
    """Logits of a model over the beginnings of texts.

    Args:
        directory: the directory of the model.
        texts: files to read.
        tokens: how many positions in all.

    Returns:
        float32 `[positions, vocabulary]`.
    """
    model = models.load(directory)
    if model.tokenizer is None:
        raise SystemExit(f"--model must be a directory with tokenizer.json; got {directory}")
    sequences = [model.tokenizer.encode(path.read_text("utf-8")) for path in texts]
    pieces = split_sequences([sequence[: TOKENS_EACH + 1] for sequence in sequences], TOKENS_EACH, tokens)
    forced = teacher_forced(model.decoder, model.params, pieces)
    return np.concatenate([np.asarray(logits)[targets >= 0] for _, logits, targets in forced])
