"""Folders that benchmarks read from and write to."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"  # raw measurements, as JSON
PAGES = ROOT / "docs" / "results"  # their tables, a page a subject
