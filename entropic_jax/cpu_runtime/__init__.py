"""CPU runtime: kernels compiled by Numba, called by XLA as typed custom calls, run by a small thread pool.

XLA's CPU backend copies what it gathers from pages, loops over pages on one core, and multiplies a few rows
by a matrix at a fraction of the memory's bandwidth. The kernels built on this package read every byte once,
in place, with every core. A kernel is a function of the address of XLA's call frame.

| module | contents |
|---|---|
| `custom_call` | registers a kernel with XLA under a name |
| `kernel` | what the Numba code of a kernel is made of, in one place |
| `call_frame` | the bridge from XLA's call frame to a Numba function |
| `numba_compiler` | Numba, without machine code for parts of kernels |
| `code_cache` | machine code on disk, so that only the first process compiles |
| `mailbox` | the layout of the memory through which a kernel hands work to the threads |
| `thread_pool` | the code of the threads, and `parallel_for` |
| `threads` | starts and stops the threads |
| `matmul` | tiles of matrix products as LLVM vector code |
| `matrix_tiles` | the same on the matrix units of x86 processors |
| `row_tiles`, `weight_tiles` | rows and weights as tiles of those |
| `int4_tiles` | weights of 4 bits in the tiles of `matmul` |
| `pairs` | pairs of bfloat16 in the tiles of `matmul` |
| `matrix_units` | whether this process may multiply bfloat16, on matrix units or not |
| `attention`, `attention_scores` | softmax, weighted sums and scores of attention to a page |
| `head_batches` | batches of query heads in those |
| `instructions` | vector instructions as LLVM code |
| `control_flow` | loops and branches around them |
| `vector` | inner loops as LLVM vector code |
| `threshold` | the largest threshold that keeps enough weight |
| `run_once` | a cache of one result per argument, safe with several threads |

Only a process that compiles imports Numba, and with it `attention`, `attention_scores`, `call_frame`,
`control_flow`, `head_batches`, `instructions`, `int4_tiles`, `kernel`, `matmul`, `matrix_tiles`,
`numba_compiler`, `pairs`, `row_tiles`, `weight_tiles`, `thread_pool` and `vector`.
"""

import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..mesh import on_mesh
from ..mesh.devices import default_device
from .threads import MAX_THREADS, num_processors


@cache
def numba_installed() -> bool:
    """Whether Numba is installed. It is not available for every platform and Python version."""
    return find_spec("numba") is not None


def unavailable_reason() -> str | None:
    """The reason why CPU kernels cannot run here; None if they can."""
    if (platform := default_device().platform) != "cpu":
        return f"the default device is a {platform}"
    if on_mesh():
        return "the program runs on a mesh, whose devices would share the threads"
    if not numba_installed() or sys.platform not in ("linux", "darwin"):
        return "Numba is not installed or the platform has no POSIX threads"
    return None


def check_prefill(tokens: int) -> None:
    """Raise NotImplementedError for a pass of many tokens if XLA has more threads than kernels have.

    Args:
        tokens: The tokens of the pass.
    """
    if (processors := num_processors()) > MAX_THREADS:
        raise NotImplementedError(
            f"{tokens} tokens on {processors} processors: kernels run on {MAX_THREADS} at most"
        )


def check_supported(*dtypes: Any) -> None:
    """Raise NotImplementedError with the reason if CPU kernels cannot run here, or a dtype is not float32."""
    if reason := unavailable_reason():
        raise NotImplementedError(reason)
    if any(np.dtype(dtype) != np.float32 for dtype in dtypes):
        raise NotImplementedError(f"dtypes {', '.join(map(str, dtypes))}: only float32 is supported")
