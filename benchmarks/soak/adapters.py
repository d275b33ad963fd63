"""Random LoRA adapters, so that the soak test has requests of several adapters in a batch."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from entropic_jax.models import lora
from entropic_jax.models.model import read_config

LAYERS = ("q_proj", "v_proj")
SIZE = 0.3  # standard deviation of A and B: large enough to change greedy texts
RANK = 4


def write_adapter(directory: Path, model: Path, seed: int) -> Path:
    """Write a random adapter of a model in PEFT's form.

    Args:
        directory: created for it.
        model: the directory of the model.
        seed: the seed of the weights.
    """
    random, tensors = np.random.default_rng(seed), {}
    for name, target in lora.targets(read_config(model)).items():
        if name not in LAYERS:
            continue
        for layer in target.layers:
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (RANK, target.inputs)), ("B", (target.outputs, RANK))):
                factor = SIZE * random.standard_normal(shape)
                tensors[f"{module}.lora_{part}.weight"] = factor.astype(np.float32)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none", "target_modules": LAYERS}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
