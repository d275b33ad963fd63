"""Conversion of a model directory into a converted checkpoint, for fast starts; see `converted`."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from . import converted, sharding
from .config import ModelError
from .model import (
    Model,
    checked,
    directory_of,
    quantised,
    read_config,
    read_config_json,
    read_tokenizer,
    tensor_reader,
)
from .quantisation import check_quantization
from .tokenizer_files import is_there

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")  # of which a directory without GGUF needs one


def convert(
    path: str | Path,
    output: str | Path,
    dtype: Any = "float32",
    progress: bool = True,
    mesh: Mesh | None = None,
    quantization: str | None = None,
) -> None:
    """Write a directory that `load` reads without conversion, on any mesh; see `converted`.

    With several processes, all call this with the same arguments, and each writes the shards of its devices.

    Args:
        path: the path of a model directory that is not converted.
        output: the path of the new directory, which must be missing or empty.
        dtype: the dtype of the weights, as in `load`.
        progress: whether to show a bar on stderr where that is a terminal.
        mesh: over which the weights are divided while they are converted; None for the default device.
        quantization: the quantization of the weights, as in `load`.

    Raises:
        ModelError: as in `load`, or the output cannot be written to.
    """
    directory, target = directory_of(path), Path(output)
    dtype, quantization = checked(dtype), check_quantization(quantization)
    if not directory.is_dir():
        raise ModelError(f"path must be a directory with config.json and safetensors files; got {path}")
    config, raw = read_config(directory, mesh), read_config_json(directory)
    if converted.description(directory) is not None:
        raise ModelError(f"path must be a model that is not converted; got {path}")
    if sharding.kv_head_copies(config, sharding.model_devices(mesh)) > 1:
        raise ModelError(
            f"mesh must have at most {config.num_key_value_heads} devices, the KV heads, for a conversion; "
            f"got {sharding.model_devices(mesh)}"
        )
    leads = jax.process_index() == 0
    if leads and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"output must be a missing or empty directory; got {output}")
    read = tensor_reader(directory, config, dtype, progress, mesh, quantization)
    tokenizer = read_tokenizer(directory)
    if leads:
        target.mkdir(parents=True, exist_ok=True)
        converted.copy_files(directory, target, raw)
        if tokenizer is not None and not any(map(is_there, (target / n for n in TOKENIZER_FILES))):
            tokenizer.save(target)
    model = Model(config, read(np.dtype(np.float32), True), mesh=mesh)
    model = model if quantization is None else quantised(model, quantization)
    converted.write(target, model.params, config, dtype, quantization)
