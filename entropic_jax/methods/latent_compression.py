"""EntropyInfer's latent KV compression: let a few tokens be written first, then ask them what to keep."""

import dataclasses
from typing import Literal

import jax

from .snapkv import SnapKV


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class LatentCompression(SnapKV):
    """Decode 16 tokens with the whole cache, then rank its entries once and keep the best.

    The rank is the mean attention of the last 16 queries of the prompt and the 16 of generated tokens,
    averaged over 5 neighbours; the 32 newest entries are kept in any case.

    Source: Xu et al. 2026 (arXiv 2606.09508) and its release. Differs from the release, which ranks per query
    head and so gives up what grouped heads save: per KV group, with the same budget for every KV head.
    """

    window: int = 32
    pool: int = 5
    pooling: Literal["mean", "max"] = "mean"
    after: int = 17  # the first step reads the last token of the prompt, the next 16 those generated
