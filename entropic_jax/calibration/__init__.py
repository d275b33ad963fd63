"""Calibration: the belief temperature T_cal of a model, and the set-points of its control laws.

A text is read twice: once to fit T_cal and once to measure statistics under it. The first pass keeps only
sums, the second a few numbers per token. The result is a small JSON file next to the model; without one,
T_cal is 1.

Sources: temperature scaling and the expected calibration error, Guo, Pleiss, Sun and Weinberger 2017
(arXiv 1706.04599); bins of equal mass, Nixon et al. 2019 (arXiv 1904.01685).
Differs from Kiruluta 2026 (arXiv 2603.03310), which assumes calibrated logits and known set-points.
"""

from .record import FILE, LEVELS, Calibration, load_calibration, save_calibration
from .statistics import autoregression, calibrate
from .teacher_forcing import split_sequences, teacher_forced
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
    "save_calibration",
    "split_sequences",
    "teacher_forced",
]
