"""Processor affinity, so that all engines run on the same cores. Needs the standard library only."""

import os
from pathlib import Path


def pin_to_cores(count: int) -> None:
    """Keep this process on `count` processors, the same for every engine, where the system allows it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, select_cores(count))


def select_cores(count: int) -> list[int]:
    """The first `count` processors this process may use, on different cores as far as there are enough."""
    cores: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings.read_text() if siblings.exists() else str(cpu), []).append(cpu)
    ranked = sorted((rank, cpu) for group in cores.values() for rank, cpu in enumerate(group))
    return [cpu for _, cpu in ranked[:count]]
