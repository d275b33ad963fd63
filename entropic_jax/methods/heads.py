"""Attention-head profile: the block-attention entropy of every KV head along a text.

Heads of low entropy look at a few places, heads of high entropy look everywhere.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import loop
from ..control import chain
from ..state.cache import allocate
from .entropy_prefill import EntropyPrefill, HeadBudgets
from .method import Method
from .oracle import page_attention
from .policies import LayerQueries, PageScores, top_mask

READ_ALL = 2**30  # a `dense_below` that every position lies below


class HeadProfile(NamedTuple):
    """Measurements of the KV heads; NaN in segments with fewer than two prior pages."""

    entropy: np.ndarray  # [layers, kv_heads, segments], as the policy defines it
    rigid: np.ndarray  # bool [layers, kv_heads]: below the policy's threshold in every segment
    # As `entropy`, if requested: the share of the true attention that the base budget would leave unread.
    unread: np.ndarray | None = None


class ProfileState(NamedTuple):
    """State of `UnreadAttention` in one layer."""

    budgets: HeadBudgets
    unread: jax.Array  # [rows, kv_heads], of the last segment


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class UnreadAttention:
    """A prefill policy that scores pages as another one and measures the true attention it would miss.

    As expensive as dense attention.

    Args:
        policy: the policy to follow.
        segment: queries of a segment.
        page_size: page size of the cache.
        dense_below: position before which segments read all pages.
        dense_layers: number of layers that read all pages.
    """

    policy: EntropyPrefill
    segment: int
    page_size: int | None
    dense_below: int = READ_ALL
    dense_layers: int = 0

    def init(self, rows: int, kv_heads: int, pages: int) -> ProfileState:
        """See `PrefillPolicy`."""
        return ProfileState(self.policy.init(rows, kv_heads, pages), jnp.zeros((rows, kv_heads)))

    def score_pages(
        self, queries: LayerQueries, state: ProfileState, below: None
    ) -> tuple[PageScores, ProfileState, None]:
        """See `PrefillPolicy`."""
        page_scores, budgets, _ = self.policy.score_pages(queries, state.budgets, None)
        page_size = queries.layer.keys.shape[2]
        pages = jnp.full(page_scores.budget.shape, self.policy.base // page_size, jnp.int32)
        prior = queries.prior_pages[:, None]
        num_kept = jnp.minimum(pages, queries.prior_pages.sum(1)[:, None])
        dropped = prior & ~top_mask(page_scores.scores, prior, num_kept)
        mass = jnp.where(dropped, page_attention(queries), 0.0).sum(-1)
        unread = mass / jnp.maximum(queries.valid.sum(1), 1).astype(jnp.float32)[:, None]
        return page_scores, ProfileState(budgets, unread), None


def profile_heads(
    decoder: loop.Decoder,
    params: Any,
    tokens: Sequence[int],
    policy: EntropyPrefill | None = None,
    *,
    unread: bool = False,
) -> HeadProfile:
    """Measures the block-attention entropy of each KV head in each segment of a text, which is read densely.

    Args:
        decoder: the model's functions.
        params: the model's parameters.
        tokens: the text.
        policy: defines segments, pages and entropy; None is the default policy.
        unread: also measure what the base budget would miss, at the cost of a second attention pass.

    Raises:
        ValueError: for a text that is not longer than one segment.
    """
    policy = dataclasses.replace(EntropyPrefill() if policy is None else policy, dense_below=READ_ALL)
    if len(tokens) <= policy.segment:
        raise ValueError(f"tokens must have more than {policy.segment} entries, a segment; got {len(tokens)}")
    dtype = jax.tree.leaves(params)[0].dtype
    pool = allocate(decoder.shape, 1, len(tokens), page_size=policy.page_size, dtype=dtype)
    prefill = UnreadAttention(policy, policy.segment, policy.page_size) if unread else policy
    state = loop.start(
        decoder,
        params,
        chain(),
        pool,
        [list(tokens[:1])],
        key=jax.random.key(0),
        max_tokens=len(tokens),
        page_policy=Method(prefill),
    )
    entropies, unread_masses = [], []
    for start in range(0, len(tokens), policy.segment):
        padded = np.zeros((1, policy.segment + 1), np.int32)
        piece = tokens[start : start + policy.segment]
        padded[0, : len(piece)] = piece
        count = np.array([len(piece)], np.int32)
        chunk = loop.PrefillChunk(np.zeros(1, np.int32), padded, count, count + start)
        state, _ = loop.launch_prefill(decoder, params, state, chunk)
        layers: tuple[Any, ...] = state.page_policy_state.prefill
        budgets: list[HeadBudgets] = [layer.budgets if unread else layer for layer in layers]
        entropies.append([np.asarray(b.entropy[0]) for b in budgets])
        unread_masses.append([np.asarray(layer.unread[0]) for layer in layers] if unread else ())
    first = -(-2 * pool.page_size // policy.segment)

    def by_segment(values: list[Any]) -> np.ndarray:
        measured = np.arange(len(values)) >= first
        return np.where(measured, np.moveaxis(np.array(values), 0, -1), np.nan)

    entropy = by_segment(entropies)
    rigid = np.nanmax(entropy, -1) < policy.rigid_below
    return HeadProfile(entropy, rigid, by_segment(unread_masses) if unread else None)


def rigid_threshold(profile: HeadProfile, tolerance: float = 0.01) -> float:
    """The highest entropy threshold below which heads need no more than the base budget, in [0, 1].

    Heads below it count as rigid. All rigid heads together, each held to the base budget throughout, leave at
    most `tolerance` of their attention unread. The threshold is midway between the entropies of two heads.

    Args:
        profile: as `profile_heads(…, unread=True)` returns it.
        tolerance: mean share of attention that may stay unread.

    Raises:
        ValueError: for a profile without `unread`.

    >>> entropy, unread = np.array([[[0.2], [0.4], [0.8]]]), np.array([[[0.0], [0.01], [0.2]]])
    >>> round(rigid_threshold(HeadProfile(entropy, entropy[..., 0] > 9, unread)), 6)
    0.6
    """
    if profile.unread is None:
        raise ValueError("profile.unread must be measured by `profile_heads(…, unread=True)`; got None")
    highest = np.nanmax(profile.entropy, -1).reshape(-1)
    unread = np.nanmean(profile.unread, -1).reshape(-1)
    order = np.argsort(highest)
    mean_unread = np.cumsum(unread[order]) / np.arange(1, len(order) + 1)
    num_rigid = int((mean_unread <= tolerance).cumprod().sum())
    edges = np.concatenate([[0.0], highest[order], [1.0]])
    return float((edges[num_rigid] + edges[num_rigid + 1]) / 2) if num_rigid < len(order) else 1.0
