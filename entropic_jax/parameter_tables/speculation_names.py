"""Names and limits of speculative decoding, which every interface to it is derived from.

The command line, `LLM`, the engine and the documentation read them. Imports neither JAX nor NumPy.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from .control_gains import DRAFTS, SCALES
from .json_file import json_object
from .table import Number, ParameterError, short

Speculate = Literal["off", "auto", "suffix", "pruned", "head"]
DRAFTERS = get_args(Speculate)
"""The values of `speculate`: no drafts, whichever drafter pays, or the name of the drafter."""
OFF, AUTO, HEAD = "off", "auto", "head"
DRAFTS_FROM_PAGES = ("auto", "pruned")
"""The drafters that run the model on few pages, whose steps cost something."""

HEAD_TYPE = "draft_head"
"""`model_type` in the config.json of a draft head."""

DRAFTED = Number(int, 1, 15)
"""Tokens drafted for a row in a pass, at most."""
DEFAULT_DRAFTED = 15

VLLM_DRAFT_MODEL = "draft_model"
"""vLLM's method of a `speculative_config` with the key `model`."""
VLLM_METHODS = {"suffix": "suffix", "ngram": "suffix", "pruned": "pruned", "auto": "auto", "head": "head"}
"""The drafter for each method of `speculative_config`: vLLM's `suffix` and `ngram`, and the names of ours."""
CONFIG_KEYS = ("method", "model", "num_speculative_tokens")


def is_draft_model(speculate: Any) -> bool:
    """Whether a value of `speculate` is the directory of a model that drafts.

    >>> is_draft_model("suffix"), is_draft_model("/"), is_draft_model("")
    (False, True, False)
    """
    if not isinstance(speculate, str | os.PathLike) or speculate in (*DRAFTERS, ""):
        return False
    return os.path.isdir(speculate)  # False also for what cannot be a path


def is_draft_head(speculate: Any) -> bool:
    """Whether a value of `speculate` is a draft head: that of the model's own directory, or a directory.

    >>> is_draft_head("head"), is_draft_head("suffix"), is_draft_head("/")
    (True, False, False)
    """
    if speculate == HEAD:
        return True
    return (
        is_draft_model(speculate)
        and json_object(Path(speculate) / "config.json").get("model_type") == HEAD_TYPE
    )


def has_weights(speculate: Any) -> bool:
    """Whether a value of `speculate` is a draft head or a draft model, which has parameters of its own.

    >>> has_weights("head"), has_weights("suffix"), has_weights("/")
    (True, False, True)
    """
    return is_draft_head(speculate) or is_draft_model(speculate)


def drafter_of(preset: str, speculate: str | None = None) -> str:
    """The drafter in force: the one that is stated, else that of the preset.

    Args:
        preset: name of the preset, or of a sampler.
        speculate: one of `DRAFTERS` or a directory, or None where none is stated.

    >>> drafter_of("meso"), drafter_of("meso", "off"), drafter_of("off", "suffix")
    ('auto', 'off', 'suffix')
    """
    if speculate is not None:
        return speculate
    return AUTO if DRAFTS in SCALES.get(preset, ()) else OFF


def check_drafter(speculate: Any, num_speculative_tokens: Any = None) -> None:
    """Raise ParameterError unless there is such a drafter, and it may draft that number of tokens.

    Args:
        speculate: one of `DRAFTERS`, or the directory of a model that drafts.
        num_speculative_tokens: k, None for the default; must be None where nothing is drafted.
    """
    if not is_draft_model(speculate) and speculate not in DRAFTERS:
        raise ParameterError(
            f"speculate must be one of {', '.join(DRAFTERS)}, or the directory of a draft model or head; "
            f"got {short(speculate)}",
            "speculate",
        )
    name = "num_speculative_tokens"
    if num_speculative_tokens is None:
        return
    DRAFTED.check(name, num_speculative_tokens)
    if speculate == OFF:
        raise ParameterError(
            f"{name} must not be set with speculate off; got {short(num_speculative_tokens)}", name
        )


def read_config(config: Any) -> tuple[str, int | None]:
    """The drafter, or the directory of the draft model, and k that vLLM's `speculative_config` describes.

    Args:
        config: a mapping with the keys of `CONFIG_KEYS`, or the text of one in JSON.

    Raises:
        ParameterError: for text that is not JSON, another key, or a value that is not accepted.

    >>> read_config('{"method": "ngram", "num_speculative_tokens": 4}')
    ('suffix', 4)
    """
    name = "speculative_config"
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except (ValueError, RecursionError):
            raise ParameterError(f"{name} must be a JSON object; got {short(config)}", name) from None
    if not isinstance(config, Mapping):
        raise ParameterError(f"{name} must be a mapping with the key method; got {short(config)}", name)
    for key in config:
        if key not in CONFIG_KEYS:
            message = f"{name} must have no keys but {', '.join(CONFIG_KEYS)}; got {short(key)}"
            raise ParameterError(message, name)
    method, number = config.get("method"), config.get("num_speculative_tokens")
    directory = config.get("model")
    if directory is not None and method in (None, VLLM_DRAFT_MODEL):
        if not is_draft_model(directory):
            message = f"{name} must have the directory of a model as model; got {short(directory)}"
            raise ParameterError(message, name)
    elif not isinstance(method, str) or method not in VLLM_METHODS:
        *methods, last = VLLM_METHODS
        accepted = f"{', '.join(methods)} or {last}, or a model"
        message = f"{name} must have the method {accepted}; got {short(method)}"
        raise ParameterError(message, name)
    elif directory is not None:
        message = f"{name} must have no model with the method {method}; got {short(directory)}"
        raise ParameterError(message, name)
    if number is not None:
        try:
            DRAFTED.check("num_speculative_tokens", number)
        except ParameterError as error:
            raise ParameterError(f"{name}: {error}", name) from None
    return VLLM_METHODS[str(method)] if directory is None else str(directory), number
