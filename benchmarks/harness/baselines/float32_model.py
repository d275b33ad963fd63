"""A model directory in float32, and a shorter copy of it that drafts, for engines that read no bfloat16."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

LAYER = re.compile(r"model\.layers\.(\d+)\.")


def write_float32(model: Path, work: Path, layers: Sequence[int] | None = None) -> Path:
    """The folder `work`, with the model as a Hugging Face directory in float32; written at the first call.

    Args:
        model: the directory of the model.
        work: holds `huggingface/`, and what is converted from it.
        layers: the numbers of the layers to keep, with the embedding and the last norm; None for all.
    """
    import ml_dtypes  # noqa: F401  # teaches NumPy bfloat16
    from safetensors.numpy import load_file, save_file

    directory = work / "huggingface"
    if (directory / "config.json").exists():
        return work
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text("utf-8")) | {"torch_dtype": "float32"}
    weights = {k: v.astype(np.float32) for k, v in load_file(model / "model.safetensors").items()}
    if layers is not None:
        config["num_hidden_layers"] = len(layers)
        renamed = {name: _name_in_copy(name, layers) for name in weights}
        weights = {new: weights[name] for name, new in renamed.items() if new is not None}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, directory / name)
    # The last file, which says that the others are complete.
    (directory / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    return work


def _name_in_copy(name: str, layers: Sequence[int]) -> str | None:
    """The name of a tensor in a copy with fewer layers; None if its layer is left out.

    >>> names = "model.layers.4.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight", "model.norm.weight"
    >>> [_name_in_copy(name, (0, 4)) for name in names]
    ['model.layers.1.mlp.up_proj.weight', None, 'model.norm.weight']
    """
    match = LAYER.match(name)
    if match is None:
        return name
    number = int(match[1])
    return LAYER.sub(f"model.layers.{layers.index(number)}.", name) if number in layers else None
