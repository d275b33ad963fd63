"""Timing of compiled programs: wall-clock time on a CPU, the profiler's device time on an accelerator."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ..harness.bandwidth import measure as measure_bandwidth

CALLS = 5  # in one trace


def on_cpu() -> bool:
    """Whether the default device is a CPU."""
    return jax.default_backend() == "cpu"


def interleaved_seconds(programs: dict[str, Callable[[], Any]], repeat: int) -> dict[str, list[float]]:
    """Seconds of `repeat` calls of each program. The programs take turns; a first call is not counted."""
    measured: dict[str, list[float]] = {name: [] for name in programs}
    for repetition in range(-1, repeat):
        for name, program in programs.items():
            if repetition < 0:
                jax.block_until_ready(program())
            else:
                measured[name].append(wall_seconds(program) if on_cpu() else device_seconds(program))
    return measured


def wall_seconds(program: Callable[[], Any]) -> float:
    """Seconds until the result of a call is ready."""
    begin = time.perf_counter()
    jax.block_until_ready(program())
    return time.perf_counter() - begin


def device_seconds(program: Callable[[], Any], calls: int = CALLS) -> float:
    """Seconds per call in which the device was busy, by JAX's profiler; the host's time is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(program())
        (file,) = Path(folder).glob("**/*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
        spans = [
            (event.start_ns, event.start_ns + event.duration_ns)
            for plane in data.planes
            if plane.name.startswith("/device:")
            for line in plane.lines
            if line.name.startswith("Stream") or line.name == "XLA Ops"
            for event in line.events
        ]
    if not spans:
        raise RuntimeError("the profiler saw nothing on the device")
    return union_length(spans) / calls / 1e9


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reach = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    return total


def copy_bandwidth(quick: bool) -> dict[str, float]:
    """Bytes read and written per second by a large copy, best and median, on the default device."""
    if on_cpu():
        return measure_bandwidth(2, 64 if quick else 512, 2 if quick else 8)["copy"]
    x = jnp.ones((1 << 20 if quick else 1 << 30,), jnp.float32)
    program = jax.jit(lambda x: x + 1)
    rates = [
        2 * x.nbytes / t
        for t in interleaved_seconds({"copy": lambda: program(x)}, 3 if quick else 10)["copy"]
    ]
    return {"best": max(rates), "median": statistics.median(rates)}
