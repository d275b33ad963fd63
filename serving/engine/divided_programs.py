"""Programs over the device state that run no model; on a mesh, their results are divided over it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from entropic_jax.mesh import sharding
from entropic_jax.state import ROW_FIELDS, State
from entropic_jax.state.row_subset import map_rows

from .device_state import DeviceState, UpdateBatch, apply_updates, restore_row, save_row


def first_row(state: State) -> State:
    """A copy of the first row of a state."""
    row = {name: map_rows(lambda x: x[:1], getattr(state, name)) for name in ROW_FIELDS}
    return jax.tree.map(jnp.copy, state._replace(**row))


def apply_divided(
    mesh: Mesh | None, blank: Any, device_state: DeviceState, batch: UpdateBatch
) -> DeviceState:
    """`apply_updates` on a mesh.

    Args:
        mesh: None for one device.
        blank: the state of one empty row.
        device_state: consumed.
        batch: the changes.
    """
    return _divide(apply_updates(blank, device_state, batch), mesh)


def restore_divided(
    mesh: Mesh | None, device_state: DeviceState, row: Any, saved: dict[str, Any]
) -> DeviceState:
    """`restore_row` on a mesh.

    Args:
        mesh: None for one device.
        device_state: consumed.
        row: the branch group.
        saved: from `save_row`.
    """
    return _divide(restore_row(device_state, row, saved), mesh)


def save_everywhere(mesh: Mesh | None, device_state: DeviceState, row: Any) -> dict[str, Any]:
    """`save_row` on a mesh: every device has the result, so that each process can read it.

    Args:
        mesh: None for one device.
        device_state: not consumed.
        row: the branch group.
    """
    saved = save_row(device_state, row)
    return saved if mesh is None else jax.lax.with_sharding_constraint(saved, NamedSharding(mesh, P()))


def _divide(device_state: DeviceState, mesh: Mesh | None) -> DeviceState:
    return device_state if mesh is None else sharding.constrain(device_state, mesh)
