"""Prompts of held-out text, and the arms that continue them."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from entropic_jax.parameter_tables.speculation_names import HEAD, OFF
from entropic_jax.speculation import PassCosts, Speculator, make_speculator

from ..harness.held_out_text import module_tokens

TEXTS = ("held-out", "copy", "random")
WIDTHS = (1, 2, 4, 8, 16)  # tokens of a pass
ARMS = (OFF, "suffix", "pruned", "head", "auto")  # "head" where the model has one
RESTED = "suffix"  # the arm whose drafter has nothing to offer in most passes, so that it rests
LOOP_WINDOW, LOOP_PAIRS = 48, 24  # a text loops if its last tokens hold fewer different pairs


def windows(tokenizer_file: Path, context: int, number: int) -> list[list[int]]:
    """Prompts of `context` tokens each, from places drawn once and for all.

    Args:
        tokenizer_file: the tokenizer file of the model.
        context: tokens of a prompt.
        number: number of prompts.
    """
    tokens = module_tokens(tokenizer_file)
    starts = np.random.default_rng(context).integers(0, len(tokens) - context, number)
    return [tokens[start : start + context] for start in starts]


def prompts(text: str, tokenizer_file: Path, context: int, number: int) -> list[list[int]]:
    """Prompts of one of the `TEXTS`.

    Args:
        text: "held-out": code that the model has not seen; "copy": code whose first third follows once more,
            so that a model that copies goes on with the second; "random": tokens drawn uniformly.
        tokenizer_file: the tokenizer file of the model.
        context: tokens of a prompt.
        number: number of prompts.
    """
    if text == "held-out":
        return windows(tokenizer_file, context, number)
    if text == "copy":
        again = context // 4
        return [code + code[:again] for code in windows(tokenizer_file, context - again, number)]
    vocabulary = max(module_tokens(tokenizer_file)) + 1
    return np.random.default_rng(context).integers(0, vocabulary, (number, context)).tolist()


def loops(tokens: list[int]) -> bool:
    """Whether a text ends in a loop."""
    last = tokens[-LOOP_WINDOW:]
    return len(last) == LOOP_WINDOW and len(set(zip(last[1:], last, strict=False))) < LOOP_PAIRS


def arms(costs: PassCosts, headed: bool, names: Sequence[str] = ARMS) -> dict[str, Speculator | None]:
    """The speculators by name; None is plain decoding, the baseline.

    Args:
        costs: the costs of a pass on this machine.
        headed: whether the model has a draft head.
        names: the names of the arms.
    """
    possible = [name for name in names if headed or name != HEAD]
    drafted = {name: max(WIDTHS) - 1 if name != OFF else None for name in possible}
    return {name: make_speculator(name, 1, k, costs, headed) for name, k in drafted.items()}


def with_restless(speculators: dict[str, Speculator | None]) -> dict[str, Speculator | None]:
    """The arms, and the one that rests most without rests: it shows what they gain."""
    rested = speculators[RESTED]
    assert rested is not None
    return {**speculators, f"{RESTED}, no rests": dataclasses.replace(rested, longest_rest=0)}
