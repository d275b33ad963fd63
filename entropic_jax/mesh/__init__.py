"""Meshes of devices: their axes and collectives, and the sharding of the loop's state over one."""

from .collectives import (
    AXES,
    DATA,
    EXPERT,
    SHARDS,
    TENSOR,
    first_of_shard,
    gather_last_axis,
    make_mesh,
    max_over_shards,
    num_shards,
    on_mesh,
    shards_along,
    sum_over_shards,
)

__all__ = [
    "AXES",
    "DATA",
    "EXPERT",
    "SHARDS",
    "TENSOR",
    "first_of_shard",
    "gather_last_axis",
    "make_mesh",
    "max_over_shards",
    "num_shards",
    "on_mesh",
    "shards_along",
    "sum_over_shards",
]
