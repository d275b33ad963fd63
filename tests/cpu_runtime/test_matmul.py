"""Loops of products and of attention: the code that the compiler emits keeps their sums in registers."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from entropic_jax import cpu_runtime

pytestmark = pytest.mark.skipif(not cpu_runtime.numba_installed(), reason="Numba is not installed")

# Triple, processor, and whether its vector registers are those of AVX-512.
TARGETS = {
    "AVX-512": ("x86_64-unknown-linux-gnu", "sapphirerapids", True),
    "AVX-512 of Zen 4": ("x86_64-unknown-linux-gnu", "znver4", True),
    "AVX2": ("x86_64-unknown-linux-gnu", "znver2", False),
    "Neoverse": ("aarch64-unknown-linux-gnu", "neoverse-n1", False),
    "Apple M1": ("arm64-apple-macosx", "apple-m1", False),
}
STACK = r"\(%rsp|\[sp\b"


def emitted(target: str, num_arguments: int, fill: Callable[[Any], None]) -> list[str]:
    """The instructions on a target of a function of words, whose code `fill(function)` generates."""
    import llvmlite.binding as llvm
    from llvmlite import ir

    from entropic_jax.cpu_runtime.instructions import WORD

    triple, processor, _ = TARGETS[target]
    module = ir.Module("loops")
    module.triple = triple
    fill(ir.Function(module, ir.FunctionType(ir.VoidType(), [WORD] * num_arguments), "loops"))
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=processor, opt=3)
    parsed = llvm.parse_assembly(str(module))
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(parsed, builder)
    return machine.emit_assembly(parsed).splitlines()


def assembly(target: str, rows: int, dtype: str, source: str) -> list[str]:
    """The instructions of a product tile on a target."""
    from entropic_jax.cpu_runtime import matmul

    vectors = matmul.tile_vectors(rows, TARGETS[target][2])
    return emitted(target, 10, lambda function: matmul.emit_tile(function, rows, dtype, source, 4, vectors))


def attention_assembly(target: str, kernel: str, head_dim: int, dtype: str, wide: bool) -> list[str]:
    """The instructions of a kernel of attention to a page, for any number of heads.

    Args:
        target: one of `TARGETS`.
        kernel: "scores", "softmax" or "accumulate".
        head_dim: elements of a key.
        dtype: of the pages.
        wide: whether the kernel is that of AVX-512.
    """
    from llvmlite import ir

    from entropic_jax.cpu_runtime import attention, attention_scores

    if kernel == "softmax":
        operation = attention.softmax(64, head_dim, dtype == "int8", wide)
    else:
        module = attention_scores if kernel == "scores" else attention
        operation = getattr(module, kernel)(1, head_dim, 64, dtype, wide)
    num_arguments = 7 if kernel == "accumulate" else 8

    def fill(function):
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        _, generate = operation._defn(None, *[None] * num_arguments)
        generate(SimpleNamespace(get_dummy_value=str), builder, None, function.args)
        builder.ret_void()

    return emitted(target, num_arguments, fill)


def loops(lines: list[str]) -> list[list[str]]:
    """The lines of each innermost loop: from a label to the branch that goes back to it."""
    begin, label, bodies = 0, None, []
    for number, line in enumerate(lines):
        if match := re.match(r"(\.?L\w+):", line):
            begin, label = number, match[1]
        elif label and re.match(rf"\s+(j|b|cb|tb)[a-z.]*\s.*\b{re.escape(label.lstrip('.'))}\b", line):
            bodies.append(lines[begin : number + 1])
    return bodies


@pytest.mark.parametrize("rows", range(1, 7))
@pytest.mark.parametrize("target", TARGETS)
def test_loops_do_not_access_the_stack(target, rows):
    for dtype in ("float32", "bfloat16"):
        # A tile of fewer than three rows is alone, so it copies nothing.
        lines = assembly(target, rows, dtype, "both" if rows > 2 else "weight")
        bodies = [body for body in loops(lines) if any("fm" in line for line in body)]
        assert bodies
        for body in bodies:
            assert not [line for line in body if re.search(STACK, line)]


def test_the_search_finds_sums_that_do_not_fit(monkeypatch):
    from entropic_jax.cpu_runtime import matmul

    monkeypatch.setattr(matmul, "tile_vectors", lambda rows, wide: 4)
    bodies = loops(assembly("AVX2", 6, "float32", "weight"))
    assert any(re.search(STACK, line) for body in bodies for line in body)


def attention_spills(target: str, kernel: str, head_dim: int, dtype: str, wide: bool) -> int:
    """Accesses to the stack in the loops of a kernel that multiply."""
    lines = attention_assembly(target, kernel, head_dim, dtype, wide)
    bodies = [body for body in loops(lines) if sum("fm" in line for line in body) > 4]
    assert bodies
    return sum(bool(re.search(STACK, line)) for body in bodies for line in body)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kernel", ["softmax", "accumulate"])
def test_loops_of_attention_do_not_access_the_stack(kernel, dtype):
    assert attention_spills("AVX2", kernel, 64, dtype, wide=False) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_loops_of_scores_keep_their_sums_in_registers(dtype):
    # One operand of one batch, of 640 products in all.
    assert attention_spills("AVX2", "scores", 64, dtype, wide=False) <= 2


def test_the_search_finds_sums_of_attention_that_do_not_fit():
    assert attention_spills("AVX2", "accumulate", 64, "float32", wide=True) > 20
