"""Matrix product tiles: the code that the compiler emits for them keeps all sums in registers."""

import re

import pytest

from entropic_jax import cpu_runtime

pytestmark = pytest.mark.skipif(not cpu_runtime.numba_installed(), reason="Numba is not installed")

# Triple, processor, and whether its vector registers are those of AVX-512.
TARGETS = {
    "AVX-512": ("x86_64-unknown-linux-gnu", "sapphirerapids", True),
    "AVX2": ("x86_64-unknown-linux-gnu", "znver2", False),
    "Neoverse": ("aarch64-unknown-linux-gnu", "neoverse-n1", False),
    "Apple M1": ("arm64-apple-macosx", "apple-m1", False),
}
STACK = r"\(%rsp|\[sp\b"


def assembly(target: str, rows: int, dtype: str, source: str) -> list[str]:
    """The instructions of a tile on a target."""
    import llvmlite.binding as llvm
    from llvmlite import ir

    from entropic_jax.cpu_runtime import matmul
    from entropic_jax.cpu_runtime.instructions import WORD

    triple, processor, wide = TARGETS[target]
    module = ir.Module("tile")
    module.triple = triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [WORD] * 10), "tile")
    matmul.emit_tile(function, rows, dtype, source, 4, matmul.tile_vectors(rows, wide))
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=processor, opt=3)
    parsed = llvm.parse_assembly(str(module))
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(parsed, builder)
    return machine.emit_assembly(parsed).splitlines()


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
