"""Compilers and interpreters for TPU and GPU that run without either.

    compiled = compile_for_tpu(kernel, like(64, 128256), generation="v5e")   # libtpu, down to machine code
    program = compile_for_gpu(kernel, like(64, 128256))                      # ptxas for sm_90a
    for mode in TPU_MODES:                                                   # numerics and memory faults
        with interpreted_on_tpu(mode):
            result = kernel(logits)
    with interpreted_on_gpu(): ...

What is not installed (`pip install -e '.[kernels]'`) skips the test that asks for it, with the reason.
"""

import contextlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from entropic_jax.analysis.ahead_of_time import devices_of, without_cache

# The smallest topology of each generation.
TPU_TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
GENERATIONS = tuple(TPU_TOPOLOGIES)


def like(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An abstract argument."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _need(*modules: str) -> None:
    for name in modules:
        try:
            installed = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # of the package around it
            installed = False
        if not installed:
            pytest.skip(f"{name} is not installed: pip install -e '.[kernels]'")


@cache
def _tpu(generation: str) -> jax.Device:
    # No TPU is here: libtpu must neither ask the cloud for its description nor claim a device.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    name = TPU_TOPOLOGIES[generation]
    return topologies.get_topology_desc(platform="tpu", topology_name=name).devices[0]


@cache
def _gpu() -> jax.Device:
    return devices_of("h200:1")[0]


def _compile(function: Callable, arguments: tuple, device: jax.Device, **options: Any):
    sharding = SingleDeviceSharding(device)
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    # What depends on the chip while it is traced asks the default device, which never runs anything here.
    with without_cache(), jax.default_device(device):
        return jax.jit(function, **options).lower(*jax.tree.map(place, arguments)).compile()


def compile_for_tpu(
    function: Callable, *arguments: Any, generation: str, **options: Any
) -> jax.stages.Compiled:
    """Compile `jit(function, **options)` with libtpu for abstract arguments; bind static ones first."""
    _need("libtpu")
    return _compile(function, arguments, _tpu(generation), **options)


class GpuKernel(NamedTuple):
    """Report of ptxas on one kernel: registers per thread, and memory in bytes."""

    name: str
    registers: int
    stack: int
    spilled: int  # stores and loads
    warnings: tuple[str, ...]


class GpuProgram(NamedTuple):
    """A compiled program and the report on each Mosaic GPU kernel in it."""

    compiled: jax.stages.Compiled
    kernels: tuple[GpuKernel, ...]


def _report(text: str) -> Iterator[GpuKernel]:
    for part in text.split("Compiling entry function")[1:]:
        number = lambda pattern, part=part: sum(int(match) for match in re.findall(pattern, part))
        yield GpuKernel(
            name=part.split("'")[1],
            registers=number(r"Used (\d+) registers"),
            stack=number(r"(\d+) bytes stack frame"),
            spilled=number(r"(\d+) bytes spill"),
            warnings=tuple(line for line in part.splitlines() if "warning" in line.lower()),
        )


def compile_for_gpu(function: Callable, *arguments: Any, **options: Any) -> GpuProgram:
    """Compile `jit(function, **options)` with XLA and ptxas for an H200 (sm_90a)."""
    _need("jax_cuda13_plugin", "jax_plugins.xla_cuda13", "absl")
    device = _gpu()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as environment:
        environment.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
        environment.setenv("MOSAIC_GPU_DUMP_TO", folder)
        compiled = _compile(function, arguments, device, **options)
        reports = [path.read_text("utf-8") for path in sorted(Path(folder).glob("*.ptxas"))]
    return GpuProgram(compiled, tuple(kernel for text in reports for kernel in _report(text)))


# Copies that happen as late as they may, into memory that is NaN until then: finds what is read too early,
# and what is never written. Copies that happen at once, under a race detector: finds what nothing orders.
TPU_MODES = {
    "late": pltpu.InterpretParams(dma_execution_mode="on_wait", uninitialized_memory="nan"),
    "eager": pltpu.InterpretParams(dma_execution_mode="eager", detect_races=True),
}


class RaceError(AssertionError):
    """The interpreter saw two unordered accesses to the same memory."""


@contextlib.contextmanager
def interpreted_on_tpu(mode: str) -> Iterator[None]:
    """Run Pallas TPU kernels in the interpreter; a race raises an error at the end.

    The results are to be compared with the reference in either mode: a slot that is shared by two copies,
    one after the other, is no race.
    """
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as state  # no public name in 0.10.2

    pltpu.reset_tpu_interpret_mode_state()
    try:
        with pltpu.force_tpu_interpret_mode(TPU_MODES[mode]):
            yield
            jax.effects_barrier()
        if state.races is not None and state.races.races_found:
            raise RaceError("a race was found; the interpreter printed where")
    finally:
        pltpu.reset_tpu_interpret_mode_state()


@contextlib.contextmanager
def interpreted_on_gpu(detect_races: bool = True) -> Iterator[None]:
    """Run Mosaic GPU kernels in the interpreter; a race raises an error at the end."""
    try:  # no public name in 0.10.2
        from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as state
        from jax._src.pallas.mosaic_gpu.interpret import params
    except ImportError:
        pytest.skip(f"JAX {jax.__version__} has no GPU interpreter")
    state.reset_gpu_interpret_mode_state()
    try:
        with params.force_gpu_interpret_mode(params.InterpretGPUParams(detect_races=detect_races)):
            yield
            jax.effects_barrier()
        if detect_races and state.get_races().races_found:
            raise RaceError("a race was found; the interpreter printed where")
    finally:
        state.reset_gpu_interpret_mode_state()
