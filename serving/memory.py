"""Memory that the default device has for a KV cache, and what a page of it takes."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from entropic_jax.mesh.devices import default_device

GIB = 2**30
CPU_CACHE = GIB  # bytes of the KV cache on a CPU, unless an option sets its size
UTILIZATION = 0.9  # of an accelerator's memory that may be in use, KV cache included
UNKNOWN = 8 * GIB  # assumed memory of an accelerator that does not report it


def page_bytes(shape: Any, page_size: int, itemsize: float) -> int:
    """Bytes of the keys and values in a page, over all layers, those of a draft model included.

    Args:
        shape: the model's `ModelShape`.
        page_size: positions of a page.
        itemsize: bytes of a number.
    """
    models = (shape, *shape.drafters)
    return sum(int(2 * m.layers * m.kv_heads * m.head_dim * itemsize) for m in models) * page_size


def pooled_devices(mesh: Any) -> int:
    """Devices whose memory a page pool is spread over; 1 on a CPU, where all devices have the same memory."""
    return 1 if mesh is None or jax.default_backend() == "cpu" else mesh.size


def available_memory() -> int | None:
    """Bytes that can still be allocated on the default device; None if it does not report them."""
    if jax.default_backend() != "cpu":
        stats = default_device().memory_stats() or {}
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0) if "bytes_limit" in stats else None
    limits = [number for number in (_of_system(), *_of_control_group()) if number is not None]
    return min(limits, default=None)


def cache_room(utilization: float | None, sharers: int = 1) -> int:
    """Bytes for the KV cache where its size is not set.

    Args:
        utilization: the fraction of the device's memory that may be in use, cache included. None is
            UTILIZATION on an accelerator; on a CPU, CPU_CACHE, or half of what is available if that is less.
        sharers: engines that share the memory of a CPU equally.
    """
    available = available_memory()
    if jax.default_backend() == "cpu":
        if available is None:
            return CPU_CACHE // sharers
        if utilization is None:
            return min(CPU_CACHE, available // 2) // sharers
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return max(0, available - int((1 - utilization) * total)) // sharers
    stats = default_device().memory_stats() or {}
    limit = stats.get("bytes_limit", UNKNOWN)
    return max(0, int((utilization or UTILIZATION) * limit) - stats.get("bytes_in_use", 0))


def gibibytes(number: int) -> str:
    """A number of bytes for people.

    >>> gibibytes(3 * 2**29)
    '1.50 GiB'
    """
    return f"{number / GIB:.2f} GiB"


def _of_system() -> int | None:
    """Memory that the operating system can give without swapping, on Linux."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _of_control_group() -> Iterator[int | None]:
    """The rest of the memory limit of the process's container."""
    folder = Path("/sys/fs/cgroup")
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            yield int((folder / limit).read_text()) - int((folder / usage).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            yield None
