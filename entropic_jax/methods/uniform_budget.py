"""The ablation of EntropyInfer's prefill: the same observation, and one budget whatever the entropy."""

import dataclasses

import jax
import jax.numpy as jnp

from .criticality import observation
from .method import Scene, Verdict


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class UniformBudget:
    """Read the blocks of greatest expected attention, `base` tokens of them, per segment and KV head."""

    base: int = 2048
    segment: int = 512
    dense_below: int = 4096
    dense_layers: int = 1
    page_size: int | None = 16

    def begin(self, rows: int, kv_heads: int, pages: int) -> tuple[()]:
        """See `Prefill`."""
        return ()

    def judge(self, scene: Scene, memory: tuple[()], below: None) -> tuple[Verdict, tuple[()], None]:
        """See `Prefill`."""
        worth = self.worth(scene)
        return Verdict(worth, jnp.full(worth.shape[:2], self.base, jnp.float32)), memory, None

    def worth(self, scene: Scene) -> jax.Array:
        """What the pages are ranked by, `[rows, kv_heads, pages]`."""
        return observation(scene)
