"""Measurements of loading: a checkpoint of random weights, and the memory and time that loading it takes."""

import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from entropic_jax.models import Config
from entropic_jax.models.config_json import to_json
from entropic_jax.models.decoder import FAMILIES
from entropic_jax.models.tensor_names import entries

from ...harness.paths import ROOT

LLAMA = "LlamaForCausalLM"
SHAPES = {
    "3b": Config(LLAMA, 128256, 3072, 8192, 28, 24, 8, 128, tie_word_embeddings=True, rope_theta=5e5),
    "tiny": Config(LLAMA, 512, 64, 128, 2, 4, 2),
}
SHARD = 2 * 10**9  # bytes of a file
BUFFER = 1 << 23  # bytes

# Run in a process of its own, whose peak memory is that of the load.
LOAD = """
import json, sys, time
from pathlib import Path
import jax
from entropic_jax import models
jax.devices()
begin, processor = time.perf_counter(), time.process_time()
models.load(sys.argv[1], sys.argv[2], progress=False)
seconds, processor = time.perf_counter() - begin, time.process_time() - processor
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(json.dumps([seconds, processor, int(peak.split()[1]) * 1024]))
"""
FILL = """
import mmap, sys, time
import numpy as np
begin = time.perf_counter()
np.frombuffer(mmap.mmap(-1, int(sys.argv[1])), np.uint8).fill(1)
print(time.perf_counter() - begin)
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


def disk_rate(files: list[Path], direct: bool) -> float:
    """Bytes per second of reading files that are not in the page cache into one small buffer.

    Args:
        files: the files to read.
        direct: whether past the page cache.
    """
    forget(files)
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    begin, buffer = time.perf_counter(), mmap.mmap(-1, BUFFER)
    for file in files:
        descriptor = os.open(file, flags)
        position = 0
        while count := os.preadv(descriptor, [buffer], position):
            position += count
            if position % BUFFER:
                break
        os.close(descriptor)
    return sum(file.stat().st_size for file in files) / (time.perf_counter() - begin)


def memory_rate(size: int) -> float:
    """Bytes per second at which a process of its own writes to memory that is new to it."""
    done = subprocess.run([sys.executable, "-c", FILL, str(size)], capture_output=True, text=True, check=True)
    return size / float(done.stdout)


def measured_round(directory: Path, dtype: str) -> dict[str, float]:
    """Measurements of one load, and of the disk and the memory before it.

    Args:
        directory: the directory of the checkpoint.
        dtype: the dtype that the weights become.
    """
    files = sorted(directory.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    disk, direct = disk_rate(files, direct=False), disk_rate(files, direct=True)
    memory = memory_rate(size)
    forget(files)
    command = [sys.executable, "-c", LOAD, str(directory), dtype]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, processor_seconds, peak = json.loads(done.stdout)
    return {
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "peak_gb": peak / 1e9,
        "load_gb_per_second": size / seconds / 1e9,
        "disk_gb_per_second": disk / 1e9,
        "direct_disk_gb_per_second": direct / 1e9,
        "memory_gb_per_second": memory / 1e9,
        "load_over_disk": size / seconds / max(disk, direct),
    }
