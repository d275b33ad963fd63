"""Options of speculative decoding, and what they cannot be combined with."""

import argparse
from typing import Any

from entropic_jax.parameter_tables.control_gains import PRUNING, SCALES
from entropic_jax.parameter_tables.speculation_names import (
    DRAFTERS,
    OFF,
    check_drafter,
    drafter_of,
    read_config,
)
from entropic_jax.parameter_tables.table import Choice, ParameterError, short

from .control_options import SAMPLERS


def add_speculate(parser: argparse._ActionsContainer) -> None:
    """Declare `--speculate`."""
    parser.add_argument(
        "--speculate",
        choices=DRAFTERS,
        help="draft tokens and verify several in one pass; the text stays the same: suffix drafts what "
        "followed the longest match in the text so far, pruned what the model says on few pages of the KV "
        "cache, auto whichever promises more (default: auto with the presets meso and full, else off)",
    )


def add_config(parser: argparse._ActionsContainer) -> None:
    """Declare `--speculative-config`, vLLM's form of the same."""
    parser.add_argument(
        "--speculative-config",
        metavar="JSON",
        help='vLLM\'s form of --speculate, as {"method": "ngram", "num_speculative_tokens": 4}',
    )


def engine_fields(speculate: str | None, config: Any) -> dict[str, Any]:
    """The fields of `EngineOptions` that the two options describe.

    Args:
        speculate: a name of the drafter, None where none is stated: then the preset chooses.
        config: vLLM's `speculative_config`, None where none is stated.

    Raises:
        ParameterError: where a value is not accepted, or the two disagree.
    """
    if config is None:
        return {"speculate": speculate}
    name, number = read_config(config)
    if speculate not in (None, name):
        raise ParameterError(
            f"speculate must be {name}, the drafter of speculative_config; got {short(speculate)}",
            "speculate",
        )
    return {"speculate": name, "num_speculative_tokens": number}


def check(
    speculate: str | None,
    preset: str,
    method: str,
    *,
    num_speculative_tokens: Any = None,
    batch_invariant: bool = False,
) -> None:
    """Raise ParameterError where drafts cannot be combined with other options.

    Args:
        speculate: the name of the drafter; None where the preset chooses it.
        preset: of control, or a sampler.
        method: of sparse prefill or KV compression.
        num_speculative_tokens: k, None for the default.
        batch_invariant: whether results are promised bit for bit.
    """
    if speculate is not None:
        Choice(DRAFTERS).check("speculate", speculate)
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
