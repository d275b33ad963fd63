"""Uninitialised memory in a program: XLA's CPU backend writes zeros to what `jax.lax.empty` asks for."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from .. import cpu_runtime
from ..cpu_runtime.custom_call import register
from ..cpu_runtime.run_once import run_once


def uninitialised(shape: tuple[int, ...], iteration: jax.Array) -> jax.Array:
    """Memory for results, float32, with anything in it.

    Args:
        shape: the shape of the array.
        iteration: an array that the iteration of a loop has computed. What depends on none, XLA allocates
            once before the loop, and copies in every iteration.
    """
    if cpu_runtime.unavailable_reason():
        return jax.lax.empty(shape, jnp.float32)
    result = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.ffi.ffi_call(_register(), result, vmap_method="broadcast_all")(iteration)


@run_once
def _register() -> str:
    """Registers a kernel that leaves its result as it is; returns its name."""
    name = "entropic_uninitialised"
    register(name, lambda: _compile(name))
    return name


def _compile(name: str) -> Iterator[tuple[str, Any]]:
    from ..cpu_runtime.kernel import compiled, xla_handler

    @compiled
    def nothing(frame):
        return None

    yield name, xla_handler(nothing)
