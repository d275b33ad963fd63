"""Draft heads on disk: a directory with `config.json` and `draft_head.safetensors`.

`python -m entropic_jax.models.train.draft_head` writes it. The tensors are those of `draft_head.HeadModule`.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from entropic_jax.pallas import skinny_matmul

from . import draft_head
from .config import Config, ModelError, abbreviate, is_integer, read_json, require_file
from .decoder import Decoder, Params

MODEL_TYPE, TENSORS, FOLDER = "draft_head", "draft_head.safetensors", "draft_head"
SIZES = ("hidden_size", "vocab_size", "num_hidden_layers", "layer", "intermediate_size")
TABLES = ("entropy_edges", "acceptance")


def is_draft_head(directory: Path) -> bool:
    """Whether a directory holds a draft head, by its config.json."""
    try:
        return read_json(directory / "config.json").get("model_type") == MODEL_TYPE
    except ModelError:
        return False


def load(directory: Path, target: Decoder, dtype: Any = "float32") -> tuple[draft_head.DraftHead, Params]:
    """Read the draft head of a model.

    Args:
        directory: as `save` writes it.
        target: the functions of the model that it drafts for.
        dtype: the dtype that the head computes in, that of the model.

    Raises:
        ModelError: the directory holds no draft head, or that of another model.
    """
    if not is_draft_head(directory):
        raise ModelError(f"{directory} holds no draft head (a config.json of model_type {MODEL_TYPE!r})")
    file = directory / "config.json"
    try:
        config = _checked(read_json(file), target.config)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None
    head = draft_head.DraftHead(target, config)
    expected = draft_head.named(draft_head.head_structure(head)[1])
    tensors = require_file(directory / TENSORS)
    try:
        stored = load_file(tensors)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{tensors} cannot be read: {error}") from None
    for name, leaf in expected.items():
        shape = stored[name].shape if name in stored else None
        if shape != leaf.shape:
            raise ModelError(f"{tensors}: {name} must have the shape {leaf.shape}; got {shape}")
        if not np.isfinite(stored[name].astype(np.float32)).all():
            raise ModelError(f"{tensors}: {name} must be finite")
        if name == draft_head.LISTED and not ((stored[name] >= 0) & (stored[name] < config.vocab_size)).all():
            raise ModelError(f"{tensors}: {name} must be tokens of the model, below {config.vocab_size}")
    leaves = [_placed(name, stored[name], dtype) for name in expected]
    return head, jax.tree.unflatten(jax.tree.structure(draft_head.head_structure(head)[1]), leaves)


def _placed(name: str, stored: np.ndarray, dtype: Any) -> jax.Array:
    """A parameter as a head computes with it; a matrix stays bfloat16 where products widen it at no cost.

    Args:
        name: the name of the parameter on disk.
        stored: its numbers.
        dtype: the dtype that the head computes in.
    """
    if name == draft_head.LISTED:
        return jnp.asarray(stored, jnp.int32)
    narrow = stored.ndim == 2 and stored.dtype == jnp.bfloat16 and jnp.dtype(dtype) == jnp.float32
    if narrow and skinny_matmul.reads_as_stored("bfloat16"):
        return jnp.asarray(stored)
    return jnp.asarray(stored.astype(np.float32), dtype)


def save(directory: Path, head: draft_head.DraftHead, weights: Params, dtype: Any = jnp.bfloat16) -> None:
    """Write a draft head to a directory, which is made.

    Args:
        directory: its path.
        head: whose configuration is written.
        weights: the parameters of the head.
        dtype: the dtype of the tensors on disk.
    """
    directory.mkdir(parents=True, exist_ok=True)
    described = {"model_type": MODEL_TYPE, **dataclasses.asdict(head.config)}
    (directory / "config.json").write_text(json.dumps(described, indent=2) + "\n", "utf-8")
    tensors = {name: np.asarray(leaf) for name, leaf in draft_head.named(weights).items()}
    tensors |= {name: leaf.astype(dtype) for name, leaf in tensors.items() if name != draft_head.LISTED}
    save_file(tensors, directory / TENSORS)


def _checked(raw: Mapping[str, Any], config: Config) -> draft_head.HeadConfig:
    """The configuration in a config.json, of a head for a model. Raises ModelError for any other.

    Args:
        raw: the parsed file.
        config: the configuration of the model.
    """
    for name in SIZES:
        if name == "layer" and name in raw and raw[name] is None:
            continue
        if not is_integer(raw.get(name)) or not 0 <= raw[name] < 2**20:
            raise ModelError(f"{name} must be a whole number below 2**20; got {abbreviate(raw.get(name))}")
    for name in ("hidden_size", "vocab_size", "num_hidden_layers"):
        if raw[name] != (expected := getattr(config, name)):
            raise ModelError(f"{name} must be that of the model, {expected}; got {raw[name]}")
    if raw["intermediate_size"] < 1:
        raise ModelError("intermediate_size must be at least 1; got 0")
    draft_head.attention_of(config, raw["layer"])
    window = raw.get("window")
    if window is not None and not (is_integer(window) and 0 < window < 2**31):
        raise ModelError(f"window must be null or a whole number from 1 on; got {abbreviate(window)}")
    drafted = raw.get("drafted_tokens")
    if drafted is not None and not (is_integer(drafted) and 0 < drafted <= config.vocab_size):
        raise ModelError(
            f"drafted_tokens must be null or at most {config.vocab_size}; got {abbreviate(drafted)}"
        )
    tables: dict[str, Any] = {name: raw.get(name) for name in TABLES}
    for name, values in tables.items():
        if not isinstance(values, list) or not all(_is_number(value) for value in values):
            raise ModelError(f"{name} must be a list of numbers; got {abbreviate(values)}")
    edges: Any = tables["entropy_edges"]
    acceptance: list[Any] = [*tables["acceptance"], raw.get("mean_acceptance")]
    if edges != sorted(edges) or len(acceptance) != len(edges) + 2:
        raise ModelError("entropy_edges must ascend, with one acceptance more than edges; got others")
    if not all(_is_number(value) and 0 < value < 1 for value in acceptance):
        raise ModelError(f"acceptance and mean_acceptance must lie in (0, 1); got {abbreviate(acceptance)}")
    sizes = {name: raw[name] for name in SIZES}
    return draft_head.HeadConfig(
        **sizes,
        window=window,
        drafted_tokens=drafted,
        entropy_edges=tuple(map(float, edges)),
        acceptance=tuple(map(float, tables["acceptance"])),
        mean_acceptance=float(raw["mean_acceptance"]),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))
