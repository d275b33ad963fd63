"""Sampling defaults of a server: a generation_config.json, and what the command line overrides of it."""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entropic_jax.parameter_tables.sampling_params import OUTPUT, PARAMETERS, recommended
from entropic_jax.parameter_tables.table import ParameterError, short

from ..request import RequestError

FILE = "generation_config.json"
SOURCE, OVERRIDE = "--generation-config", "--override-generation-config"
OVERRIDABLE = {
    name: line
    for name, line in PARAMETERS.items()
    if line.scope != OUTPUT and name not in ("max_tokens", "seed")
}
"""Sampling parameters for which a server may have a default of its own."""


def override(text: str) -> dict[str, Any]:
    """The sampling parameters in the JSON of `--override-generation-config`. Raises RequestError.

    >>> override('{"temperature": 0.6, "top_k": 20}')
    {'temperature': 0.6, 'top_k': 20}
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise RequestError(f'{OVERRIDE} must be a JSON object, as {{"temperature": 0.6}}; got {short(text)}')
    for name in values:
        if name not in OVERRIDABLE:
            close = difflib.get_close_matches(name, OVERRIDABLE, 1)
            hint = f"did you mean {close[0]}?" if close else f"its parameters are {', '.join(OVERRIDABLE)}"
            raise RequestError(f"{OVERRIDE} has no parameter {name[:200]}; {hint}")
    return _checked(values, OVERRIDE)


def read(source: str) -> Mapping[str, Any] | None:
    """The generation_config.json that `--generation-config` names.

    Args:
        source: "auto" for the model's, "vllm" for none, else a folder with another.

    Returns:
        Its content; {} for none, None for the model's.

    Raises:
        RequestError: The folder has no such file.
    """
    if source in ("auto", "vllm"):
        return None if source == "auto" else {}
    file = Path(source) / FILE
    try:
        values = json.loads(file.read_text("utf-8")) if file.is_file() else None
    except OSError as error:
        reason = error.strerror
    except (ValueError, RecursionError) as error:
        reason = f"{FILE} is not JSON: {error}"
    else:
        if isinstance(values, dict):
            return values
        reason = f"{FILE} is no regular file, or holds no JSON object"
    raise RequestError(f"{SOURCE} must be auto, vllm or a folder with {FILE}; got {source} ({reason})")


def sampling_defaults(
    config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Sampling parameters of requests that do not state them.

    Args:
        config: the content of a generation_config.json.
        overrides: parameters that take precedence, as `override` returns them.

    Raises:
        RequestError: A value of the config is not accepted.
    """
    return {**_checked(recommended(config), FILE), **(overrides or {})}


def _checked(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The values in their normal form; an error begins with `place`."""
    try:
        return {name: OVERRIDABLE[name].accepts.check(name, value) for name, value in values.items()}
    except ParameterError as error:
        raise RequestError(f"{place}: {error}") from None
