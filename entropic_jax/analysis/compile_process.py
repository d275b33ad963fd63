"""Compilation of a decode step in a process of its own, so that a compiler that crashes ends nothing else."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from entropic_jax.methods.presets import preset

from . import ahead_of_time
from .step_needs import StepNeeds, from_program


class Request(NamedTuple):
    """The decode step of a plan."""

    config: Any  # a `models.Config`
    topology: str
    chips: int  # the first of the topology, which hold the model
    batch: ahead_of_time.Batch
    dtypes: tuple[Any, ...]  # as for `ahead_of_time.lower_step`
    preset: str
    sequences: int  # of the engine that the preset is for
    platform: str
    experts: int
    page_shards: int | None


def compiled_needs(request: Request) -> StepNeeds:
    """The needs of the step, from its compiled program. Raises RuntimeError where it cannot be compiled."""
    ahead_of_time.devices_of(request.topology)
    # libtpu stops at flags that only the XLA of CPUs knows.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder, "request"), Path(folder, "needs")
        question.write_bytes(pickle.dumps(request))
        command = [sys.executable, "-m", __name__, str(question), str(answer)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode < 0:
            raise RuntimeError(f"the compiler ended with {signal.Signals(-done.returncode).name}")
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1][:300])
        return pickle.loads(answer.read_bytes())


def compile_step(request: Request) -> StepNeeds:
    """The needs of the step, compiled in this process.

    Args:
        request: the step.
    """
    setting = preset(request.preset, request.sequences, platform=request.platform)
    lowered = ahead_of_time.lower_step(
        request.config,
        ahead_of_time.devices_of(request.topology)[: request.chips],
        request.batch,
        request.dtypes,
        setting,
        request.experts,
        page_shards=request.page_shards,
    )
    return from_program(ahead_of_time.compiled(lowered))


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    # The class of the request is that of the module by its name, not that of `__main__`.
    from entropic_jax.analysis import compile_process

    step = pickle.loads(Path(sys.argv[1]).read_bytes())
    Path(sys.argv[2]).write_bytes(pickle.dumps(compile_process.compile_step(step)))
