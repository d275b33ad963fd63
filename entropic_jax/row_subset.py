"""The rows that a step computes, of all that there are."""

from typing import Any

import jax
import jax.numpy as jnp


class RowSubset:
    """The rows that a step computes: all, or the first `width` of the flagged ones."""

    def __init__(self, flag: jax.Array, width: int | None) -> None:
        self.all = flag.shape[0]
        self.rows = self.all if width is None else min(width, self.all)
        self.chosen = None
        if self.rows < self.all:
            self.chosen = jnp.nonzero(flag, size=self.rows, fill_value=self.all)[0]

    def gather(self, x: Any, fill: Any = 0) -> jax.Array:
        """The chosen rows of `[all, …]`; `fill` where there are fewer than fit."""
        return x if self.chosen is None else x.at[self.chosen].get(mode="fill", fill_value=fill)

    def scatter(self, x: jax.Array, old: Any) -> jax.Array:
        """`old` `[all, …]` with the chosen rows replaced by `x`."""
        if self.chosen is None:
            return x
        old = jnp.broadcast_to(jnp.asarray(old, x.dtype), (self.all, *x.shape[1:]))
        return old.at[self.chosen].set(x, mode="drop")
