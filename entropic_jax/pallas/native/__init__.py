"""Kernels for the CPU: compiled by Numba, called by XLA as typed custom calls, run by a few threads.

XLA's CPU backend copies what it gathers from pages, loops over pages on one core, and multiplies a few rows
by a matrix at a fraction of the memory's speed. What is here reads every byte once, where it lies, with every
core. A kernel is a *body* that takes the address of XLA's call frame; see `call` and `pool`.
"""

import sys

from ..dispatch import device

try:
    import numba
except ImportError:  # an unsupported platform or Python: the references serve
    numba = None


def why_not() -> str | None:
    """The reason why these kernels cannot run here, if there is one."""
    if (platform := device().platform) != "cpu":
        return f"the default device is a {platform}"
    if numba is None or sys.platform not in ("linux", "darwin"):
        return "Numba is not installed or the platform has no POSIX threads"
    return None
