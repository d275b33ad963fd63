"""Random LoRA adapters on disk, and their effect merged into weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from entropic_jax.models import lora, tensor_names


def write_adapter(
    directory: Path, model: Any, seed: int, rank: int = 4, size: float = 0.3, **settings: Any
) -> Path:
    """A random adapter of every linear layer that may have one, as PEFT would write it.

    Args:
        directory: is made.
        model: that the adapter is for.
        seed: of its weights.
        rank: of all its layers.
        size: standard deviation of what is added to the weights of each layer, relative to A and B.
        **settings: of adapter_config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rng, tensors, modules = np.random.default_rng(seed), {}, set()
    for entry in tensor_names.entries(model.config):
        name = entry.path[3] if len(entry.path) == 5 and entry.path[4] == "kernel" else ""
        if entry.path[0] != "layers" or name not in lora.BLOCKS:
            continue
        module = entry.pieces[0].name.removesuffix(".weight")
        outputs, inputs = entry.pieces[0].stored_shape
        modules.add(module.rpartition(".")[2])
        draw = lambda *shape: (size * rng.standard_normal(shape)).astype(np.float32)
        tensors[f"base_model.model.{module}.lora_A.weight"] = draw(rank, inputs)
        tensors[f"base_model.model.{module}.lora_B.weight"] = draw(outputs, rank)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    config |= {"target_modules": sorted(modules), **settings}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
