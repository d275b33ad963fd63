"""Memory of the programs of a step on a mesh, temporaries included: no device holds more than its share."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .mesh_memory import CHUNK, CONFIG, DRAFTED, ROWS

DEVICES = 8
# What LLVM leaves out changes no buffer.
QUICK_WITH_SAME_BUFFERS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
GROUPED = f"{DEVICES}/2"  # two KV heads, each of which four devices divide
# Tokens of a pass, and the width of what every device has of each: logits, or the residual stream.
PASSES = {
    "decode": (ROWS, CONFIG.vocab_size),
    "verify": (ROWS * (1 + DRAFTED), CONFIG.vocab_size),
    "prefill": (CHUNK, CONFIG.hidden_size),
}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What `tests.mesh_memory` prints: one device and the mesh, with the same kernels."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.mesh_memory", "1", str(DEVICES), GROUPED],
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        timeout=1200,
        env={
            **os.environ,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES} {QUICK_WITH_SAME_BUFFERS}",
            "ENTROPIC_KERNELS": "xla",
        },
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("case", [str(DEVICES), GROUPED])
@pytest.mark.parametrize("program", PASSES)
def test_a_program_holds_its_share_of_weights_and_pool_and_five_percent(report, program, case):
    mesh = report[case]
    share = (mesh["weights"] + mesh["pool"]) / DEVICES
    held = sum(mesh[program].values())
    assert 0.7 * share < held <= 1.05 * share


@pytest.mark.slow
@pytest.mark.parametrize("program", PASSES)
def test_temporaries_are_divided_but_for_the_activations_that_every_device_has(report, program):
    device, mesh = (report[number][program]["temporaries"] for number in ("1", str(DEVICES)))
    tokens, width = PASSES[program]
    activations = 4 * tokens * width
    assert mesh <= device / DEVICES + 3 * activations
    matrix = 4 * CONFIG.hidden_size * CONFIG.intermediate_size
    assert device / DEVICES + 3 * activations < matrix, "a gathered matrix would not be seen"
