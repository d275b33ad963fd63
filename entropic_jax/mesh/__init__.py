"""Meshes of devices: their axes and collectives, and the sharding of the loop's state over one."""

from .collectives import (
    AXES,
    DATA,
    EXPERT,
    SHARDS,
    TENSOR,
    columns_to_rows,
    first_of_shard,
    gather_last_axis,
    gather_rows,
    make_mesh,
    max_over_shards,
    num_shards,
    numbers_by_type,
    on_mesh,
    shard_rows,
    shards_along,
    sum_over_shards,
)
from .page_shards import PageShards

__all__ = [
    "AXES",
    "DATA",
    "EXPERT",
    "SHARDS",
    "TENSOR",
    "PageShards",
    "columns_to_rows",
    "first_of_shard",
    "gather_last_axis",
    "gather_rows",
    "make_mesh",
    "max_over_shards",
    "num_shards",
    "numbers_by_type",
    "on_mesh",
    "shard_rows",
    "shards_along",
    "sum_over_shards",
]
