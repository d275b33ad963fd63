"""Prompts as engines read them."""

import numpy as np


def distinct(prompts: np.ndarray) -> np.ndarray:
    """The first row alone if all rows of `[rows, context]` are the same, else all of them."""
    return prompts[:1] if (prompts == prompts[0]).all() else prompts
