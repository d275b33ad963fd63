"""Parts of a CPU kernel: what its Numba code is made of, and the frame that most kernels share.

Only a process that compiles imports this module, because it imports Numba.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numba import carray

from .call_frame import (
    allocate,
    as_pointer,
    floats,
    free,
    operand,
    result,
    stack_memory,
    symbol_address,
    thread_task,
    words,
    xla_handler,
)
from .numba_compiler import njit
from .thread_pool import next_chunk, parallel_for

__all__ = [
    "EXACT",
    "FAST",
    "allocate",
    "array",
    "compiled",
    "floats",
    "free",
    "inlined",
    "integers",
    "next_chunk",
    "njit",
    "operand",
    "operand_floats",
    "operand_integers",
    "parallel_for",
    "parallel_kernel",
    "result",
    "result_floats",
    "result_integers",
    "stack_memory",
    "symbol_address",
    "thread_task",
    "words",
    "xla_handler",
]

# Options of `njit`. Division by zero gives infinity, as in NumPy: an error would need Python, and code that
# needs Python cannot be stored.
EXACT = dict(nogil=True, error_model="numpy")
# Options of `njit` for sums in any order; NaN and infinity stay what they are.
FAST = dict(fastmath={"reassoc", "contract", "nsz", "arcp"}, nogil=True, error_model="numpy")
compiled = njit(nogil=True)
# For a part of a long function that is optimised as if it stood there.
inlined = njit(**FAST, inline="always")


@compiled
def array(address: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array of `dtype` at an address.

    Args:
        address: of the first element.
        shape: of the array.
        dtype: of its elements.
    """
    return carray(as_pointer(address), shape, dtype)


@compiled
def integers(address: int, shape: tuple[int, ...]) -> Any:
    """An array of int32 at an address."""
    return carray(as_pointer(address), shape, np.int32)


@compiled
def operand_floats(frame: int, number: int, shape: tuple[int, ...]) -> Any:
    """An operand as an array of float32.

    Args:
        frame: address of the call frame.
        number: of the operand, from 0.
        shape: of the array.
    """
    return floats(operand(frame, number)[0], shape)


@compiled
def operand_integers(frame: int, number: int, shape: tuple[int, ...]) -> Any:
    """An operand as an array of int32.

    Args:
        frame: address of the call frame.
        number: of the operand, from 0.
        shape: of the array.
    """
    return integers(operand(frame, number)[0], shape)


@compiled
def result_floats(frame: int, number: int, shape: tuple[int, ...]) -> Any:
    """A result as an array of float32.

    Args:
        frame: address of the call frame.
        number: of the result, from 0.
        shape: of the array.
    """
    return floats(result(frame, number)[0], shape)


@compiled
def result_integers(frame: int, number: int, shape: tuple[int, ...]) -> Any:
    """A result as an array of int32.

    Args:
        frame: address of the call frame.
        number: of the result, from 0.
        shape: of the array.
    """
    return integers(result(frame, number)[0], shape)


def parallel_kernel(name: str, task: Any, num_chunks: Callable) -> Iterator[tuple[str, Any]]:
    """The builder of a kernel whose chunks depend on nothing but the call frame.

    Args:
        name: the symbol of the kernel.
        task: `task(frame, chunk)`, compiled by Numba.
        num_chunks: `num_chunks(frame)`, compiled by Numba.

    Returns:
        Pairs of a symbol and a function, see `code_cache`.
    """
    yield f"{name}_task", thread_task(task)
    task_address = symbol_address(f"{name}_task")

    @compiled
    def body(frame):
        parallel_for(task_address(), frame, num_chunks(frame))

    yield name, xla_handler(body)
