"""The benchmark of entropy estimators runs as a command and exits cleanly."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_a_quick_run_ends_well():
    """A process whose kernels ran on several threads exits without a crash."""
    command = [sys.executable, "-m", "benchmarks.entropy", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Milliseconds a token" in done.stdout
