"""Versions of the installed packages, and the devices that JAX finds."""

import importlib.metadata
import platform
from typing import Any

PACKAGES = (
    "entropic_jax",
    "jax",
    "jaxlib",
    "numpy",
    "numba",
    "flax",
    "libtpu",
    "jax-cuda13-plugin",
)


def versions() -> dict[str, str | None]:
    """Versions of Python and of what matters to the kernels; None: not installed."""
    installed: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return installed


def devices() -> list[dict[str, Any]]:
    """The local devices, the default one first. Raises RuntimeError where JAX cannot start."""
    import jax

    described = []
    for device in jax.local_devices():
        memory = device.memory_stats() or {}
        capability = getattr(device, "compute_capability", None)
        described.append(
            {
                "platform": device.platform,
                "kind": device.device_kind,
                "memory_bytes": memory.get("bytes_limit"),
                "compute_capability": capability,
            }
        )
    return described
