"""Measurements of loading: a checkpoint of random weights, and the memory and time that loading it takes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from entropic_jax.models import Config
from entropic_jax.models.config_json import to_json
from entropic_jax.models.decoder import FAMILIES
from entropic_jax.models.tensor_names import entries

from ..harness.paths import ROOT

LLAMA = "LlamaForCausalLM"
SHAPES = {
    "3b": Config(LLAMA, 128256, 3072, 8192, 28, 24, 8, 128, tie_word_embeddings=True, rope_theta=5e5),
    "tiny": Config(LLAMA, 512, 64, 128, 2, 4, 2),
}
SHARD = 2 * 10**9  # bytes of a file
BUFFER = 1 << 23  # bytes

# Run in a process of its own, whose peak memory is that of the load.
LOAD = """
import json, resource, sys, time
import jax
from entropic_jax import models
jax.devices()
begin = time.perf_counter()
models.load(sys.argv[1], sys.argv[2], progress=False)
seconds = time.perf_counter() - begin
print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""


def write(directory: Path, config: Config) -> None:
    """Write a sharded checkpoint of random bfloat16 weights."""
    described = to_json(config, FAMILIES[config.architecture], "bfloat16")
    (directory / "config.json").write_text(json.dumps(described))
    random = np.random.default_rng(0).standard_normal(1 << 22, np.float32) / 50
    shapes = {piece.name: piece.stored_shape for entry in entries(config) for piece in entry.pieces}
    shard: dict[str, np.ndarray] = {}
    files: dict[str, str] = {}

    def save() -> None:
        name = f"model-{1 + len({*files.values()}):05d}.safetensors"
        save_file(shard, directory / name)
        files.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in shapes.items():
        shard[name] = np.resize(random.astype(ml_dtypes.bfloat16), shape)
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD:
            save()
    if shard:
        save()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def forget(files: list[Path]) -> None:
    """Have the system drop the files from its page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def loaded(directory: Path, dtype: str) -> dict[str, Any]:
    """Measurements of one load, and of reading the files before it.

    Args:
        directory: the directory of the checkpoint.
        dtype: that the weights become.
    """
    files = sorted(directory.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    forget(files)
    begin, buffer = time.perf_counter(), bytearray(BUFFER)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    disk = size / (time.perf_counter() - begin)
    forget(files)
    command = [sys.executable, "-c", LOAD, str(directory), dtype]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, peak = json.loads(done.stdout)
    return {
        "files_gb": size / 1e9,
        "peak_gb": peak / 1e9,
        "seconds": seconds,
        "load_gb_per_second": size / seconds / 1e9,
        "disk_gb_per_second": disk / 1e9,
        "load_over_disk": size / seconds / disk,
    }


def new_memory_rate(size: int = 1 << 30) -> float:
    """GB per second at which memory that is new to the process is written."""
    begin = time.perf_counter()
    np.empty(size, np.uint8).fill(1)
    return size / (time.perf_counter() - begin) / 1e9
