"""Workload of the ablation: the subject model with its calibration, and held-out text."""

from pathlib import Path

import numpy as np

from entropic_jax import models
from entropic_jax.analysis.ablation import Subject
from entropic_jax.analysis.studies import Workload
from entropic_jax.calibration import load_calibration
from entropic_jax.control.entropy_drop import AR1
from entropic_jax.methods.presets import Gains


def load_workload(folder: Path, texts: list[str]) -> Workload:
    """A model, the gains of its calibration, and texts as tokens."""
    model = models.load(folder, "float32")
    assert model.tokenizer is not None
    calibration = load_calibration(folder)
    prior = AR1(calibration.mean, calibration.scale, calibration.correlation)
    gains = Gains(
        target_entropy=calibration.target_entropy,
        low_entropy=calibration.low_entropy,
        high_entropy=calibration.high_entropy,
        prior=prior,
    )
    stream = np.array([token for text in texts for token in model.tokenizer.encode(text)])
    size = sum(len(text.encode()) for text in texts)
    subject = Subject(model.decoder, model.params, calibration.temperature)
    return Workload(subject, stream, size / len(stream), gains)
