"""The static roofline of decode: what is counted, what the document says, and that no bound falls."""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys

import pytest

from benchmarks.harness.provenance import OLDER

from . import roofline

LARGEST_FALL = 0.05  # of a bound
BARS = {"v5e": 0.9, "v6e": 0.85, "v5p": 0.9}  # of the bandwidth, for lists of 8192 positions


@pytest.fixture(scope="module")
def stored():
    return json.loads(roofline.RESULTS.read_text("utf-8"))


def test_loops_of_a_program():
    program = """
     0   :  { %s1 = smov 0 }
  0x1 LB: > { %1 = dma.hbm_to_vmem x } /* Start region 7 :: Start region 3 */
  0x2 LB: >> { %v1 = vmatmul.bf16 x } /* Start region 9 */
more of it
  0x3   : >> { %3 = sbr.rel (!%p1) target = $region9 }
  0x4   :  {}
  0x5   :  {}
  0x6   :  {}
  0x7   :  {}
  0x8   : > { %4 = sbr.rel (%p2) target = $region7 }
  0x9   : > { %2 = dma.hbm_to_vmem x }
"""
    outer, inner = roofline.loops(program)
    assert (outer.first, outer.last, inner.first, inner.last) == (1, 8, 2, 3)
    assert inner.bundles == 2 + roofline.DELAY
    assert outer.holds(roofline.START) == 2  # one after the branch
    assert inner.holds(roofline.START) == 0
    with pytest.raises(ValueError, match="no branch"):
        roofline.loops(program.replace("region9 }", "region8 }"))


def test_the_document_says_what_was_counted(stored):
    document = roofline.DOCUMENT.read_text("utf-8").replace(f" {OLDER}", "")
    assert roofline.table(stored).replace(f" {OLDER}", "") in document


def test_bounds_reach_the_bars(stored):
    for (chip, head_dim, positions), share in roofline.bounds(stored).items():
        assert positions < max(roofline.LISTS) or share >= BARS[chip], (chip, head_dim, share)


@pytest.mark.slow
def test_no_bound_has_fallen(stored):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install -e '.[kernels]'")
    if (version := importlib.metadata.version("libtpu")) != stored["libtpu"]:
        pytest.skip(f"counted with libtpu {stored['libtpu']}; {version} is installed")
    command = [sys.executable, "-m", "tests.pallas.roofline", "--print"]
    done = subprocess.run(command, cwd=roofline.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    counted_again = roofline.bounds(json.loads(done.stdout))
    fallen = {
        key: (share, counted_again[key])
        for key, share in roofline.bounds(stored).items()
        if counted_again[key] < (1 - LARGEST_FALL) * share
    }
    assert not fallen
