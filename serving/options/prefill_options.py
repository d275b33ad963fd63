"""Options of sparse prefills on the command line and in `EngineOptions`, and the method that they build."""

import argparse
from typing import TYPE_CHECKING, Any

from entropic_jax.parameter_tables.prefill_options import (
    PREFILL_OPTIONS,
    FilePath,
    PowerOfTwo,
    check_prefill_options,
)
from entropic_jax.parameter_tables.table import Flag, Number, ParameterError, short

from .option_types import number

if TYPE_CHECKING:
    from entropic_jax.methods.presets import Preset

OPTIONS = {
    name: f"prefill_{name}" for name in PREFILL_OPTIONS
}  # an option's name, and that on the command line


def add_arguments(group: "argparse._ArgumentGroup") -> None:
    """Declare an option for each line of `PREFILL_OPTIONS`, None by default."""
    for name, line in PREFILL_OPTIONS.items():
        flag, text = f"--prefill-{name.replace('_', '-')}", f"{line.help} (default: {line.default})"
        accepts = line.accepts
        if isinstance(accepts, Flag):
            group.add_argument(flag, action="store_true", default=None, help=text)
        elif isinstance(accepts, FilePath):
            group.add_argument(flag, metavar="FILE", help=text)
        elif isinstance(accepts, PowerOfTwo):
            group.add_argument(flag, type=_power_of_two(accepts), metavar="INT", help=text)
        else:
            assert isinstance(accepts, Number)
            metavar = "INT" if accepts.kind is int else "FLOAT"
            group.add_argument(flag, type=number(accepts), metavar=metavar, help=text)


def _power_of_two(accepts: PowerOfTwo) -> Any:
    def convert(text: str) -> int:
        try:
            return accepts.check("", int(text))
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {accepts}; got {text}") from None

    return convert


def read(options: argparse.Namespace) -> tuple[tuple[str, Any], ...]:
    """The options that the command line states, as pairs of a name of `PREFILL_OPTIONS` and a value."""
    values = {name: getattr(options, option, None) for name, option in OPTIONS.items()}
    return tuple((name, value) for name, value in values.items() if value is not None)


def check(options: Any, method: str) -> None:
    """Raise ParameterError where the options are not pairs of a name that the method knows and a value."""
    if not isinstance(options, tuple) or not all(isinstance(x, tuple) and len(x) == 2 for x in options):
        names = ", ".join(PREFILL_OPTIONS)
        message = f"prefill_options must be a mapping with keys among {names}; got {short(options)}"
        raise ParameterError(message, "prefill_options")
    try:
        check_prefill_options(dict(options), method)
    except ParameterError as error:
        message = str(error) if error.param is None else f"prefill_options: {error}"
        raise ParameterError(message, "prefill_options") from None


def method_preset(options: Any) -> "Preset":
    """The preset off with the method of `EngineOptions`. Raises ParameterError for an unusable table."""
    from entropic_jax.methods.presets import preset
    from entropic_jax.methods.registry import add_method

    extra = dict(options.prefill_options)
    try:
        return add_method(options.method, preset("off"), **dict(options.budgets), prefill_options=extra)
    except ParameterError as error:
        if error.param not in extra:
            raise
        raise ParameterError(f"prefill_options: {error}", "prefill_options") from None
