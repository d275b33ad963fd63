"""EntropyInfer's latent KV compression: ranks the entries after a few tokens were decoded."""

import dataclasses
from typing import Literal

import jax

from .snapkv import SnapKV


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class LatentCompression(SnapKV):
    """Decodes 16 tokens with the whole cache, then ranks its entries once and keeps the best.

    The score is the mean attention of the last 16 queries of the prompt and of those of 16 generated tokens,
    averaged over 5 neighbours; the 32 newest entries are kept in any case. Arguments as in `SnapKV`.

    Source: Xu et al. 2026 (arXiv 2606.09508) and its release. Differs from the release, which ranks per query
    head and so gives up what grouped heads save: per KV group, with the same budget for every KV head.
    """

    window: int = 32
    pool: int = 5
    pooling: Literal["mean", "max"] = "mean"
    delay: int = 17  # the first step reads the last token of the prompt, the next 16 read generated tokens
