"""Kernels for the CPU: compiled by Numba, called by XLA as typed custom calls, run by a few threads.

XLA's CPU backend copies what it gathers from pages, loops over pages on one core, and multiplies a few rows
by a matrix at a fraction of the memory's speed. What is here reads every byte once, where it lies, with every
core. A kernel is a *body* that takes the address of XLA's call frame; see `call` and `pool`. Machine code is
kept on disk (`library`): only whoever compiles imports Numba, and with it `call`, `pool` and `vector`.
"""

import sys
from functools import cache
from importlib.util import find_spec

from ..pallas.dispatch import device


@cache
def has_numba() -> bool:
    """Whether Numba is installed; not on every platform or Python, and then the references serve."""
    return find_spec("numba") is not None


def why_not() -> str | None:
    """The reason why these kernels cannot run here, if there is one."""
    if (platform := device().platform) != "cpu":
        return f"the default device is a {platform}"
    if not has_numba() or sys.platform not in ("linux", "darwin"):
        return "Numba is not installed or the platform has no POSIX threads"
    return None
