"""Writes the table of docs/kernels.md: where each kernel has been checked.

    python -m tests.pallas.table            # every case, interpreted and compiled: minutes
    python -m tests.pallas.table --resume   # what the last run, interrupted, had not come to
    python -m tests.pallas.table --show     # the table alone, from the stored results

A cell is `yes`, a number in brackets (a note under the table says why the kernel declines), `fails`, or `–`
where there is nothing to run: large shapes are compiled, small ones interpreted. What ran on hardware is what
`benchmarks.kernels` stored in benchmarks/results.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", str(max(4, os.cpu_count() or 1)))  # see tests/conftest.py

import pytest
from rich.console import Console

from benchmarks.harness import provenance
from entropic_jax.pallas.paged_attention import cases as paged_cases
from entropic_jax.pallas.topk_entropy import cases as topk_cases

from . import test_paged_attention_kernels as paged_tests
from . import test_paged_prefill_and_write_kernels as prefill_tests
from . import test_topk_entropy as topk_tests
from .compilers import (
    GENERATIONS,
    TPU_MODES,
    compile_for_gpu,
    compile_for_tpu,
    interpreted_on_gpu,
    interpreted_on_tpu,
)
from .programs import programs

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "kernels.md"
RESULTS = ROOT / "benchmarks" / "results" / "kernels-proof.json"
BEGIN, END = "<!-- proof: written by python -m tests.pallas.table -->", "<!-- end of proof -->"
MEASURED_CODE = ("entropic_jax/pallas", "tests/pallas")
TPU = ("TPU interpreted", *GENERATIONS)
GPU = ("GPU interpreted", "sm_90a")
COLUMNS = (*TPU, *GPU, "ran on hardware")
YES, NO, NOTHING = "yes", "no", "–"

Trial = tuple[str, str, str, Callable[[], Any]]  # operation, case, column, what raises if it does not work


def trials() -> Iterator[Trial]:
    """All combinations of operation, case and device to try."""
    yield from interpreted()
    for program in programs("tpu"):
        for generation in GENERATIONS:
            compiled = lambda p=program, g=generation: _within(
                p, compile_for_tpu(p.function, *p.arguments, generation=g, **p.options)
            )
            yield program.operation, program.case, generation, compiled
    for program in programs("gpu"):
        yield program.operation, program.case, "sm_90a", lambda p=program: _on_hopper(p)


def _within(program, compiled) -> None:
    taken = compiled.memory_analysis().temp_size_in_bytes
    assert taken <= program.limit, f"temporary memory must be at most {program.limit} bytes; got {taken}"


def _on_hopper(program) -> None:
    compiled, kernels = compile_for_gpu(program.function, *program.arguments, **program.options)
    _within(program, compiled)
    for kernel in kernels:
        assert not kernel.spilled and not kernel.stack, f"{kernel.name} spills"


def interpreted() -> Iterator[Trial]:
    """The small cases in the interpreters; on a TPU in both modes, on a GPU with its race detector."""

    def in_both_modes(call: Callable[[str], Any]) -> Callable[[], Any]:
        return lambda: [call(mode) for mode in TPU_MODES]

    for case in paged_cases.SMALL:
        yield "decode", case.name, TPU[0], in_both_modes(lambda mode, c=case: _decode_on_tpu(c, mode))
    for case in paged_tests.GPU_CASES:
        yield "decode", case.name, GPU[0], lambda c=case: _decode_on_gpu(c)
    for case in prefill_tests.SMALL:
        yield "prefill", case.name, TPU[0], in_both_modes(lambda mode, c=case: _prefill(c, mode))
    for case in prefill_tests.GPU_CASES:
        yield "prefill", case.name, GPU[0], lambda c=case: _prefill_on_gpu(c)
    for dtype in ("float32", "bfloat16"):
        check = lambda mode, d=dtype: prefill_tests.check_write(paged_tests.jnp.dtype(d), mode)
        yield "write", f"5x2x128-page32x9-{dtype}", TPU[0], in_both_modes(check)
    for dtype in ("int8", "float8_e4m3fn"):
        check = lambda mode, d=dtype: prefill_tests.check_quantised_write(d, mode)
        yield "write", f"5x2x128-page128x9-bfloat16-{dtype}", TPU[0], in_both_modes(check)
    for case in topk_cases.SMALL:
        yield "topk_entropy", case.name, TPU[0], in_both_modes(lambda mode, c=case: _topk_on_tpu(c, mode))
        yield "topk_entropy", case.name, GPU[0], lambda c=case: _topk_on_gpu(c)
    for shape in topk_tests.PROJECTED:
        rows, hidden, vocabulary, k = shape
        name = f"{rows}x{hidden}x{vocabulary}-k{k}-float32"
        yield (
            "project",
            name,
            TPU[0],
            in_both_modes(lambda mode, s=shape: topk_tests.check_projection(s, mode)),
        )


def _decode_on_tpu(case, mode: str) -> None:
    inputs, arguments = paged_tests.arguments_of(case)
    with pytest.MonkeyPatch.context() as patch:
        paged_tests.shrink(patch)
        paged_tests.check(paged_tests.on_tpu(case, arguments, mode), case, inputs)


def _decode_on_gpu(case) -> None:
    inputs, arguments = paged_tests.arguments_of(case)
    with pytest.MonkeyPatch.context() as patch:
        paged_tests.shrink(patch)
        paged_tests.check(paged_tests.on_gpu(case, arguments, detect_races=True), case, inputs)


def _prefill(case, mode: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        prefill_tests.shrink(patch)
        prefill_tests.check_prefill(case, mode)


def _prefill_on_gpu(case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        prefill_tests.shrink(patch)
        prefill_tests.check_prefill_on_gpu(case)


def _topk_on_tpu(case, mode: str) -> None:
    with interpreted_on_tpu(mode):
        topk_tests.run(topk_tests.tiny, case)


def _topk_on_gpu(case) -> None:
    with interpreted_on_gpu():
        topk_tests.run(topk_tests.portable, case)


def attempt(call: Callable[[], Any]) -> str:
    """The verdict: `yes`, `declines: …` or `fails: …`."""
    try:
        call()
    except NotImplementedError as declined:
        return f"declines: {declined}"
    except AssertionError as failed:
        return f"fails: {_first_line(failed)}"
    except Exception as error:  # an entry of the table, not the end of it
        return f"fails: {type(error).__name__}: {_first_line(error)}"
    return YES


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def measure(stored: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Try what has no result yet. Returns the run, and its results by operation, case and column."""
    for operation, case, column, call in trials():
        cells = stored["operations"].setdefault(operation, {}).setdefault(case, {})
        if column not in cells:
            cells[column] = attempt(call)
            say(f"{operation} {case} {column}: {cells[column]}")
            RESULTS.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return stored


