"""Every benchmark runs as a command, and its folder has the same files as the others."""

import json
import subprocess
import sys

import pytest

from benchmarks.harness.paths import ROOT

SHARED = ("harness", "results")
# A folder with a command, perhaps inside that of a benchmark whose tasks or subject it shares.
BENCHMARKS = sorted(
    ".".join(path.parent.relative_to(ROOT / "benchmarks").parts)
    for path in (ROOT / "benchmarks").rglob("__main__.py")
    if path.relative_to(ROOT / "benchmarks").parts[0] not in SHARED
)
FOLDERS = [path for path in (ROOT / "benchmarks").iterdir() if path.is_dir() and any(path.glob("*.py"))]
COMMANDS_OF_HARNESS = ("harness.bandwidth", "harness.baselines.worker")
WITHOUT_PAGE = ("publish", "embedded_model", "serving_overhead")


def test_all_are_there():
    names = (
        "ablation ablation.certificate ablation.experts ablation.second_pass decode decode.quantization "
        "embedded_model entropy kernels long_context"
    )
    assert [
        *names.split(),
        "long_context.head_budgets",
        "optimisers",
        "publish",
        "sampling",
        "sampling.temperature",
        "scheduling",
        "serving",
        "serving.draft_latency",
        "serving.interference",
        "serving_overhead",
        "slices",
        "soak",
        "speculation",
        "speculation.lengths",
        "speculation.lossless",
        "speculation.peers",
        "speculation.signals",
        "speculation.tasks",
        "stability",
        "start_up",
        "start_up.compilation",
        "start_up.loading",
    ] == BENCHMARKS
    assert {path.name for path in FOLDERS} - {*SHARED} == {name for name in BENCHMARKS if "." not in name}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_files_have_the_names_of_their_parts(name):
    files = {path.name for path in (ROOT / "benchmarks").joinpath(*name.split(".")).glob("*.py")}
    if name != "publish":
        assert "measure.py" in files
    if name not in WITHOUT_PAGE:
        assert "report.py" in files


# Runs `python -m MODULE --help` for each module of the arguments, and prints status and output of each.
HELP = """
import contextlib, io, json, runpy, sys, traceback

def help_of(module):
    output = io.StringIO()
    sys.argv = [module, "--help"]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            return end.code, output.getvalue()
        except BaseException:
            return traceback.format_exc(), output.getvalue()
    return "it did not end", output.getvalue()

print(json.dumps({module: help_of(module) for module in sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, tuple[object, str]]:
    """Status and output of every command with `--help`; one process imports JAX for all of them."""
    modules = [f"benchmarks.{name}" for name in (*BENCHMARKS, *COMMANDS_OF_HARNESS)]
    command = [sys.executable, "-c", HELP, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BENCHMARKS, *COMMANDS_OF_HARNESS])
def test_a_benchmark_tells_its_options(helps, name):
    status, output = helps[f"benchmarks.{name}"]
    assert status in (0, None), output
    assert "usage:" in output and "--help" in output
    if name not in (*WITHOUT_PAGE, *COMMANDS_OF_HARNESS):
        assert "--document" in output and "docs/results/" in output
