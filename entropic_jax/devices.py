"""The default device, where a program that is being traced will run, and the machine that traces it."""

import os
import platform
from pathlib import Path
from typing import Any

import jax


def default_device() -> jax.Device:
    """The device that the program being traced is meant for.

    It is JAX's default device, which may belong to a compiler for hardware that this machine does not have
    (ahead-of-time compilation).
    """
    settings: Any = jax.config
    device = settings.jax_default_device
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]


def user_cache() -> Path:
    """The folder where this package keeps what it can make again: below XDG_CACHE_HOME, or `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "entropic_jax"


def processor() -> str:
    """The kind of processor and its instructions, as far as the operating system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))}))
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