def on_hardware(folder: Path = RESULTS.parent) -> dict[tuple[str, str], str]:
    """The devices on which a case of an operation ran and passed."""
    ran: dict[tuple[str, str], list[str]] = {}
    for path in sorted(folder.glob("kernels-*.json")):
        stored = json.loads(path.read_text("utf-8"))
        for case in stored.get("cases", []):
            if case["verdict"] == YES:
                ran.setdefault((case["operation"], case["case"]), []).append(stored["device"])
    return {case: f"{YES}: {', '.join(devices)}" for case, devices in ran.items()}


def table(stored: dict[str, Any], ran: dict[tuple[str, str], str]) -> str:
    """The table and its notes, as a section of the document.

    Args:
        stored: the results of a run; see `measure`.
        ran: what ran on hardware; see `on_hardware`.
    """
    reasons: list[str] = []
    header = ["operation", "case", *COLUMNS]
    lines = [header, ["---"] * len(header)]
    for operation, cases in stored["operations"].items():
        for case, cells in cases.items():
            row = [operation, case]
            for column in COLUMNS[:-1]:
                row.append(_cell(cells.get(column), reasons))
            lines.append([*row, ran.get((operation, case), NO)])
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    notes = "\n".join(f"- [{number}] {reason}" for number, reason in enumerate(reasons, 1))
    stamp = f"*{provenance.stamp([stored['run']], MEASURED_CODE)}*"
    return f"{BEGIN}\n\n{stamp}\n\n{text}\n\n{notes}\n\n{END}".replace("\n\n\n", "\n")


def _cell(verdict: str | None, reasons: list[str]) -> str:
    if verdict is None:
        return NOTHING
    if verdict == YES:
        return YES
    if verdict not in reasons:
        reasons.append(verdict)
    number = reasons.index(verdict) + 1
    return f"fails [{number}]" if verdict.startswith("fails") else f"[{number}]"


def write(section: str) -> None:
    """Replace the section of the document."""
    before, rest = DOCUMENT.read_text("utf-8").split(BEGIN)
    DOCUMENT.write_text(before + section + rest.split(END)[1], "utf-8")


def main() -> None:
    """Run the trials, store the results, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--show", action="store_true", help="from the stored results; tries nothing")
    parser.add_argument("--resume", action="store_true", help="tries what is not among the stored results")
    options = parser.parse_args()
    if options.show or options.resume:
        stored = json.loads(RESULTS.read_text("utf-8"))
    else:
        stored = {"run": provenance.describe_run(Console(stderr=True)), "operations": {}}
    if not options.show:
        stored = measure(stored, lambda line: print(line, flush=True))
    write(table(stored, on_hardware()))


if __name__ == "__main__":
    main()
