"""Copy and read bandwidth of the memory, over arrays too large for any cache."""

import statistics
import threading
import time
from collections.abc import Callable

import numpy as np


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
