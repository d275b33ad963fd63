"""Loading benchmark: peak memory and rate of `models.load`, compared with reading the files.

    python -m benchmarks.start_up.loading [--shape 3b] [--dtype bfloat16] [--rounds 5] [--document]

writes a sharded bfloat16 checkpoint of random weights to a temporary directory under DIR, and deletes it
afterwards. A round reads the files into one small buffer, through the page cache and past it, writes as many
bytes to new memory, and loads the checkpoint in a process of its own. None of the files is in the page cache
before a reading.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console

from ...harness.provenance import describe_run
from ...harness.publishing import benchmark_parser, measure_and_publish
from . import report
from .measure import SHAPES, measured_round, write

NAME = "start_up.loading"


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = benchmark_parser(__doc__, NAME)
    parser.add_argument("--shape", choices=SHAPES, help="of the model (default: 3b)")
    parser.add_argument("--dtype", default="bfloat16", help="that the weights become (default: bfloat16)")
    parser.add_argument("--directory", type=Path, help="where the checkpoint is written for the while")
    parser.add_argument("--rounds", type=int, help="of measurements (default: 5)")
    options = parser.parse_args()
    options.shape = options.shape or ("tiny" if options.quick else "3b")
    options.rounds = (1 if options.quick else 5) if options.rounds is None else options.rounds
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1; got {options.rounds}")
    measure_and_publish(NAME, report, run, options)


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The measurements of every round, and the size of the files."""
    description = describe_run(console)
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        directory = Path(name)
        write(directory, SHAPES[options.shape])
        size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        rounds = [measured_round(directory, options.dtype) for _ in range(options.rounds)]
    shape = {"shape": options.shape, "dtype": options.dtype, "files_gb": size / 1e9}
    return {**description, **shape, "rounds": rounds}


if __name__ == "__main__":
    main()
