"""Bandwidth benchmark: how fast this machine's memory is, the floor under every decoding step.

    python -m benchmarks.bandwidth [--threads 2] [--megabytes 512] [--repeat 8]

prints one JSON object. *copy* counts the bytes read plus the bytes written, *read* the bytes read.
"""

import argparse
import json

from ..harness.cores import pin_to_cores
from .measure import measure


def main() -> None:
    """Print the bandwidths as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2, help="threads that copy at the same time")
    parser.add_argument("--megabytes", type=int, default=512, help="size of each of the two arrays, in MiB")
    parser.add_argument("--repeat", type=int, default=8, help="measurements of each kind")
    arguments = parser.parse_args()
    pin_to_cores(arguments.threads)
    print(json.dumps(measure(arguments.threads, arguments.megabytes, arguments.repeat)))


if __name__ == "__main__":
    main()
