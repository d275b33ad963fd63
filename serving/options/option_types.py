"""Types of command-line options: conversions from text that say what is accepted. For argparse."""

import argparse
import re
from collections.abc import Callable
from typing import Any

from entropic_jax.parameter_tables.control_gains import GAINS
from entropic_jax.parameter_tables.table import LARGEST_INT, Number, ParameterError

PROCESSES = ("coordinator_address", "num_processes", "process_id")
NAMES_IN_PROSE = (  # which are no plain words
    *(name for name in GAINS if "_" in name),
    "scheduling_policy",
    *PROCESSES,
)


def message_of(error: ParameterError, options: argparse.Namespace) -> str:
    """The message of an error, with the options of the command line in place of parameters' names."""
    text, param = str(error), error.param
    if param is None or getattr(options, param, None) is None:
        return text
    flag = lambda match: f"--{match[0].replace('_', '-')}"
    return re.sub(rf"^{re.escape(param)}\b|(?<!-)\b({'|'.join(NAMES_IN_PROSE)})\b", flag, text)


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
