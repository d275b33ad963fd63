"""The C library's allocator, from which XLA's compiler and runtime allocate: what it keeps and gives back.

With another C library than glibc, the functions do nothing.
"""

import ctypes
import sys

ARENAS = 2  # pools that threads allocate from; by default 8 per core, and each keeps most of what it once had
M_ARENA_MAX = -8  # the number of that setting in mallopt


def limit_arenas() -> None:
    """Let all threads allocate from `ARENAS` pools, in a process that does not have many threads yet."""
    _call("mallopt", M_ARENA_MAX, ARENAS)


def trim() -> None:
    """Return to the system the memory that the compiler has freed: hundreds of megabytes."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    if sys.platform == "linux":
        function = getattr(ctypes.CDLL(None), name, None)
        if function is not None:
            function(*arguments)
