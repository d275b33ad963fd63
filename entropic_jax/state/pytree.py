"""Pytree classes: frozen dataclasses whose fields are leaves, unless they are marked as static."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")
Gain = float | jax.Array
"""The value of a gain of a control law: a number for all rows, or an array `[rows]`."""
STATIC = "static"  # marks a field of a `pytree` class that is part of the structure, not a leaf


@dataclass_transform(frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Class decorator: a frozen dataclass whose fields are pytree leaves.

    Fields annotated `Annotated[…, STATIC]` are part of the pytree structure: changing one retraces.

    >>> @pytree
    ... class Gain:
    ...     value: float
    >>> jax.tree.leaves(Gain(0.5))
    [0.5]
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    static = [f.name for f in fields if STATIC in getattr(f.type, "__metadata__", ())]
    leaves = [f.name for f in fields if f.name not in static]

    # jax.tree_util.register_dataclass does not serve: any two of its classes with the same number of fields
    # compare as equal structures, so a jitted function could run the law compiled for another class.
    def flatten(controller: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        pairs = [(jax.tree_util.GetAttrKey(name), getattr(controller, name)) for name in leaves]
        return pairs, tuple(getattr(controller, name) for name in static)

    def unflatten(values: tuple[Any, ...], children: Any) -> Any:
        named = dict(zip(leaves, children, strict=True))
        return cls(**named, **dict(zip(static, values, strict=True)))

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls
