"""Loading benchmark: peak memory and rate of `models.load`, compared with reading the files.

    python -m benchmarks.loading [--shape 3b] [--dtype bfloat16] [--directory DIR]

writes a sharded bfloat16 checkpoint of random weights to a temporary directory under DIR, loads it in a
process of its own while none of its files is in the page cache, deletes it, and prints one JSON object.
*disk* is the rate of reading the files into one small buffer, *memory* that of writing to memory that is new
to the process, measured before the load: on a virtual machine it can be the lower of the two.
"""

import argparse
import json
import tempfile
from pathlib import Path

from .measure import SHAPES, loaded, new_memory_rate, write


def main() -> None:
    """Print the measurements as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="3b", help="of the model (default: 3b)")
    parser.add_argument("--dtype", default="bfloat16", help="that the weights become (default: bfloat16)")
    parser.add_argument("--directory", type=Path, help="where the checkpoint is written for the while")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        write(Path(directory), SHAPES[options.shape])
        memory = new_memory_rate()
        result = loaded(Path(directory), options.dtype)
    print(json.dumps({**result, "memory_gb_per_second": memory}))


if __name__ == "__main__":
    main()
