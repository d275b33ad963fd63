"""Prompts of held-out text, and the arms that continue them."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from entropic_jax.speculation import Cascade, Speculator, pruned_drafter, suffix_drafter
from entropic_jax.speculation.draft_length import DraftLength

from ..harness.held_out_text import module_tokens

WIDTHS = (1, 2, 4, 8, 16)  # tokens of a pass
LOOP_WINDOW, LOOP_PAIRS = 48, 24  # a text loops if its last tokens hold fewer different pairs


def windows(tokenizer_file: Path, context: int, number: int) -> list[list[int]]:
    """Prompts of `context` tokens each, from places drawn once and for all.

    Args:
        tokenizer_file: of the model.
        context: tokens of a prompt.
        number: of prompts.
    """
    tokens = module_tokens(tokenizer_file)
    starts = np.random.default_rng(context).integers(0, len(tokens) - context, number)
    return [tokens[start : start + context] for start in starts]


def loops(tokens: list[int]) -> bool:
    """Whether a text ends in a loop."""
    last = tokens[-LOOP_WINDOW:]
    return len(last) == LOOP_WINDOW and len(set(zip(last[1:], last, strict=False))) < LOOP_PAIRS


def arms(costs: list[float]) -> dict[str, Speculator | None]:
    """The speculators by name; None is plain decoding, the baseline.

    Args:
        costs: of a pass of each width, in plain decode steps, as measured before.
    """
    law = DraftLength(jnp.asarray(costs, jnp.float32), widths=WIDTHS)
    return {
        "off": None,
        "suffix": Speculator(suffix_drafter(), law),
        "pruned": Speculator(pruned_drafter(), law),
        "suffix, then pruned": Speculator(Cascade((suffix_drafter(), pruned_drafter())), law),
    }
