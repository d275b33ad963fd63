"""The `entropic` command: one sub-command a module, each imported light and run heavy."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from entropic_jax.parameter_table import ParameterError

from . import version
from .commands import ablate, bench, calibrate, doctor, generate, heads, models, serve

WRONG_USE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and the message."""
        self.exit(WRONG_USE, f"{self.prog}: error: {message}\n")


def parser() -> Parser:
    """The parser of the whole command line."""
    top = Parser(
        prog="entropic",
        description="Run language models on entropic time.",
        epilog="`entropic COMMAND --help` lists what a command takes.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"entropic_jax {version()}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for module in (generate, serve, bench, calibrate, ablate, heads, models, doctor):
        summary = module.__doc__.splitlines()[0]
        sub = commands.add_parser(
            module.__name__.rpartition(".")[2],
            help=summary[0].lower() + summary[1:].rstrip("."),
            description=summary,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run, error=sub.error)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0 is success, 1 a request that failed, 2 wrong use (one line on standard error says what is accepted),
    130 an interrupt from the keyboard, 141 a reader of the output that went away.
    """
    options = parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what the terminal's encoding lacks
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except ParameterError as error:
        return options.error(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # What is still buffered has nowhere to go; without this, Python would complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
