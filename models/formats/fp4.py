"""FP4 (E2M1): two 4-bit floats to a byte, the first in the low bits; and exponents E8M0 as scales.

Source: OCP Microscaling Formats (MX) Specification 1.0 (2023), sections 5.3 and 5.4.
"""

import numpy as np

from .stored import FLOAT8_VALUES

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array([*MAGNITUDES, *(-x for x in MAGNITUDES)], np.float32)
PAIRS = np.stack([VALUES[np.arange(256) & 15], VALUES[np.arange(256) >> 4]], axis=-1)  # of every byte
POWERS = FLOAT8_VALUES["F8_E8M0"]  # 2^(code − 127)


def decode(packed: np.ndarray) -> np.ndarray:
    """The floats in bytes `[..., n]`, float32 `[..., 2n]`.

    >>> decode(np.array([0x2F], np.uint8)).tolist()
    [-6.0, 1.0]
    """
    return PAIRS[packed].reshape(*packed.shape[:-1], -1)
