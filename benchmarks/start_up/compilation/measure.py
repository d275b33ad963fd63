"""Measurement of compilation: a decode step for a TPU topology, compiled in a process of its own."""

import json
import os
import subprocess
import sys
from typing import Any

from entropic_jax.models import Config

from ...harness.paths import ROOT

LLAMA = "LlamaForCausalLM"
SHAPES = {  # Llama 3.1's, and one that compiles in seconds
    "70b": Config(LLAMA, 128256, 8192, 28672, 80, 64, 8, 128, rope_theta=5e5),
    "8b": Config(LLAMA, 128256, 4096, 14336, 32, 32, 8, 128, rope_theta=5e5),
    "tiny": Config(LLAMA, 4096, 512, 1024, 4, 8, 8, 128),
}
CONTEXT, PAGE = 8192, 128  # positions of a row, and of a page

# Run in a process of its own: the tracing caches of one step would serve the next.
COMPILE = """
import importlib.metadata, json, sys, time
import jax
from benchmarks.start_up.compilation.measure import CONTEXT, PAGE, SHAPES
from entropic_jax.analysis import ahead_of_time
from entropic_jax.methods.presets import preset
topology, shape, rows, form = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
devices = ahead_of_time.devices_of(topology)
batch = ahead_of_time.Batch(rows, CONTEXT, PAGE, rows * CONTEXT // PAGE)
dtypes = "bfloat16", "bfloat16"
begin = time.perf_counter()
lowered = ahead_of_time.lower_step(
    SHAPES[shape], devices, batch, dtypes, preset("off", platform="tpu"), stacked=form == "scanned"
)
lowering = time.perf_counter() - begin
program = ahead_of_time.compiled(lowered)
memory = program.memory_analysis()
print(json.dumps({
    "lowering_seconds": lowering,
    "compiling_seconds": time.perf_counter() - begin - lowering,
    "temporary_bytes": memory.temp_size_in_bytes,
    "code_bytes": memory.generated_code_size_in_bytes,
    "jax": jax.__version__,
    "libtpu": importlib.metadata.version("libtpu"),
}))
"""


def compiled(topology: str, shape: str, rows: int, form: str) -> dict[str, Any]:
    """Seconds, temporaries and code of one step.

    Args:
        topology: name of the TPU topology.
        shape: the name of a model's shape in `SHAPES`.
        rows: sequences of the step.
        form: "unrolled" or "scanned".

    Raises:
        RuntimeError: the step cannot be compiled, with the last line of what the process wrote.
    """
    command = [sys.executable, "-c", COMPILE, topology, shape, str(rows), form]
    # libtpu stops at flags that only the XLA of CPUs knows.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"layers {form} cannot be compiled for {topology}: {reason}")
    return json.loads(process.stdout.splitlines()[-1])
