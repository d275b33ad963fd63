"""Packing: a forward pass over rows of different numbers of tokens, without computing the padding."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..attention.attend import Attend
from ..attention.layer_loop import LoopedAttention


class Packing(NamedTuple):
    """Where the tokens of all rows stand in a pass over one array of them, one row after the other."""

    row: jax.Array  # int32 [tokens], whose the token is
    position_in_row: jax.Array  # int32 [tokens], its place among the tokens of its row
    packed_index: jax.Array  # int32 [rows, n], where in the array the i-th token of a row stands

    def pack(self, x: jax.Array) -> jax.Array:
        """`[tokens, 1, …]` of `[rows, n, …]`."""
        return x[self.row, jnp.minimum(self.position_in_row, x.shape[1] - 1)][:, None]

    def unpack(self, x: jax.Array) -> jax.Array:
        """`[rows, n, …]` of `[tokens, 1, …]`; what a row has no token for is that of another."""
        return x[:, 0][self.packed_index]

    def attention(self, attend: Attend) -> Attend:
        """Attention for packed tokens: unpacked, attended to, packed again.

        Args:
            attend: attention of tokens `[rows, n, …]`.
        """

        def packed(q: jax.Array, k: jax.Array, v: jax.Array, layer: Any, **options: Any) -> Any:
            out, layer = attend(self.unpack(q), self.unpack(k), self.unpack(v), layer, **options)
            return self.pack(out), layer

        recorders = getattr(attend, "recorders", None)
        return packed if recorders is None else LoopedAttention(packed, recorders)


def lay_out(num_tokens: jax.Array, total: int, max_row_tokens: int) -> Packing:
    """Packs the rows' tokens into a pass.

    Args:
        num_tokens: int32 `[rows]`, at most `total` together.
        total: tokens of the pass, static.
        max_row_tokens: tokens of a row at most, static.

    >>> lay_out(jnp.array([2, 0, 1]), 4, 2).row.tolist()[:3]
    [0, 0, 2]
    """
    end = jnp.cumsum(num_tokens)
    start = end - num_tokens
    index = jnp.arange(total)
    row = jnp.minimum(jnp.searchsorted(end, index, side="right"), num_tokens.shape[0] - 1).astype(jnp.int32)
    packed_index = jnp.minimum(start[:, None] + jnp.arange(max_row_tokens), total - 1)
    return Packing(row, (index - start[row]).astype(jnp.int32), packed_index.astype(jnp.int32))
