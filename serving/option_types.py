"""Types of command-line options: conversions from text that say what is accepted. For argparse."""

import argparse
from collections.abc import Callable
from typing import Any

from entropic_jax.parameter_table import LARGEST_INT, Number


def number(accepts: Number) -> Callable[[str], Any]:
    """The conversion to a number that is accepted."""

    def convert(text: str) -> Any:
        if accepts.auto and text == "auto":
            return text
        try:
            return accepts.check("", accepts.kind(text))
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {accepts}; got {text}") from None

    return convert


positive = number(Number(int, 1, LARGEST_INT))
"""The conversion to an integer of at least 1."""
