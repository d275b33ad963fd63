"""Options of speculative decoding, and what they cannot be combined with."""

import argparse
import logging
from typing import Any

from entropic_jax.parameter_tables.control_gains import PRUNING, SCALES
from entropic_jax.parameter_tables.speculation_names import (
    DRAFTERS,
    OFF,
    check_drafter,
    drafter_of,
    has_weights,
    is_draft_head,
    read_config,
)
from entropic_jax.parameter_tables.table import ParameterError, short

from .control_options import SAMPLERS

DEFAULT_PRESET = "meso"  # its texts are those of `off`
_log = logging.getLogger(__name__)


def add_speculate(parser: argparse._ActionsContainer) -> None:
    """Declare `--speculate`."""
    parser.add_argument(
        "--speculate",
        metavar="NAME",
        help=f"drafter, one of {', '.join(DRAFTERS)}: suffix (longest repeated match), pruned (this model on "
        "few pages of the KV cache), head (the draft head in the model's directory), auto (the most "
        "promising of these); or the directory of a draft head, or of a draft model with the same tokenizer. "
        "The output is unchanged (default: auto with meso and full, else off)",
    )


def add_config(parser: argparse._ActionsContainer) -> None:
    """Declare `--speculative-config`, vLLM's form of the same."""
    parser.add_argument(
        "--speculative-config",
        metavar="JSON",
        help='vLLM\'s form of --speculate, as {"method": "ngram", "num_speculative_tokens": 4} or '
        '{"model": "DIR"}',
    )


def engine_fields(speculate: str | None, config: Any) -> dict[str, Any]:
    """The fields of `EngineOptions` that the two options describe.

    Args:
        speculate: a name of the drafter or the directory of a model, None where none is stated: then the
            preset chooses.
        config: vLLM's `speculative_config`, None where none is stated.

    Raises:
        ParameterError: where a value is not accepted, or the two disagree.
    """
    if config is None:
        return {"speculate": speculate}
    name, number = read_config(config)
    if speculate is not None and str(speculate) != name:
        raise ParameterError(
            f"speculate must be {name}, the drafter of speculative_config; got {short(speculate)}",
            "speculate",
        )
    return {"speculate": name, "num_speculative_tokens": number}


def default_preset(
    speculate: str | None = None,
    method: str = "dense",
    *,
    batch_invariant: bool = False,
    divided: bool = False,
) -> str:
    """The preset where none is stated: meso, or off where other options exclude drafts, as the log says.

    Args:
        speculate: the drafter that is stated, None for none.
        method: the method of sparse prefill or KV compression.
        batch_invariant: whether results are promised bit for bit.
        divided: whether the model is divided over devices, on which sums of one and of several tokens round
            differently.

    >>> default_preset(), default_preset("off"), default_preset(method="h2o")
    ('meso', 'off', 'off')
    """
    reason = None
    if speculate == OFF:
        reason = "speculate is off"
    elif speculate is None and divided:
        reason = "the model is divided over devices"
    else:
        try:
            check(speculate, DEFAULT_PRESET, method, batch_invariant=batch_invariant, divided=divided)
        except ParameterError as error:
            reason = str(error)
    if reason is not None:
        _log.info("preset off, not %s: %s", DEFAULT_PRESET, reason)
    return DEFAULT_PRESET if reason is None else "off"


def check(
    speculate: str | None,
    preset: str,
    method: str,
    *,
    num_speculative_tokens: Any = None,
    batch_invariant: bool = False,
    pruning: bool | None = None,
    divided: bool = False,
) -> None:
    """Raise ParameterError where drafts cannot be combined with other options.

    Args:
        speculate: the name of the drafter, or the directory of a model that drafts; None where the preset
            chooses.
        preset: the preset of control, or a sampler.
        method: the method of sparse prefill or KV compression.
        num_speculative_tokens: k, None for the default.
        batch_invariant: whether results are promised bit for bit.
        pruning: whether requests may leave pages unread; None where that follows from the preset.
        divided: whether the model is divided over devices.
    """
    drafter = drafter_of(preset, speculate)
    check_drafter(drafter, num_speculative_tokens)
    if drafter == OFF:
        return
    conflict = None
    if preset in SAMPLERS:
        conflict = f"the preset {preset}, which draws tokens by itself"
    elif preset == "paper":
        conflict = "the preset paper"
    elif PRUNING in SCALES.get(preset, ()):
        conflict = f"the preset {preset}, which leaves pages unread"
    elif method != "dense":
        conflict = f"the method {method}"
    elif batch_invariant:
        conflict = "batch_invariant"
    if conflict is None:
        if has_weights(drafter):
            _check_draft_model(drafter, pruning, divided)
        return
    if speculate is None:
        raise ParameterError(
            f"preset must not draft tokens together with {conflict}, unless speculate is off; "
            f"got {short(preset)}",
            "preset",
        )
    raise ParameterError(
        f"speculate must be off together with {conflict}; got {short(speculate)}", "speculate"
    )


def _check_draft_model(speculate: str, pruning: bool | None, divided: bool) -> None:
    """Raise ParameterError where a draft model, or head, cannot be combined with other options.

    Args:
        speculate: its directory, or the name "head".
        pruning: whether requests may leave pages unread.
        divided: whether the model is divided over devices.
    """
    if divided:
        raise ParameterError(
            "speculate must not name a draft model or head where the model is divided over several devices; "
            f"got {short(speculate)}",
            "speculate",
        )
    if pruning and not is_draft_head(speculate):
        raise ParameterError(
            "pruning must be false with a draft model, whose pages are chosen for no request; got True",
            "pruning",
        )
