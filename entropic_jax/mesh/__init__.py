"""Meshes of devices: their axes and collectives, and the sharding of the loop's state over one."""

from .collectives import (
    AXES,
    DATA,
    EXPERT,
    TENSOR,
    first_of_shard,
    gather_last_axis,
    make_mesh,
    max_over_shards,
    on_mesh,
    sum_over_shards,
    tensor_shards,
)

__all__ = [
    "AXES",
    "DATA",
    "EXPERT",
    "TENSOR",
    "first_of_shard",
    "gather_last_axis",
    "make_mesh",
    "max_over_shards",
    "on_mesh",
    "sum_over_shards",
    "tensor_shards",
]
