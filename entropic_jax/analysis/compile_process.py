"""Compilation in a process of its own, so that a compiler that crashes ends nothing else."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
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
    return in_a_process(_compile_step, request)


def _compile_step(request: Request) -> StepNeeds:
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


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function that compiles, called in a process of its own.

    Args:
        function: a function of a module, which pickle can name.
        arguments: its arguments, which pickle can copy, as it can the result.

    Raises:
        RuntimeError: The function raises an exception, or the compiler ends the process.
    """
    # libtpu stops at flags that only the XLA of CPUs knows.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder, "call"), Path(folder, "result")
        question.write_bytes(pickle.dumps((function, arguments)))
        command = [sys.executable, "-m", __name__, str(question), str(answer)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode < 0:
            raise RuntimeError(f"the compiler ended with {signal.Signals(-done.returncode).name}")
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1][:300])
        return pickle.loads(answer.read_bytes())


if __name__ == "__main__":
    call, values = pickle.loads(Path(sys.argv[1]).read_bytes())
    Path(sys.argv[2]).write_bytes(pickle.dumps(call(*values)))
