"""Row subset: gathers the active rows of a batch for a step and scatters the results back."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


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
            self.index = jnp.nonzero(selected, size=self.rows, fill_value=self.total)[0]

    @classmethod
    def at(cls, index: jax.Array, total: int) -> "RowSubset":
        """The rows of `index`, int32 `[n]`, of `total`; an index past the last row stands for no row."""
        subset = cls.__new__(cls)
        subset.total, subset.rows, subset.index = total, index.shape[0], index
        return subset

    def gather(self, tree: T, fill: Any = 0) -> T:
        """The subset's rows of every array `[total, …]` of a pytree; `fill` for places without a row."""
        if self.index is None:
            return tree
        return jax.tree.map(lambda x: x.at[self.index].get(mode="fill", fill_value=fill), tree)

    def scatter(self, new: T, old: Any) -> T:
        """`old`, arrays `[total, …]` or what broadcasts to them, with the subset's rows replaced by `new`."""
        if self.index is None:
            return new

        def put(x: jax.Array, y: Any) -> jax.Array:
            y = jnp.broadcast_to(jnp.asarray(y, x.dtype), (self.total, *x.shape[1:]))
            return y.at[self.index].set(x, mode="drop")

        return jax.tree.map(put, new, old)
