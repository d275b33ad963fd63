"""StreamingLLM: keeps the first tokens (attention sinks) and the newest ones."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from ..state.cache import Cache, ModelShape
from . import window
from .policies import LayerQueries


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StreamingLLM:
    """Keeps the first `sinks` entries and the newest, `budget` in all, whatever their content.

    Args:
        budget: entries kept per KV head.
        sinks: entries kept at the start.
        delay: decode steps before the compression is applied.

    Source: Xiao et al. 2023 (arXiv 2309.17453): 4 sinks. Differs from the paper: applied once, after the
    prompt, instead of at every token; entries keep the positions that they had in the text.
    """

    budget: int = 1024
    sinks: int = 4
    delay: int = 0
    ragged: ClassVar[bool] = False

    def init(self, shape: ModelShape, cache: Cache) -> tuple[()]:
        """See `CompressionPolicy`."""
        return ()

    def observe(self, queries: LayerQueries, state: tuple[()]) -> tuple[()]:
        """See `CompressionPolicy`."""
        return state

    def score_entries(self, state: tuple[()], keys: jax.Array, length: jax.Array) -> jax.Array:
        """See `CompressionPolicy`."""
        position = jnp.arange(keys.shape[2])
        score = jnp.where(position < self.sinks, jnp.inf, position.astype(jnp.float32))
        return window.keep_newest(jnp.broadcast_to(score, keys.shape[:3]), 0, length)

    def pages_per_head(self, scores: jax.Array, page_size: int) -> None:
        """See `CompressionPolicy`: every head keeps `budget` entries."""
