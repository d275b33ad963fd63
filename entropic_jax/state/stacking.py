"""Stacking: small arrays of a pytree side by side in few arrays, as loops carry and write them.

XLA runs at least one operation for every array that an iteration of a loop writes. A step writes dozens of
arrays that have a single number for each row.
"""

from typing import Any

import jax
import jax.numpy as jnp

from . import EMITTED_FIELDS, State
from .row_subset import Shared

MOST = 8  # arrays side by side: of 12 or more, XLA for CPUs computes each in an operation of its own


class Stacking:
    """Which arrays of a pytree stand side by side.

    Args:
        like: a pytree of arrays, or of their `jax.ShapeDtypeStruct`.
        shape: arrays of this shape and one type are stacked; others, and what is `Shared`, stay as they are.

    >>> tree = {"a": jnp.zeros(2), "b": jnp.ones(2), "c": jnp.arange(2), "d": jnp.ones((2, 5))}
    >>> stacking = Stacking(tree, (2,))
    >>> [x.shape for x in stacking.stack(tree)]
    [(2, 2), (2, 1), (2, 5)]
    >>> stacking.unstack(stacking.stack(tree))["b"].tolist()
    [1.0, 1.0]
    >>> room = stacking.put(stacking.room(3), tree, 1)
    >>> stacking.unstack(room)["b"].tolist()
    [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    """

    def __init__(self, like: Any, shape: tuple[int, ...]) -> None:
        leaves, self._structure = jax.tree.flatten(like, is_leaf=lambda x: isinstance(x, Shared))
        self._like, groups = like, dict[Any, list[int]]()
        for index, leaf in enumerate(leaves):
            stacked = not isinstance(leaf, Shared) and leaf.shape == shape
            groups.setdefault(leaf.dtype if stacked else index, []).append(index)
        self._groups = [
            (not isinstance(key, int), indices[first : first + MOST])
            for key, indices in groups.items()
            for first in range(0, len(indices), MOST)
        ]

    def stack(self, tree: Any) -> list[Any]:
        """The arrays of a pytree of this structure, those that are stacked along a new last axis."""
        leaves = self._structure.flatten_up_to(tree)
        return [
            jnp.stack([leaves[index] for index in indices], -1) if stacked else leaves[indices[0]]
            for stacked, indices in self._groups
        ]

    def unstack(self, arrays: list[jax.Array]) -> Any:
        """The pytree of stacked arrays, which may have further axes in front."""
        leaves: list[Any] = [None] * self._structure.num_leaves
        for (stacked, indices), array in zip(self._groups, arrays, strict=True):
            for place, index in enumerate(indices):
                leaves[index] = array[..., place] if stacked else array
        return self._structure.unflatten(leaves)

    def room(self, *sizes: int) -> list[jax.Array]:
        """Zeros for the stacked arrays of many pytrees, with axes of these sizes in front."""
        arrays = jax.eval_shape(self.stack, self._like)
        return [jnp.zeros((*sizes, *x.shape), x.dtype) for x in arrays]

    def put(self, room: list[jax.Array], tree: Any, *place: jax.Array | int) -> list[jax.Array]:
        """Room with a pytree at a place, which is inside.

        Args:
            room: stacked arrays with further axes in front.
            tree: a pytree of this structure.
            *place: its index on each of these axes.
        """

        def write(room: jax.Array, x: jax.Array) -> jax.Array:
            inside = (*place, *[0] * (room.ndim - len(place)))
            x = x.reshape((1,) * len(place) + x.shape)
            return jax.lax.dynamic_update_slice(room, x, inside, allow_negative_indices=False)

        return [write(*pair) for pair in zip(room, self.stack(tree), strict=True)]


class StateStacking:
    """The fields of a state that the emission of a token changes, stacked.

    Args:
        state: a state with these shapes and types.
    """

    def __init__(self, state: State) -> None:
        self._fields = Stacking(changed_fields(state), state.status.shape)

    def stack(self, state: State) -> list[jax.Array]:
        """The stacked arrays of what emission changes."""
        return self._fields.stack(changed_fields(state))

    def unstack(self, state: State, arrays: list[jax.Array]) -> State:
        """The state with what stacked arrays hold."""
        return state._replace(**self._fields.unstack(arrays))

    def split(self, state: State) -> tuple[State, list[jax.Array]]:
        """The state without what emission changes, and the stacked arrays of that."""
        nothing: dict[str, Any] = dict.fromkeys(EMITTED_FIELDS)
        return state._replace(**nothing), self.stack(state)


def changed_fields(state: State) -> dict[str, Any]:
    """The fields of the state that emission changes."""
    return {name: getattr(state, name) for name in EMITTED_FIELDS}
