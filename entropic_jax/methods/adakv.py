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
    release: per KV group; a head keeps whole pages, by largest remainders; a row keeps as many pages as its
    longest head needs, so heads with fewer pages save reads, but not memory.
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
        return jnp.maximum(whole_pages(entries, held.sum(-1, dtype=jnp.int32), page_size), 1)


def whole_pages(entries: jax.Array, held: jax.Array, page_size: int) -> jax.Array:
    """Whole pages of each head, by largest remainders: what rounding down leaves over is given out.

    Args:
        entries: int32 `[rows, kv_heads]`, entries that each head should keep.
        held: int32 `[rows, kv_heads]`, entries that each head has; it gets no more pages than they fill.
        page_size: entries of a page.

    Returns:
        int32 `[rows, kv_heads]`, in all as many pages as all entries of a row fill, where heads hold enough.

    >>> whole_pages(jnp.array([[10, 30]]), jnp.array([[64, 64]]), 4).tolist()
    [[3, 7]]
    """
    pages, remainder = entries // page_size, entries % page_size
    left_over = entries.sum(-1) // page_size - pages.sum(-1)
    extra = top_mask(remainder.astype(jnp.float32), (pages + 1) * page_size <= held, left_over)
    return pages + extra.astype(pages.dtype)
