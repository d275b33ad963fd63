"""Loading benchmark: peak memory and rate of `models.load`, compared with reading the files.

    python -m benchmarks.start_up.loading [--shape 3b] [--dtype bfloat16] [--rounds 3] [--directory DIR]

writes a sharded bfloat16 checkpoint of random weights to a temporary directory under DIR, and deletes it
afterwards. A round reads the files into one small buffer, through the page cache (*disk*) and past it
(*direct disk*), writes as many bytes to new memory (*memory*), and loads the checkpoint in a process of its
own. None of the files is in the page cache before a reading. *load_over_disk* compares with the faster of the
two readings. The result is one JSON object with the median, the least and the largest value of each
measurement.

On a virtual machine, writing to new memory can be slower than the disk, and then bounds the load.
"""

import argparse
import json
import tempfile
from pathlib import Path

from .measure import SHAPES, measured_round, summary, write


def main() -> None:
    """Print the measurements as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="3b", help="of the model (default: 3b)")
    parser.add_argument("--dtype", default="bfloat16", help="that the weights become (default: bfloat16)")
    parser.add_argument("--directory", type=Path, help="where the checkpoint is written for the while")
    parser.add_argument("--rounds", type=int, default=3, help="of measurements (default: 3)")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1; got {options.rounds}")
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        directory = Path(name)
        write(directory, SHAPES[options.shape])
        rounds = [measured_round(directory, options.dtype) for _ in range(options.rounds)]
        print(json.dumps(summary(directory, rounds)))


if __name__ == "__main__":
    main()
