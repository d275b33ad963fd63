"""Every benchmark runs as a command, and its folder has the same files as the others."""

import subprocess
import sys

import pytest

from benchmarks.harness.paths import ROOT

SHARED = ("harness", "results")
BENCHMARKS = sorted(
    path.name
    for path in (ROOT / "benchmarks").iterdir()
    if path.is_dir() and path.name not in SHARED and any(path.glob("*.py"))
)


def test_all_are_there():
    names = "ablation bandwidth decode embedded_model entropy kernels loading long_context optimisers publish"
    assert [
        *names.split(),
        "sampling",
        "scheduling",
        "serving",
        "serving_overhead",
        "soak",
        "speculation",
        "stability",
        "start_up",
        "temperature",
    ] == BENCHMARKS


@pytest.mark.parametrize("name", BENCHMARKS)
def test_files_have_the_names_of_their_parts(name):
    files = {path.name for path in (ROOT / "benchmarks" / name).glob("*.py")}
    assert "__main__.py" in files
    if name != "publish":
        assert "measure.py" in files
    if name not in ("publish", "bandwidth", "embedded_model", "loading", "serving_overhead"):
        assert "report.py" in files


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BENCHMARKS, "harness.baselines.worker"])
def test_a_benchmark_tells_its_options(name):
    command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout and "--help" in done.stdout
    if name not in (
        "publish",
        "bandwidth",
        "embedded_model",
        "loading",
        "serving_overhead",
        "harness.baselines.worker",
    ):
        assert "--document" in done.stdout and "docs/results/" in done.stdout
