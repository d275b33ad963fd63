"""StreamingLLM: the first tokens and the newest ones."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..cache import Cache, ModelShape
from . import window
from .method import Scene


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StreamingLLM:
    """Keep the `sinks` first entries and the newest, `budget` in all; what the text says plays no part.

    Source: Xiao et al. 2023 (arXiv 2309.17453): 4 sinks. Differs from the paper: once, after the prompt,
    instead of at every token; entries keep the positions they had in the text.
    """

    budget: int = 1024
    sinks: int = 4
    after: int = 0

    def begin(self, shape: ModelShape, cache: Cache) -> tuple[()]:
        """See `Compression`."""
        return ()

    def observe(self, scene: Scene, memory: tuple[()]) -> tuple[()]:
        """See `Compression`."""
        return memory

    def rank(self, memory: tuple[()], keys: jax.Array, length: jax.Array) -> jax.Array:
        """See `Compression`."""
        position = jnp.arange(keys.shape[2])
        score = jnp.where(position < self.sinks, jnp.inf, position.astype(jnp.float32))
        return window.newest(jnp.broadcast_to(score, keys.shape[:3]), 0, length)

    def share(self, rank: jax.Array, size: int) -> Any:
        """See `Compression`: every head keeps as many."""
        return None
