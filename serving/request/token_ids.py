"""Checks that token ids are in a model's vocabulary: those of a prompt, and those of sampling parameters."""

from collections.abc import Iterable, Mapping
from typing import Any

from entropic_jax.parameter_tables.sampling_params import SamplingParams
from entropic_jax.parameter_tables.table import TokenBiases, TokenIds, parameters_of

from . import RequestError

PARAMETERS = tuple(
    line.name for line in parameters_of(SamplingParams) if isinstance(line.accepts, TokenIds | TokenBiases)
)
"""The sampling parameters that hold token ids."""


def check_token_ids(name: str, token_ids: Iterable[int], vocabulary: int) -> None:
    """Raise RequestError for a token id outside the vocabulary.

    Args:
        name: the name of the argument, as its sender writes it.
        token_ids: the token ids, of at least 0.
        vocabulary: the number of token ids of the model.

    >>> check_token_ids("stop_token_ids", [3, 96], 96)
    Traceback (most recent call last):
    entropic_jax.serving.request.RequestError: stop_token_ids must hold token ids between 0 and 95; got 96
    """
    if (largest := max(token_ids, default=0)) >= vocabulary:
        raise RequestError(f"{name} must hold token ids between 0 and {vocabulary - 1}; got {largest}", name)


def check_parameters(parameters: Mapping[str, Any], vocabulary: int) -> None:
    """Raise RequestError for a sampling parameter with a token id outside the vocabulary.

    Args:
        parameters: the values by name, of the right types; some may be missing, and others be there.
        vocabulary: the number of token ids of the model.
    """
    for name in PARAMETERS:
        check_token_ids(name, parameters.get(name) or (), vocabulary)
