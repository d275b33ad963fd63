"""Calibration: the temperature at which a model's confidence is right, and the set-points that follow.

A text is read once to fit T_cal and once to measure under it; of the first pass only sums are kept, of the
second a few numbers per token. What was found is a small JSON beside the model; without one, T_cal is 1.

Sources: temperature scaling and the expected calibration error, Guo, Pleiss, Sun and Weinberger 2017
(arXiv 1706.04599); bins of equal mass, Nixon et al. 2019 (arXiv 1904.01685).
Differs from Kiruluta 2026 (arXiv 2603.03310), which takes the logits for calibrated and its set-points as
given.
"""

from .record import FILE, LEVELS, Calibration, load_calibration, save_calibration
from .statistics import autoregression, calibrate
from .teacher_forcing import pieces, teacher_forced
from .temperature import expected_calibration_error, fit_temperature

__all__ = [
    "FILE",
    "LEVELS",
    "Calibration",
    "autoregression",
    "calibrate",
    "expected_calibration_error",
    "fit_temperature",
    "load_calibration",
    "pieces",
    "save_calibration",
    "teacher_forced",
]
