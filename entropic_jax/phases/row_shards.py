"""Row shards: each device of a mesh decides the tokens of its own rows, by the code of one device.

The forward pass leaves every device with the logits of its part of the vocabulary, for all rows. One
all-to-all gives each device all logits of its part of the rows. What it decides about them is gathered, so
that the state stays the same on all devices. What compares rows runs on all rows of it, on every device.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ..control import take_rows
from ..mesh import columns_to_rows, first_of_shard, gather_last_axis, gather_rows, num_shards, shard_rows
from ..state.row_subset import RowSubset, has_shared
from .batch import Batch, gather

T = TypeVar("T")


def over_row_shards(
    decide: Callable[..., T], controller: Any, batch: Batch, logits: jax.Array, *per_row: Any
) -> T:
    """`decide(controller, batch, logits, *per_row)`, each row of it on one device of the mesh.

    On one device, or where the control law keeps `Shared` state, which may depend on all rows of a step,
    every device decides about all rows.

    Args:
        decide: a function without collectives. It returns a pytree of arrays `[rows, …]`.
        controller: the control law of the rows.
        batch: the rows.
        logits: float32 `[rows, vocabulary]`; on a mesh, of this device's part of the vocabulary.
        *per_row: further arguments, pytrees of arrays `[rows, …]` and `Shared` values.

    Returns:
        The result for all rows, the same on all devices.
    """
    if num_shards() == 1 or has_shared(batch.state.control):
        return decide(controller, batch, gather_last_axis(logits), *per_row)
    rows = rows_of_shard(len(logits))
    batch = Batch(gather(batch.state, rows), rows.gather(batch.active, False))
    decided = decide(take_rows(controller, rows), batch, columns_to_rows(logits), *rows.gather(per_row))
    return gather_rows(decided, len(logits))


def rows_of_shard(rows: int) -> RowSubset:
    """The rows of this device, of as many; the last devices may have places without a row."""
    size = shard_rows(rows)
    return RowSubset.at(first_of_shard(size) + jnp.arange(size, dtype=jnp.int32), rows)
