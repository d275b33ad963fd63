"""Row subset: gathers the active rows of a batch for a step and scatters the results back.

Arrays have one entry per row. What all rows share is declared as `Shared`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")
NOT_NEGATIVE = {"wrap_negative_indices": False}  # which JAX would test for in every read and write


class Shared(NamedTuple):
    """A value that all rows share, within a pytree whose other arrays have one entry per row."""

    value: Any  # any pytree


def map_rows(function: Callable[..., Any], tree: T, *others: Any) -> T:
    """`jax.tree.map` over the arrays that have one entry per row.

    Args:
        function: function of one array `[rows, …]` of each tree.
        tree: the first tree; what is `Shared` in it is in the result as it is.
        *others: trees of the same structure.

    >>> map_rows(lambda x: x[:1], (jnp.arange(3), Shared(jnp.arange(3))))
    (Array([0], dtype=int32), Shared(value=Array([0, 1, 2], dtype=int32)))
    """

    def at_leaf(x: Any, *rest: Any) -> Any:
        return x if isinstance(x, Shared) else function(x, *rest)

    return jax.tree.map(at_leaf, tree, *others, is_leaf=lambda x: isinstance(x, Shared))


def has_shared(tree: Any) -> bool:
    """Whether anything in a pytree is `Shared`.

    >>> has_shared((jnp.arange(3), Shared(jnp.arange(3)))), has_shared(jnp.arange(3))
    (True, False)
    """
    is_shared = lambda x: isinstance(x, Shared)
    return any(map(is_shared, jax.tree.leaves(tree, is_leaf=is_shared)))


def where_rows(flag: jax.Array, new: T, old: T) -> T:
    """`new` in the flagged rows, `old` in the others; what is `Shared` is `new` if any row is flagged.

    Args:
        flag: bool, `[rows]` or a scalar for all of them.
        new: a pytree of arrays `[rows, …]`.
        old: the values of the other rows, of the same structure and shapes.
    """

    def pick(flag: jax.Array, x: Any, y: Any) -> Any:
        if x is y:
            return y
        x, y = jnp.asarray(x), jnp.asarray(y)
        return jnp.where(flag.reshape(flag.shape + (1,) * (x.ndim - flag.ndim)), x, y)

    def at_leaf(x: Any, y: Any) -> Any:
        if isinstance(x, Shared):
            return jax.tree.map(lambda a, b: pick(flag.any(), a, b), x, y)
        return pick(flag, x, y)

    return jax.tree.map(at_leaf, new, old, is_leaf=lambda x: isinstance(x, Shared))


def require_rows(name: str, tree: Any, rows: int) -> None:
    """Raises ValueError unless every array of a pytree has one entry per row, or is `Shared`.

    Args:
        name: the name of the pytree, for the message.
        tree: the pytree.
        rows: number of rows of the batch.
    """

    def check(x: Any) -> Any:
        if jnp.shape(x)[:1] != (rows,):
            raise ValueError(
                f"{name} must hold arrays with one entry for each of the {rows} rows, or `Shared` values; "
                f"got shape {jnp.shape(x)}"
            )
        return x

    map_rows(check, tree)


class RowSubset:
    """Some rows of a batch, at most `width` of them.

    Args:
        selected: bool `[rows]`, which rows are wanted. The first `width` of them are in the subset.
        width: size of the subset, static. None, or anything not below `rows`, keeps all rows where they are,
            the unselected ones included, and costs nothing.
    """

    def __init__(self, selected: jax.Array, width: int | None) -> None:
        self.total = selected.shape[0]
        self.rows = self.total if width is None else min(width, self.total)
        self.index: jax.Array | None = None  # int32 [width]; `total` where fewer rows are selected
        if self.rows < self.total:
            # Each selected row writes its number to its place; `nonzero` would divide, in every use of it.
            place = jnp.where(selected, jnp.cumsum(selected, dtype=jnp.int32) - 1, self.rows)
            nothing = jnp.full(self.rows, self.total, jnp.int32)
            self.index = nothing.at[place].set(
                jnp.arange(self.total, dtype=jnp.int32), mode="drop", **NOT_NEGATIVE
            )

    @classmethod
    def at(cls, index: jax.Array, total: int) -> "RowSubset":
        """The rows of `index`, int32 `[n]`, of `total`; an index past the last row stands for no row."""
        subset = cls.__new__(cls)
        subset.total, subset.rows, subset.index = total, index.shape[0], index
        return subset

    def gather(self, tree: T, fill: Any = 0) -> T:
        """The subset's rows of every array `[total, …]` of a pytree; `fill` for places without a row.

        What is `Shared` stays as it is, here and in `scatter`.
        """
        if self.index is None:
            return tree
        return map_rows(lambda x: x.at[self.index].get(mode="fill", fill_value=fill, **NOT_NEGATIVE), tree)

    def scatter(self, new: T, old: Any) -> T:
        """`old`, arrays `[total, …]` or what broadcasts to them, with the subset's rows replaced by `new`."""
        if self.index is None:
            return new

        def put(x: jax.Array, y: Any) -> jax.Array:
            y = jnp.broadcast_to(jnp.asarray(y, x.dtype), (self.total, *x.shape[1:]))
            return y.at[self.index].set(x, mode="drop", **NOT_NEGATIVE)

        return map_rows(put, new, old)
