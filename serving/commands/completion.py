"""Print a script that lets a shell complete commands, options and their values.

The scripts are those of shtab, from the parsers of all commands; completing runs no Python.
"""

import argparse
from collections.abc import Iterator

from ..request import RequestError

SHELLS = ("bash", "zsh", "fish")
FILES, FOLDERS = ("FILE", "PATH", "MODEL"), ("FOLDER",)  # how values of options are called that are paths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `entropic completion` takes."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")


def run(options: argparse.Namespace) -> int:
    """Print the script, and return the exit status. RequestError without the package that writes it."""
    print(script(options.top, options.shell))
    return 0


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script of a shell for a command line. RequestError without the package that writes it.

    Args:
        parser: the parser of the whole command line.
        shell: one of `SHELLS`.
    """
    try:
        import shtab
    except ImportError:
        extra = "install the extra: pip install 'entropic_jax[completion]'"
        raise RequestError(f"completion needs shtab, which is not installed; {extra}") from None
    for action in _actions(parser):
        if action.choices is None and action.metavar in (*FILES, *FOLDERS):
            action.complete = shtab.FILE if action.metavar in FILES else shtab.DIRECTORY  # type: ignore[missing-attribute]
    return shtab.complete(parser, shell)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
