"""Benchmark of start-up: the table of memory has what was measured, and none without."""

import importlib.util
import os

import pytest

from benchmarks.start_up import measure, report
from benchmarks.start_up.compilation import measure as compilation
from benchmarks.start_up.compilation import report as compilation_report


def start(preset: str, caches: str, cold: bool, resident: float | None) -> dict:
    kind = {"command": "serve", "preset": preset, "caches": caches, "cold": cold}
    return {**kind, "seconds": {"ready": 2.0}, "resident": resident}


def test_memory_is_reported_by_caches():
    starts = [
        start("meso", caches, cold, resident)
        for caches, cold, resident in (
            *(("all", True, 800.0), ("all", False, 600.0), ("all", False, 640.4)),
            *(("no programs", True, 900.0), ("no programs", False, 1000.0)),
        )
    ]
    results = {"cpu": "", "date": "", "starts": starts}
    _, (title, _, rows) = report.tables(results)
    assert "memory" in title.lower() and rows == [["meso", "800", "620 (600–640)", "1000", "700"]]
    assert len(report.notes(results)) == 3


def test_starts_without_memory_have_no_table_of_it():
    starts = [start("off", caches, cold, None) for caches, cold in report.CACHE_KINDS]
    results = {"cpu": "", "date": "", "starts": starts}
    assert report.tables(results)[1][2] == [] and len(report.notes(results)) == 2


def test_the_memory_of_this_process_is_read():
    resident = measure.resident(os.getpid())
    assert resident is None or 20 < resident < 100_000
    assert measure.resident(-1) is None


def test_both_forms_of_layers_have_a_row():
    def form(seconds):
        sizes = {"temporary_bytes": 3 * 2**20, "code_bytes": 2**20, "jax": "1", "libtpu": "2"}
        return {"lowering_seconds": seconds, "compiling_seconds": 2 * seconds} | sizes

    forms = {"unrolled": form(30.04), "scanned": form(5.0)}
    results = {"cpu": "", "date": "", "topology": "v5e:2x2", "shape": "8b", "rows": 4, "forms": forms}
    ((title, header, rows),) = compilation_report.tables(results)
    assert "8b" in title and "v5e:2x2" in title and len(header) == 5
    assert rows == [["unrolled", "30.0", "60.1", "3", "1"], ["scanned", "5.0", "10.0", "3", "1"]]
    assert len(compilation_report.notes(results)) == 2


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_scanned_step_has_less_code():
    unrolled, scanned = (compilation.compiled("v5e:2x2", "tiny", 4, form) for form in ("unrolled", "scanned"))
    assert 0 < scanned["code_bytes"] < unrolled["code_bytes"]
    assert min(x["compiling_seconds"] for x in (unrolled, scanned)) > 0


def test_a_topology_that_nobody_knows_is_named():
    with pytest.raises(RuntimeError, match="layers scanned cannot be compiled for v0:1x1"):
        compilation.compiled("v0:1x1", "tiny", 1, "scanned")
