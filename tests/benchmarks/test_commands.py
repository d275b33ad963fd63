"""Every benchmark runs as a command, and its folder has the same files as the others."""

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


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BENCHMARKS, *COMMANDS_OF_HARNESS])
def test_a_benchmark_tells_its_options(name):
    command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout and "--help" in done.stdout
    if name not in (*WITHOUT_PAGE, *COMMANDS_OF_HARNESS):
        assert "--document" in done.stdout and "docs/results/" in done.stdout
