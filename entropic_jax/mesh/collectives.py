"""Mesh of devices: its axes, and the collectives that a program on it runs over them.

A program on a mesh is written for one device and runs on all of them (`jax.shard_map`). Each device holds its
shard of the weights and of the page pool. What rows share is the same on all devices of the tensor axis. The
collectives do nothing in a program for one device, so the same code serves both.
"""

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

DATA, TENSOR, EXPERT = AXES = ("data", "tensor", "expert")

T = TypeVar("T")


def make_mesh(tensor_parallel_size: int, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A mesh with the axes `AXES`, of which only the tensor axis has more than one device.

    Args:
        tensor_parallel_size: Devices over which heads, feed-forward blocks and the vocabulary are divided.
        devices: To take the first ones of; None takes those of the process.

    Raises:
        ValueError: There are fewer devices.
    """
    available = jax.devices() if devices is None else list(devices)
    if not 1 <= tensor_parallel_size <= len(available):
        raise ValueError(
            f"tensor_parallel_size must be between 1 and {len(available)}, the number of devices; "
            f"got {tensor_parallel_size}"
        )
    return jax.make_mesh(
        (1, tensor_parallel_size, 1),
        AXES,
        axis_types=(jax.sharding.AxisType.Auto,) * len(AXES),
        devices=available[:tensor_parallel_size],
    )


def on_mesh() -> bool:
    """Whether the program being traced runs on a mesh, one instance on each device."""
    return TENSOR in jax.sharding.get_abstract_mesh().manual_axes


def tensor_shards() -> int:
    """Devices of the tensor axis; 1 in a program for one device."""
    return jax.sharding.get_abstract_mesh().shape[TENSOR] if on_mesh() else 1


def sum_over_shards(tree: T) -> T:
    """The sum over the tensor axis of every array of a pytree."""
    return jax.lax.psum(tree, TENSOR) if tensor_shards() > 1 else tree


def max_over_shards(x: jax.Array) -> jax.Array:
    """The element-wise maximum over the tensor axis."""
    return jax.lax.pmax(x, TENSOR) if tensor_shards() > 1 else x


def gather_last_axis(x: jax.Array) -> jax.Array:
    """The shards of x side by side along its last axis, in the order of the tensor axis."""
    return jax.lax.all_gather(x, TENSOR, axis=x.ndim - 1, tiled=True) if tensor_shards() > 1 else x


def first_of_shard(size: int) -> jax.Array | int:
    """The number of the first of a shard's `size` entries among those of all shards."""
    return jax.lax.axis_index(TENSOR) * jnp.int32(size) if tensor_shards() > 1 else 0
