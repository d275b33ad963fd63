"""CritiPrefill: the same budget for every head, and criticality that layers pass on."""

import dataclasses

import jax
import jax.numpy as jnp

from .criticality import observation
from .method import Scene, Verdict


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class CritiPrefill:
    """Read the blocks of greatest criticality, `base` tokens of them, per segment and KV head.

        C_l = ¼ C_{l−1} + ¾ A_l,   C_0 = A_0 and C_1 = A_1

    with A from `criticality.observation`.

    Source: Lv et al. 2024 (arXiv 2409.12490) and its release. Differs from the release: products are divided
    by √head_dim (`scaled`); a block is a page, of 32 tokens where the cache is allocated for it.
    """

    base: int = 2048
    passed_on: float = 0.25
    scaled: bool = True
    segment: int = 512
    dense_below: int = 4096
    dense_layers: int = 0
    page_size: int | None = 32

    def begin(self, rows: int, kv_heads: int, pages: int) -> tuple[()]:
        """See `Prefill`."""
        return ()

    def judge(
        self, scene: Scene, memory: tuple[()], below: tuple[int, jax.Array] | None
    ) -> tuple[Verdict, tuple[()], tuple[int, jax.Array]]:
        """See `Prefill`; `below` is the number of the layer below, and its criticality."""
        share = observation(scene, self.scaled)
        number = 0 if below is None else below[0] + 1
        if below is not None and number > 1:
            share = self.passed_on * below[1] + (1 - self.passed_on) * share
        budget = jnp.full(share.shape[:2], self.base, jnp.float32)
        return Verdict(share, budget), memory, (number, share)
