"""Memory that no zeros are written to: nothing is filled, and loops neither share nor copy it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import cpu_runtime
from entropic_jax.pallas.uninitialised import uninitialised

SHAPE = (64, 128)


def iterations(n: jax.Array) -> jax.Array:
    """The sum of numbers that every iteration writes into memory of its own, and reads again."""

    def write(number: jax.Array, total: jax.Array) -> jax.Array:
        room = uninitialised(SHAPE, number)
        row = jnp.full((1, SHAPE[1]), number, jnp.float32)
        room = jax.lax.fori_loop(
            0, SHAPE[0], lambda i, x: jax.lax.dynamic_update_slice(x, row + i, (i, 0)), room
        )
        return total + room.sum()

    return jax.lax.fori_loop(0, n, write, jnp.float32(0))


def test_what_is_written_is_what_is_read():
    expected = sum(SHAPE[1] * (number * SHAPE[0] + sum(range(SHAPE[0]))) for number in range(5))
    assert jax.jit(iterations)(5) == expected


def test_no_iteration_fills_or_copies_it():
    if cpu_runtime.unavailable_reason():
        pytest.skip("there are no kernels here")
    text = jax.jit(iterations).lower(5).compile().as_text()
    full = f"f32[{SHAPE[0]},{SHAPE[1]}]"
    results = [line for line in text.splitlines() if f" = {full}" in line]
    assert any("entropic_uninitialised" in line for line in results)
    assert not any(f"{operation}(" in line for line in results for operation in ("copy", "broadcast"))


def test_without_kernels_it_is_that_of_jax(monkeypatch):
    monkeypatch.setattr(cpu_runtime, "unavailable_reason", lambda: "there are none")
    result = jax.jit(lambda x: uninitialised(SHAPE, x))(jnp.int32(0))
    assert result.shape == SHAPE and result.dtype == np.float32
