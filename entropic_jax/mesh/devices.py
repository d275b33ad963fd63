"""The default device, where a program that is being traced will run, and the machine that traces it."""

import contextlib
import os
import platform
from contextlib import AbstractContextManager
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


def chosen_device() -> jax.Device | None:
    """The device that this thread has been told to use; None: the first of the process."""
    settings: Any = jax.config
    return settings.jax_default_device


def use_device(device: jax.Device | None) -> AbstractContextManager[Any]:
    """A block in which this thread's default device is `device`; None changes nothing.

    JAX keeps the choice per thread, so every thread of an engine that is not on the first device needs one.
    """
    return contextlib.nullcontext() if device is None else jax.default_device(device)


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
