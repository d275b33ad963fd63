"""Uninitialised memory on a CPU, which the system provides as it is first written to.

XLA would fill it with zeros, and a cache would take all of its memory before it holds a single position.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax

from ...cpu_runtime import unavailable_reason
from ...cpu_runtime.custom_call import register
from ...cpu_runtime.run_once import run_once

NAME = "entropic_uninitialised"
SMALL = 2**20  # bytes


def uninitialised(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array of any dtype; see the package's `__init__` for the contract."""
    if reason := unavailable_reason():
        raise NotImplementedError(reason)
    if math.prod(shape) * dtype.itemsize < SMALL:
        raise NotImplementedError(
            f"less than {SMALL} bytes: zeros take no time, and are the same in every run"
        )
    if not jax.sharding.get_abstract_mesh().empty:
        raise NotImplementedError("the array is divided over a mesh, which is for XLA to do")
    _register()
    # A side effect, because XLA would take two calls of one shape for the same.
    return jax.ffi.ffi_call(NAME, jax.ShapeDtypeStruct(shape, dtype), has_side_effect=True)()


@run_once
def _register() -> None:
    register(NAME, _compile)


def _compile() -> Iterator[tuple[str, Any]]:
    from ...cpu_runtime.kernel import compiled, xla_handler

    @compiled
    def body(frame):
        pass

    yield NAME, xla_handler(body)
