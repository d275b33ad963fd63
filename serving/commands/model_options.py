"""Options that several commands share: the model, and texts to measure it on."""

import argparse
from typing import TYPE_CHECKING

from entropic_jax.parameter_tables.table import ParameterError

from ..options.model import DTYPES, EMBEDDED, QUANTIZATIONS, check_directory, computing_dtype
from ..options.option_types import Several, path
from ..request import RequestError

if TYPE_CHECKING:
    from entropic_jax import models


def add_model(parser: argparse.ArgumentParser) -> None:
    """Declare `--model`, `--dtype` and `--quantization`."""
    parser.add_argument("--model", type=path, default=EMBEDDED, help="model directory (default: embedded)")
    add_dtype(parser)
    add_quantization(parser)


def add_dtype(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Declare `--dtype`."""
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="data type of the weights (default: auto, what suits the device)",
    )


def add_quantization(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Declare `--quantization`."""
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="round the weights to 8 bits with a scale per column (int8, fp8), or to 4 with one per 32 or "
        "128 inputs (int4, int4-128; default: as they are)",
    )


def add_parse_special(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Declare `--parse-special` and `--no-parse-special`."""
    parser.add_argument(
        "--parse-special",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether special tokens in prompts and messages are control tokens; if not, they are plain text",
    )


def add_texts(parser: argparse.ArgumentParser) -> None:
    """Declare `--text`, of which there may be several."""
    parser.add_argument(
        "--text",
        nargs="+",
        action=Several,
        required=True,
        metavar="FILE",
        help="held-out text, each file a text of its own; - is standard input",
    )


def loading_error(options: argparse.Namespace, error: Exception) -> ParameterError:
    """The error itself if it names its parameter, else one that names `--model`."""
    if isinstance(error, ParameterError) and error.param is not None:
        return error
    return RequestError(f"--model {options.model}: {error}")


def load_model(options: argparse.Namespace) -> "tuple[models.Model, models.Tokenizer]":
    """The model of `--model` and `--dtype` and its tokenizer. Raises RequestError if it has none."""
    from entropic_jax import models

    from ..options.compilation_cache import remember_compilations

    check_directory(options.model)
    remember_compilations()
    try:
        model = models.load(
            options.model, computing_dtype(options.dtype, options.model), quantization=options.quantization
        )
    except (OSError, ValueError, NotImplementedError) as error:
        raise RequestError(f"--model {options.model}: {error}") from error
    if model.tokenizer is None:
        raise RequestError(f"--model must be a directory with tokenizer.json; got {options.model}")
    return model, model.tokenizer
