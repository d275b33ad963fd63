"""AdaKV: heads that spread their attention keep more of a layer's budget."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from .method import best
from .snapkv import SnapKV


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class AdaKV(SnapKV):
    """SnapKV's ranking, with the best `kv_heads · budget` entries of a whole layer kept.

    Each head keeps at least `floor · budget` of its own.

    Source: Feng et al. 2024 (arXiv 2407.11550) and its release: floor 0.2, ranks as SnapKV. Differs from the
    release: per KV group; a head keeps whole pages, the nearest number below its share; the pages of a row
    are as many as its longest head needs, so heads with fewer save reading, but not memory.
    """

    floor: float = 0.2
    ragged: ClassVar[bool] = True

    def share(self, rank: jax.Array, size: int) -> jax.Array:
        """See `Compression`."""
        rows, kv_heads, positions = rank.shape
        real = rank > -jnp.inf
        least = best(rank, real, jnp.full((rows, kv_heads), int(self.floor * self.budget), jnp.int32))
        flat = lambda x: x.reshape(rows, kv_heads * positions)
        rank = jnp.where(least, jnp.inf, rank)
        kept = best(flat(rank), flat(real), jnp.full(rows, kv_heads * self.budget, jnp.int32))
        count = kept.reshape(rank.shape).sum(-1, dtype=jnp.int32)
        return jnp.maximum(count // size, 1)
