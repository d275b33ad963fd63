"""Timed launches: programs that run passes of a model, compiled side by side and then timed in turn.

The shortest time counts: what else the machine does only adds to it.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from ..mesh.devices import chosen_device, use_device

SECONDS_OF_LAUNCH = 0.25  # of passes that take so long, a launch has one
MOST_COMPILED = 8  # programs at a time: each takes memory
BUDGET = 10.0  # seconds of all turns, after which no further turn begins


class TimedLaunch(NamedTuple):
    """Passes of one kind."""

    compile: Callable[[], Any]  # launches that share a program have the same
    run: Callable[[int], int]  # runs so many passes, or a fixed number; returns the number
    most_passes: int = 1  # that `run` is asked for


def least_seconds(launches: Sequence[TimedLaunch], repeat: int, budget: float = BUDGET) -> list[float]:
    """Seconds of a pass of each launch: the least of several turns, after a single pass of each.

    Args:
        launches: what is timed.
        repeat: the number of turns, if there is time for them; at least 1.
        budget: seconds of all turns, after which no further one begins.
    """
    compile_on = partial(_compile, chosen_device())
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_COMPILED), "timed launches") as pool:
        list(pool.map(compile_on, dict.fromkeys(launch.compile for launch in launches)))
    seconds = [_seconds(launch, 1) for launch in launches]
    begin = time.perf_counter()
    for _ in range(repeat):
        for place, launch in enumerate(launches):
            passes = max(1, min(launch.most_passes, int(SECONDS_OF_LAUNCH / seconds[place])))
            seconds[place] = min(seconds[place], _seconds(launch, passes))
        if time.perf_counter() - begin > budget:
            break
    return seconds


def _compile(device: Any, compile_program: Callable[[], Any]) -> None:
    """Compile a program in a thread that has not chosen a device."""
    with use_device(device):
        compile_program()


def _seconds(launch: TimedLaunch, passes: int) -> float:
    """Seconds of a pass, on average over a launch of so many."""
    begin = time.perf_counter()
    number = launch.run(passes)
    return (time.perf_counter() - begin) / number
