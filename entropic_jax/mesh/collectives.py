"""Mesh of devices: its axes, and the collectives that a program on it runs over them.

A program on a mesh is written for one device and runs on all of them (`jax.shard_map`). Each device holds its
shard of the weights and of the page pool. Heads, feed-forward blocks and the vocabulary are divided over the
axes `tensor` and `expert` together, experts over `expert`, and each of them over `tensor`. What rows share is
the same on all devices. The rows of a step are divided where their tokens are sampled, and only there. The
collectives do nothing in a program for one device, so the same code serves both.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils

DATA, TENSOR, EXPERT = AXES = ("data", "tensor", "expert")
SHARDS = (TENSOR, EXPERT)  # the axes of the devices that run one program

T = TypeVar("T")


def make_mesh(
    tensor_parallel_size: int,
    devices: Sequence[jax.Device] | None = None,
    *,
    data_parallel_size: int = 1,
    expert_parallel_size: int = 1,
) -> jax.sharding.Mesh:
    """A mesh with the axes `AXES`.

    A program runs on the devices of one position along `data`: each of them has an engine of its own.

    Args:
        tensor_parallel_size: devices over which heads, feed-forward blocks and the vocabulary are divided,
            and the width of each expert.
        devices: to take the first ones of; None takes those of the process.
        data_parallel_size: copies of the model.
        expert_parallel_size: groups of devices over which the experts are divided. Everything else is divided
            over all devices of a copy.

    Raises:
        ValueError: There are fewer devices.
    """
    available = jax.devices() if devices is None else list(devices)
    sizes = {
        "tensor_parallel_size": tensor_parallel_size,
        "expert_parallel_size": expert_parallel_size,
        "data_parallel_size": data_parallel_size,
    }
    taken = 1
    for name, size in sizes.items():
        most = len(available) // taken
        if not 1 <= size <= most:
            number = "the number of devices"
            if taken > 1:
                number = f"for {len(available)} devices in groups of {taken}"
            accepted = "1" if most == 1 else f"between 1 and {most}"
            raise ValueError(f"{name} must be {accepted}, {number}; got {size}")
        taken *= size
    shape = data_parallel_size, tensor_parallel_size, expert_parallel_size
    types = (jax.sharding.AxisType.Auto,) * len(AXES)
    try:
        return jax.make_mesh(shape, AXES, axis_types=types, devices=available[:taken])
    except NotImplementedError:  # an axis of the chips' torus must be split for these sizes
        placed = mesh_utils.create_device_mesh(shape, available[:taken], allow_split_physical_axes=True)
        return jax.sharding.Mesh(placed, AXES, axis_types=types)


def on_mesh() -> bool:
    """Whether the program being traced runs on a mesh, one instance on each device."""
    return TENSOR in jax.sharding.get_abstract_mesh().manual_axes


def shards_along(axis: str) -> int:
    """Devices of an axis; 1 in a program for one device."""
    return jax.sharding.get_abstract_mesh().shape[axis] if on_mesh() else 1


def num_shards() -> int:
    """Devices that run the program."""
    return shards_along(TENSOR) * shards_along(EXPERT)


def sum_over_shards(tree: T) -> T:
    """The sum over the shards of every array of a pytree."""
    return jax.lax.psum(tree, SHARDS) if num_shards() > 1 else tree


def max_over_shards(x: jax.Array) -> jax.Array:
    """The element-wise maximum over the shards."""
    return jax.lax.pmax(x, SHARDS) if num_shards() > 1 else x


def gather_last_axis(x: jax.Array) -> jax.Array:
    """The shards of x side by side along its last axis, in their order."""
    return jax.lax.all_gather(x, SHARDS, axis=x.ndim - 1, tiled=True) if num_shards() > 1 else x


def shard_rows(rows: int) -> int:
    """The rows of a shard where rows are divided; the last shards have fewer, or none."""
    return -(-rows // num_shards())


def columns_to_rows(x: jax.Array) -> jax.Array:
    """All columns of the rows of this shard, of the columns of this shard in all rows.

    Args:
        x: `[rows, columns of a shard]`.

    Returns:
        `[shard_rows(rows), columns]`; zeros where the shard has no row.
    """
    if num_shards() == 1:
        return x
    padding = shard_rows(len(x)) * num_shards() - len(x)
    return jax.lax.all_to_all(jnp.pad(x, ((0, padding), (0, 0))), SHARDS, 0, 1, tiled=True)


def gather_rows(tree: T, rows: int) -> T:
    """All rows of arrays of which every shard has its own rows, on every shard.

    Arrays of one type are sent side by side, since a collective costs more than the few numbers of a row.

    Args:
        tree: a pytree of arrays `[shard_rows(rows), …]`.
        rows: number of rows of all shards.
    """
    if num_shards() == 1:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    gathered = list(leaves)
    for dtype in numbers_by_type(tree):
        places = [i for i, x in enumerate(leaves) if type_sent(x) == dtype]
        flat = [leaves[i].astype(dtype).reshape(len(leaves[i]), -1) for i in places]
        together = jax.lax.all_gather(jnp.concatenate(flat, 1), SHARDS, tiled=True)[:rows]
        ends = list(itertools.accumulate(x.shape[1] for x in flat[:-1]))
        for i, part in zip(places, jnp.split(together, ends, 1), strict=True):
            gathered[i] = part.reshape(rows, *leaves[i].shape[1:]).astype(leaves[i].dtype)
    return structure.unflatten(gathered)


def numbers_by_type(tree: Any) -> dict[Any, int]:
    """How many numbers of each type `gather_rows` sends for a row of a pytree of arrays `[rows, …]`."""
    numbers = dict[Any, int]()
    for x in jax.tree.leaves(tree):
        numbers[type_sent(x)] = numbers.get(type_sent(x), 0) + math.prod(x.shape[1:])
    return numbers


def type_sent(x: Any) -> Any:
    """The type in which `gather_rows` sends an array: flags go with the integers."""
    return jnp.dtype(jnp.int32) if x.dtype == bool else x.dtype


def first_of_shard(size: int, axes: str | tuple[str, ...] = SHARDS) -> jax.Array | int:
    """The number of the first of a shard's `size` entries among those of all shards.

    Args:
        size: entries of each shard.
        axes: over which they are divided.
    """
    return jax.lax.axis_index(axes) * jnp.int32(size) if num_shards() > 1 else 0
