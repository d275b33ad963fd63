"""Benchmark of start-up: the table of memory has what was measured, and none without."""

import os

from benchmarks.start_up import measure, report


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
