"""Types of command-line options: conversions from text that say what is accepted. For argparse."""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from entropic_jax.parameter_tables.table import LARGEST_INT, Number, ParameterError, short

WITHOUT_OPTION = ("prompt",)  # may come from elsewhere, and is then not called by its option


def message_of(error: ParameterError, options: argparse.Namespace) -> str:
    """The message of an error, with the options of the command line in place of parameters' names.

    The parameter at fault begins the message. Other names are replaced where they are no plain words, or
    stand before " = ". Names without an option stay, and so does a message without a parameter at fault.

    >>> flags = ("--speculate", "--temperature", "--highest-temperature", "--lowest-temperature")
    >>> text = "lowest_temperature must be at most temperature = 0.7 while highest_temperature is 0; got 2"
    >>> message_of(ParameterError(text, "lowest_temperature"), argparse.Namespace(flags=flags))
    '--lowest-temperature must be at most --temperature = 0.7 while --highest-temperature is 0; got 2'
    >>> error = ParameterError("enable_lora must be off with several devices; got True", "enable_lora")
    >>> message_of(error, argparse.Namespace(flags=("--enable-lora",)))
    '--enable-lora must be off with several devices; got --enable-lora'
    """
    text, param = str(error), error.param
    if param is None:
        return text
    names = [flag.removeprefix("--").replace("-", "_") for flag in options.flags if flag.startswith("--")]
    if param in names and (param not in WITHOUT_OPTION or getattr(options, param, None) is not None):
        text = re.sub(rf"^{re.escape(param)}\b", _flag, text)
        text = re.sub(r"(?<=; got )(True|False)$", lambda match: _stated(param, names, match[0]), text)
    compound = "|".join(name for name in names if "_" in name)
    text = re.sub(rf"""(?<![-\w./'"])({compound})\b(?![./'"])""", _flag, text) if compound else text
    return re.sub(rf"(?<![-\w.])({'|'.join(names)})(?= = )", _flag, text)


def _stated(param: str, names: Sequence[str], value: str) -> str:
    """How the command line states a parameter that is true or false."""
    if value == "True":
        return f"--{param.replace('_', '-')}"
    return f"--no-{param.replace('_', '-')}" if f"no_{param}" in names else f"no --{param.replace('_', '-')}"


def _flag(match: re.Match[str]) -> str:
    return f"--{match[0].replace('_', '-')}"


class Several(argparse.Action):
    """Collects the values of an option that may be repeated; the first ones replace its default."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Add values to those that the command line has stated before."""
        stated = getattr(namespace, self.dest)
        # `extend` of argparse would add to the default, which may come from a file.
        before = () if stated is self.default else stated
        setattr(namespace, self.dest, [*before, *values])


def number(accepts: Number) -> Callable[[str], Any]:
    """The conversion to a number that is accepted."""
    required = accepts._replace(optional=False)  # a command line leaves an option out

    def convert(text: str) -> Any:
        if accepts.auto and text == "auto":
            return text
        try:
            return accepts.check("", accepts.kind(text))
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {required}; got {text}") from None

    return convert


def path(text: str) -> Path:
    """The conversion to a path, which an empty string is not."""
    if text:
        return Path(text)
    raise argparse.ArgumentTypeError(f"must be a path; got {text!r}")


def string(length: int) -> Callable[[str], str]:
    """The conversion to a string of 1 to `length` characters."""

    def convert(text: str) -> str:
        if 0 < len(text) <= length:
            return text
        raise argparse.ArgumentTypeError(f"must be a string of 1 to {length} characters; got {short(text)}")

    return convert


POSITIVE, BYTES = Number(int, 1, LARGEST_INT), Number(int, 1, 2**63 - 1)
positive = number(POSITIVE)
"""The conversion to an integer of at least 1."""
num_bytes = number(BYTES)
"""The conversion to a size in bytes."""
ROWS = Number(int, 1, 4096)
DEFAULT_ROWS = 64  # sequences that an engine runs at once
"""Sequences that run at once: far more than a device serves well."""
