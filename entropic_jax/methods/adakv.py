"""AdaKV: KV heads that spread their attention keep more of a layer's budget."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from .policies import top_mask
from .snapkv import SnapKV


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class AdaKV(SnapKV):
    """SnapKV's scores; the best `kv_heads · budget` entries of a whole layer are kept.

    Args:
        floor: each head keeps at least `floor · budget` entries; in [0, 1]. Others as in `SnapKV`.

    Source: Feng et al. 2024 (arXiv 2407.11550) and its release: floor 0.2, scores as SnapKV. Differs from the
    release: per KV group; a head keeps whole pages, rounded down; a row keeps as many pages as its longest
    head needs, so heads with fewer pages save reads, but not memory.
    """

    floor: float = 0.2
    ragged: ClassVar[bool] = True

    def pages_per_head(self, scores: jax.Array, page_size: int) -> jax.Array:
        """See `CompressionPolicy`."""
        rows, kv_heads, positions = scores.shape
        held = scores > -jnp.inf
        num_guaranteed = jnp.full((rows, kv_heads), int(self.floor * self.budget), jnp.int32)
        guaranteed = top_mask(scores, held, num_guaranteed)
        scores = jnp.where(guaranteed, jnp.inf, scores)

        def per_layer(x: jax.Array) -> jax.Array:
            return x.reshape(rows, kv_heads * positions)

        num_kept = jnp.full(rows, kv_heads * self.budget, jnp.int32)
        kept = top_mask(per_layer(scores), per_layer(held), num_kept)
        entries = kept.reshape(scores.shape).sum(-1, dtype=jnp.int32)
        return jnp.maximum(entries // page_size, 1)
