"""`generation_config.json` of a model directory: stop tokens, and recommended sampling parameters."""

from pathlib import Path
from typing import Any

from .config import (
    LARGEST_INTEGER,
    LARGEST_SETTINGS,
    Check,
    Config,
    ModelError,
    abbreviate,
    is_integer,
    is_number,
    read_json,
)
from .tokenizer_files import is_there


def number(low: float, high: float, above: bool = False) -> Check:
    """A check of numbers.

    Args:
        low: the lowest number.
        high: the highest number.
        above: whether numbers must be above the lowest.
    """
    text = f"above {low} and at most {high}" if above else f"between {low} and {high}"
    fits = lambda value: is_number(value) and low <= value <= high and not (above and value == low)
    return Check(fits, f"a number {text}")


SAMPLING = {  # as `parameter_tables` of sampling parameters accept them, which models do not know
    "temperature": number(0, 1000),
    "top_k": Check(
        lambda value: is_number(value) and -1 <= value <= LARGEST_INTEGER and value == int(value),
        f"an integer between -1 and {LARGEST_INTEGER}",
    ),
    "top_p": number(0, 1, above=True),
    "min_p": number(0, 1),
    "typical_p": number(0, 1, above=True),
    "epsilon_cutoff": number(0, 1),
    "eta_cutoff": number(0, 1),
    "top_h": number(0, 1, above=True),
    "repetition_penalty": number(0, 1000, above=True),
    "dry_multiplier": number(0, 100),
    "dry_base": number(1, 10),
    "dry_allowed_length": Check(
        lambda value: is_number(value) and 1 <= value <= 32 and value == int(value),
        "an integer between 1 and 32",
    ),
}


def read_generation(path: Path, config: Config) -> dict[str, Any]:
    """The object in generation_config.json, {} if there is none.

    Raises ModelError for wrong tokens, and for sampling parameters that no sampler accepts.
    """
    if not is_there(path):
        return {}
    generation = read_json(path, LARGEST_SETTINGS)
    for name in ("bos_token_id", "eos_token_id"):
        stated = generation.get(name)
        ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
        wrong = [token for token in ids if not is_integer(token) or not 0 <= token < config.vocab_size]
        if wrong:
            raise ModelError(
                f"{path}: {name} must be token ids below vocab_size, {config.vocab_size}; "
                f"got {abbreviate(wrong[0])}"
            )
    if generation.get("do_sample") is False:  # others are then not read
        return generation
    for name, check in SAMPLING.items():
        value = generation.get(name)
        if value is not None and not check.accepts(value):
            raise ModelError(f"{path}: {name} must be {check.requirement}; got {abbreviate(value)}")
    return generation
