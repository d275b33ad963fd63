"""Bandwidth benchmark: how fast this machine's memory is, the floor under every decoding step.

    python -m benchmarks.harness.bandwidth [--threads 2] [--megabytes 512] [--repeat 8]

prints one JSON object. *copy* counts the bytes read plus the bytes written, *read* the bytes read.
The arrays are too large for any cache.
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np

from .cores import pin_to_cores


def run_together(work: Callable[[int], object], threads: int) -> float:
    """Seconds from the moment `threads` threads start `work(index)` together until the last is done."""
    barrier = threading.Barrier(threads + 1)

    def body(index: int) -> None:
        barrier.wait()
        work(index)
        barrier.wait()

    workers = [threading.Thread(target=body, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    barrier.wait()
    begin = time.perf_counter()
    barrier.wait()
    seconds = time.perf_counter() - begin
    for worker in workers:
        worker.join()
    return seconds


def measure(threads: int = 2, megabytes: int = 512, repeat: int = 8) -> dict[str, dict[str, float]]:
    """Measure the bandwidth of the memory.

    Args:
        threads: how many copy at the same time; they share the arrays.
        megabytes: size of each of the two arrays, in MiB.
        repeat: measurements of each kind.

    Returns:
        Best and median, in bytes per second, of `copy`, one array into the other (bytes read + bytes written,
        as STREAM counts), and of `read`, the bitwise or of all words of an array.
    """
    words = max(1, (megabytes << 20) // 8 // threads)
    source = [np.ones(words, np.int64) for _ in range(threads)]
    target = [np.zeros(words, np.int64) for _ in range(threads)]
    size = float(sum(array.nbytes for array in source))

    def copy(index: int) -> None:
        np.copyto(target[index], source[index])

    def read(index: int) -> None:
        np.bitwise_or.reduce(source[index])

    result = {}
    for name, work, moved in (("copy", copy, 2 * size), ("read", read, size)):
        run_together(work, threads)
        rates = [moved / run_together(work, threads) for _ in range(repeat)]
        result[name] = {"best": max(rates), "median": statistics.median(rates)}
    return result


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
