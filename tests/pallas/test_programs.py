"""Every kernel through the compilers for TPU and GPU: no copy of a page pool, no register spills.

Compilers are in the extra `kernels`. What is always compiled is a sample; `-m exhaustive` compiles the rest.
"""

from itertools import groupby

import jax
import pytest

from .compilers import GENERATIONS, compile_for_gpu, compile_for_tpu
from .programs import programs, size

# By operation, the places among its programs: on one generation, on every one, and on a GPU.
ON_V5E = {
    "decode": (0, 2, 8, 9, 10, 11),
    "prefill": (1, 10, 11),
    "write": (0, 3, 6),
    "select_pages": (0,),
    "topk_entropy": (1,),
    "project": (2,),
}
ON_EACH = {"decode": (1,), "topk_entropy": (4,), "project": (0,)}
ON_GPU = {
    "decode": (0, 1, 7, 9, 10),
    "prefill": (1, 9),
    "write": (0,),
    "select_pages": (0,),
    "topk_entropy": (1, 4),
    "project": (0,),
}
IN_XLA = ("write", "select_pages")  # on a GPU, where plain JAX serves
REGISTERS = {"topk_entropy": 65536 // 5 // 128 // 8 * 8}  # of float32 segments five share a multiprocessor


def parameters(platform: str, *always) -> list:
    faults = []
    for operation, group in groupby(programs(platform), lambda program: program.operation):
        for place, program in enumerate(group):
            kept = any(place in places.get(operation, ()) for places in always)
            marks = () if kept else pytest.mark.exhaustive
            faults.append(pytest.param(program, marks=marks, id=f"{operation}-{program.case}"))
    return faults


def on_tpu(program, generation):
    try:
        compiled = compile_for_tpu(
            program.function, *program.arguments, generation=generation, **program.options
        )
    except NotImplementedError as declined:
        pytest.skip(str(declined))
    assert compiled.memory_analysis().temp_size_in_bytes <= program.limit
    if program.operation == "write":
        in_place(program, compiled)


def in_place(program, compiled):
    pools = jax.tree.leaves((program.arguments[0], program.arguments[1][:3]))
    aliased = compiled.memory_analysis().alias_size_in_bytes
    assert aliased >= size(pools)


@pytest.mark.parametrize("program", parameters("tpu", ON_V5E, ON_EACH))
def test_on_v5e(program):
    on_tpu(program, "v5e")


@pytest.mark.parametrize("generation", [name for name in GENERATIONS if name != "v5e"])
@pytest.mark.parametrize("program", parameters("tpu", ON_EACH))
def test_on_every_generation(program, generation):
    on_tpu(program, generation)


@pytest.mark.parametrize("program", parameters("gpu", ON_GPU))
def test_on_hopper(program):
    try:
        compiled, kernels = compile_for_gpu(program.function, *program.arguments, **program.options)
    except NotImplementedError as declined:
        pytest.skip(str(declined))
    assert compiled.memory_analysis().temp_size_in_bytes <= program.limit
    assert bool(kernels) == (program.operation not in IN_XLA)
    if program.operation == "write":
        in_place(program, compiled)
    for kernel in kernels:
        assert (kernel.spilled, kernel.stack, kernel.warnings) == (0, 0, ())
        assert kernel.registers <= REGISTERS.get(program.operation, 255)
