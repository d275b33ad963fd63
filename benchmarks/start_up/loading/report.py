"""Table of the benchmark of loading."""

import statistics
from typing import Any

from ...harness.provenance import stamp
from ...harness.tables import Table

MEASURED_CODE = (
    "models/weights.py",
    "models/host_memory.py",
    "models/stored_tensors.py",
    "models/tensor_names.py",
    "models/formats/file_rows.py",
    "models/formats/safetensors_files.py",
    "models/formats/stored.py",
)
MEASUREMENTS = {  # what a row says, and the digits of its figures
    "seconds": ("load, s", 1),
    "processor_seconds": ("processor time of the load, s", 1),
    "peak_gb": ("peak memory of the process, GB", 3),
    "load_gb_per_second": ("load, GB/s of the files", 2),
    "disk_gb_per_second": ("disk through the page cache, GB/s", 2),
    "direct_disk_gb_per_second": ("disk past the page cache, GB/s", 2),
    "memory_gb_per_second": ("memory new to a process, one thread, GB/s", 2),
    "load_over_disk": ("load ÷ the faster reading of the disk", 2),
}
MOST_OVER_FILES = 1.0  # GB
LEAST_SHARE = 0.6  # of the disk's rate


def tables(results: dict[str, Any]) -> list[Table]:
    """The median and the range of each measurement."""
    targets = {
        "peak_gb": f"at most {results['files_gb'] + MOST_OVER_FILES:.3f}",
        "load_over_disk": f"at least {LEAST_SHARE}",
    }
    rows = []
    for name, (title, digits) in MEASUREMENTS.items():
        values = [measured[name] for measured in results["rounds"]]
        middle, low, high = (f"{x:.{digits}f}" for x in (statistics.median(values), min(values), max(values)))
        rows.append([title, middle, f"{low}–{high}", targets.get(name, "")])
    title = (
        f"Loading {results['files_gb']:.2f} GB of bfloat16 (shape {results['shape']}) as {results['dtype']}"
    )
    return [(title, ["measurement", "median", "range", "target"], rows)]


def notes(results: dict[str, Any]) -> list[str]:
    """The machine, and what was measured."""
    return [
        f"{results['cpu']}, {results['date']}. {len(results['rounds'])} rounds.",
        "None of the files is in the page cache before a reading or a load.",
        "The files hold the tied embedding once; before `models/embedding.py`, memory held it twice.",
    ]


def stamps(results: dict[str, Any]) -> str:
    """Date and commit of the table."""
    return stamp([results], MEASURED_CODE)
