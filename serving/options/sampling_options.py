"""Sampling parameters on the command line: one option for each of `SamplingParams`."""

import argparse
from typing import Any

from entropic_jax.parameter_tables.sampling_params import DEVICE, HOST, SamplingParams, normal_seed
from entropic_jax.parameter_tables.table import (
    Flag,
    Number,
    Parameter,
    ParameterError,
    Strings,
    TokenBiases,
    TokenIds,
    parameters_of,
)

from .option_types import number, string

OPTIONS = parameters_of(SamplingParams, (DEVICE, HOST))
"""The parameters that have an option; the others are for an answer that the command line does not write."""


def add_arguments(group: argparse._ActionsContainer) -> None:
    """Declare an option for each parameter. None stands for one that is not given."""
    for line in OPTIONS:
        flag = f"--{line.name.replace('_', '-')}"
        accepts, text = line.accepts, _help(line)
        if isinstance(accepts, Flag):
            group.add_argument(flag, action="store_true", default=None, help=text)
        elif isinstance(accepts, Number):
            metavar = "INT" if accepts.kind is int else "FLOAT"
            group.add_argument(flag, type=number(accepts), metavar=metavar, help=text)
        elif isinstance(accepts, Strings):
            kind = string(accepts.length)
            group.add_argument(flag, action="append", type=kind, metavar="TEXT", help=f"{text}; repeatable")
        elif isinstance(accepts, TokenIds):
            group.add_argument(flag, action="append", type=_token, metavar="ID", help=f"{text}; repeatable")
        else:
            assert isinstance(accepts, TokenBiases)
            text = f"{text}; repeatable"
            group.add_argument(flag, action="append", type=_bias, metavar="ID=VALUE", help=text)


def read(options: argparse.Namespace) -> dict[str, Any]:
    """The parameters that the command line gives, by name, checked; a seed of -1 is left out."""
    values = {line.name: value for line in OPTIONS if (value := getattr(options, line.name)) is not None}
    if "logit_bias" in values:
        tokens = [token for token, _ in values["logit_bias"]]
        if repeated := [token for token in tokens if tokens.count(token) > 1]:
            message = f"logit_bias must state each token once; got {repeated[0]} twice"
            raise ParameterError(message, "logit_bias")
        values["logit_bias"] = dict(values["logit_bias"])
    for line in OPTIONS:
        if line.name in values:
            line.accepts.check(line.name, values[line.name])
    if "seed" in values and normal_seed(values["seed"]) is None:
        del values["seed"]
    return values


def _help(line: Parameter) -> str:
    """The help of an option, with its default unless that is what the text calls off."""
    text = line.help.replace("%", "%%")
    if line.name == "temperature":
        return f"{text} (default: the model's, or {line.default:g})"
    return f"{text} (default: {line.default})" if line.name == "max_tokens" else text


def _token(text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) < 20:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a token id; got {text[:60]}")


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be ID=VALUE, as 17=-2.5; got {text}") from None
