"""The parser of the command line, whose errors read as all others: `--top-k must be …; got …`."""

import argparse
import re
from typing import Any, NoReturn

WRONG_USE = 2
REWRITTEN = (
    (r"^argument ([^:]+): expected one argument$", r"\1 must have a value"),
    (r"^argument ([^:]+): not allowed with argument (.+)$", r"\1 must not be combined with \2"),
    (r"^argument ([^:]+): ignored explicit argument '(.*)'$", r"\1 must have no value; got \2"),
    (r"^argument ([^:]+): invalid int value: '(.*)'$", r"\1 must be an integer; got \2"),
    (r"^argument ([^:]+): invalid float value: '(.*)'$", r"\1 must be a number; got \2"),
    (r"^argument ([^:]+): (?=must )", r"\1 "),
)
"""Messages of argparse, and what they are here."""


class Parser(argparse.ArgumentParser):
    """An argument parser with errors of one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and the message."""
        for pattern, replacement in REWRITTEN:
            message = re.sub(pattern, replacement, message, flags=re.DOTALL)
        self.exit(WRONG_USE, f"{self.prog}: error: {message}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = ", ".join(map(str, action.choices))
            raise argparse.ArgumentError(action, f"must be one of {names}; got {value}")
