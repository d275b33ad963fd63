"""The `entropic` command line: one module for each subcommand, which imports JAX only when it runs."""

import argparse
import io
import os
import sys
from collections.abc import Sequence

from entropic_jax import __version__
from entropic_jax.parameter_tables.table import ParameterError

from .commands import (
    ablate,
    bench,
    calibrate,
    chat,
    completion,
    convert,
    doctor,
    generate,
    heads,
    models,
    plan,
    serve,
)
from .commands.config_file import use_config
from .commands.parser import Parser
from .commands.unknown_flags import explained
from .options.option_types import message_of

COMMANDS = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        generate,
        chat,
        serve,
        bench,
        calibrate,
        ablate,
        heads,
        models,
        convert,
        plan,
        doctor,
        completion,
    )
}
INTERRUPTED, BROKEN_PIPE = 130, 141


def parser() -> Parser:
    """The parser of the whole command line."""
    top = Parser(
        prog="entropic",
        description="Run and serve language models with control by entropy.",
        epilog="`entropic COMMAND --help` lists the options of a command.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"entropic_jax {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, module in COMMANDS.items():
        summary = module.__doc__.splitlines()[0]
        sub = commands.add_parser(
            name,
            help=summary[0].lower() + summary[1:].rstrip("."),
            description=summary,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
        )
        module.add_arguments(sub)
        flags = tuple(flag for action in sub._actions for flag in action.option_strings)
        sub.set_defaults(run=module.run, error=sub.error, top=top, subparser=sub, flags=flags)
    return top


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed options of a command line; wrong use ends the process with status 2 and a line."""
    top = parser()
    options, unknown = top.parse_known_args(arguments)
    if (path := getattr(options, "config_file", None)) is not None:
        try:
            use_config(options.subparser, path)
        except ParameterError as error:
            return options.error(str(error))
        options, unknown = top.parse_known_args(arguments)
    if unknown:
        options.error(explained(unknown, options.flags))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0 is success, 1 a failed request, 2 wrong use (with a line on standard error), 130 an interrupt from the
    keyboard, 141 a closed pipe at standard output.
    """
    options = parsed(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write characters that the encoding lacks
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except ParameterError as error:
        return options.error(message_of(error, options))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Discards what is still buffered, about which Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


if __name__ == "__main__":
    sys.exit(main())
