"""Options from a YAML file, by the names of their flags. The command line takes precedence over the file."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..request import RequestError
from .unknown_flags import hint_for

FLAG = "--config"
SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--config`."""
    parser.add_argument(
        FLAG,
        dest="config_file",
        metavar="FILE",
        help="YAML file of flags by their names, as `max-num-seqs: 16`; the command line takes precedence",
    )


def use_config(parser: argparse.ArgumentParser, path: str) -> None:
    """Make the options in a file the defaults of a parser.

    Args:
        parser: the parser of the command.
        path: the path of the file.

    Raises:
        RequestError: The file cannot be read, names no flag of the command, or has a value that the flag does
            not accept.
    """
    texts, values = read(path)
    actions = {
        flag.removeprefix("--"): action
        for action in parser._actions
        for flag in action.option_strings
        if flag.startswith("--") and action.dest not in ("help", "config_file")
    }
    seen: dict[str, str] = {}
    for key, text in texts.items():
        name = key.removeprefix("--").replace("_", "-")
        if name not in actions:
            hint = hint_for(f"--{name}", [f"--{known}" for known in actions]).replace("--", "")
            raise RequestError(f"{FLAG} {path} has no flag {key}{f' ({hint})' if hint else ''}")
        action = actions[name]
        if action.dest in seen:
            raise RequestError(f"{FLAG} {path} must state {name} once; got {seen[action.dest]} and {key}")
        seen[action.dest] = key
        try:
            parser.set_defaults(**{action.dest: _converted(action, name, text, values[key])})
        except (argparse.ArgumentTypeError, ValueError) as error:
            message = str(error)
            separator = "" if message.startswith(":") else " "
            raise RequestError(f"{FLAG} {path}: {name}{separator}{message}") from None


def read(path: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The mapping in a YAML file: with every scalar as its text, and with scalars as YAML types them.

    Raises RequestError.
    """
    try:
        import yaml
    except ImportError:
        extra = "install the extra: pip install 'entropic_jax[serve]'"
        raise RequestError(f"{FLAG} needs pyyaml, which is not installed; {extra}") from None
    try:
        content = Path(path).read_text("utf-8")
        texts, values = yaml.load(content, yaml.BaseLoader), yaml.safe_load(content)
        keys = (
            [key.value for key, _ in getattr(yaml.compose(content), "value", ())]
            if isinstance(texts, dict)
            else []
        )
    except OSError as error:
        raise RequestError(f"{FLAG} must be a readable file; got {path} ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise RequestError(f"{FLAG} must be a YAML file; got {path} ({reason[:300]})") from None
    if not content.strip() or texts is None:
        return {}, {}
    if not isinstance(texts, dict):
        raise RequestError(f"{FLAG} must be a YAML file of flags and their values; got {path}")
    if repeated := [key for key in texts if keys.count(key) > 1]:
        raise RequestError(
            f"{FLAG} {path} must state {repeated[0]} once; got it {keys.count(repeated[0])} times"
        )
    if len(values) != len(texts):  # keys that differ as texts only
        return texts, texts
    return texts, dict(zip(texts, values.values(), strict=True))


def _converted(action: argparse.Action, name: str, text: Any, value: Any) -> Any:
    """The value of an option, as the command line would have it.

    Args:
        action: the action of the option.
        name: the name of the flag, without dashes.
        text: the value, with every scalar as its text.
        value: the value as YAML types it.

    Raises:
        ValueError: The option does not accept it.
        argparse.ArgumentTypeError: The same.
    """
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(text, str) or text.lower() not in SWITCHES:
            raise ValueError(f"must be true or false; got {text}")
        negated = isinstance(action, argparse.BooleanOptionalAction) and name.startswith("no-")
        return SWITCHES[text.lower()] is not negated
    if action.metavar == "JSON" and not isinstance(text, str):
        return _of_type(action, json.dumps(value, default=str))
    several = action.nargs in ("+", "*")
    if isinstance(text, dict) or (isinstance(text, list) and not several):
        raise ValueError(f"must be a single value; got {json.dumps(value, default=str)[:200]}")
    if not several:
        return _of_type(action, text)
    items = text if isinstance(text, list) else [text]
    if not items or not all(isinstance(item, str) for item in items):
        raise ValueError(f"must be a value or a list of values; got {json.dumps(value, default=str)[:200]}")
    return [_of_type(action, item) for item in items]


def _of_type(action: argparse.Action, text: str) -> Any:
    """One value of an option. Raises ValueError or ArgumentTypeError where it is not accepted."""
    convert: Any = action.type or str
    try:
        value = convert(text)
    except argparse.ArgumentTypeError:
        raise
    except (TypeError, ValueError):
        kind = {int: "an integer", float: "a number"}.get(convert, "valid")
        raise ValueError(f"must be {kind}; got {text}") from None
    if action.choices is not None and value not in action.choices:
        raise ValueError(f"must be one of {', '.join(map(str, action.choices))}; got {text}")
    return value
