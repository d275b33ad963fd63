"""Writes the options of every command into docs/options.md: `python docs/command_options.py`."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from entropic_jax.serving.cli import parser

PAGE = Path(__file__).with_name("options.md")
INTRODUCTION = """# Options

All options of the commands, as their `--help` has them. [Command line](usage.md) and
[Serving](serving.md) say how they are used.
"""


def commands() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command by its name."""
    (choices,) = (a.choices for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(choices)


def options(command: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """What is written for each option and argument of a command, and what it means."""
    for action in command._actions:
        if action.help == argparse.SUPPRESS or "--help" in action.option_strings:
            continue
        choices = "" if action.choices is None else "{" + ",".join(map(str, action.choices)) + "}"
        value = action.metavar or choices or action.dest.upper()
        value = " ".join(value) if isinstance(value, tuple) else value
        names = ", ".join(action.option_strings)
        written = names if action.nargs == 0 else f"{names} {value}".strip()
        # Some versions of Python append the default to the help of flags that can be negated.
        meaning = (action.help or "").removesuffix(" (default: %(default)s)")
        yield written, (" ".join(meaning.split()) % vars(action)).replace("<", "&lt;")


def page() -> str:
    """The page."""
    parts = [INTRODUCTION]
    for name, command in commands().items():
        rows = [f"| `{written}` | {meaning} |" for written, meaning in options(command)]
        parts.append("\n".join([f"## entropic {name}\n", "| Option | Meaning |", "| --- | --- |", *rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
