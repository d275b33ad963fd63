"""Calibration of head needs: the attention that each KV head pays to pages of a text, by the pages' rank.

A text is read densely. For each segment, layer and KV head, the pages before the segment are ranked by their
expected attention, as the sparse prefills rank them, and the true attention that each receives is kept.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import loop
from ..control import chain
from ..state.cache import ModelShape, allocate
from .criticality import attention_entropy, expected_attention
from .head_needs import MODEL_FIELDS, HeadNeeds
from .heads import READ_ALL
from .method import Method
from .oracle import page_attention
from .policies import LayerQueries, PageScores

SEGMENT, PAGE, DENSE_LAYERS = 512, 16, 1  # as the defaults of the sparse prefills
LONGEST = 8192  # tokens of a text that is read in one piece


class RankedProfile(NamedTuple):
    """Measurements of one text, without its first segment, before which there is nothing."""

    entropy: np.ndarray  # [segments, layers, kv_heads], of the expected attention to pages, nats
    mass: (
        np.ndarray
    )  # [segments, layers, kv_heads, pages]: true attention of a query, by the rank of the page


class RankedState(NamedTuple):
    """State of `RankedAttention` in one layer."""

    entropy: jax.Array  # [rows, kv_heads]
    mass: jax.Array  # [rows, kv_heads, pages]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class RankedAttention:
    """A prefill policy that reads all pages and measures the attention to them in the order of their scores.

    Args:
        segment: queries of a segment.
        page_size: page size of the cache.
        dense_below: position before which segments read all pages.
        dense_layers: number of layers that read all pages.
    """

    segment: int = SEGMENT
    page_size: int | None = PAGE
    dense_below: int = READ_ALL
    dense_layers: int = 0

    def init(self, rows: int, kv_heads: int, pages: int) -> RankedState:
        """See `PrefillPolicy`."""
        return RankedState(jnp.zeros((rows, kv_heads)), jnp.zeros((rows, kv_heads, pages)))

    def score_pages(
        self, queries: LayerQueries, state: RankedState, below: None
    ) -> tuple[PageScores, RankedState, None]:
        """See `PrefillPolicy`."""
        scores = expected_attention(queries)
        prior = queries.prior_pages[:, None]
        count = jnp.maximum(queries.valid.sum(1), 1).astype(jnp.float32)[:, None, None]
        mass = jnp.where(prior, page_attention(queries) / count, 0.0)
        order = jnp.argsort(jnp.where(prior, -scores, jnp.inf), -1, stable=True)
        after = RankedState(attention_entropy(scores), jnp.take_along_axis(mass, order, -1))
        return PageScores(scores, jnp.zeros(scores.shape[:2])), after, None


def ranked_profile(decoder: loop.Decoder, params: Any, tokens: Sequence[int], segment: int) -> RankedProfile:
    """Measures the attention of every KV head to the ranked pages of a text.

    Args:
        decoder: the model's functions.
        params: the model's parameters.
        tokens: the text, at least two segments; what exceeds a whole number of segments is left out.
        segment: queries of a segment, a power of two.

    Raises:
        ValueError: for a text of fewer than two segments, or a model with sliding windows.
    """
    if any(getattr(decoder, "windows", ())):
        raise ValueError(
            "head needs can be measured for a model without sliding windows only; this one has some"
        )
    if len(tokens) < 2 * segment:
        raise ValueError(f"tokens must have at least {2 * segment} entries, two segments; got {len(tokens)}")
    count = len(tokens) // segment * segment
    dtype = jax.tree.leaves(params)[0].dtype
    pool = allocate(decoder.shape, 1, count + PAGE, page_size=PAGE, dtype=dtype)
    state = loop.start(
        decoder,
        params,
        chain(),
        pool,
        [list(tokens[:1])],
        key=jax.random.key(0),
        max_tokens=count,
        page_policy=Method(RankedAttention(segment)),
    )
    entropy, mass = [], []
    for start in range(0, count, segment):
        padded = np.zeros((1, segment + 1), np.int32)
        padded[0, :segment] = tokens[start : start + segment]
        full = np.array([segment], np.int32)
        chunk = loop.PrefillChunk(np.zeros(1, np.int32), padded, full, full + start)
        state, _ = loop.launch_prefill(decoder, params, state, chunk)
        layers: tuple[Any, ...] = state.page_policy_state.prefill
        entropy.append(np.stack([np.asarray(layer.entropy[0]) for layer in layers]))
        mass.append(np.stack([np.asarray(layer.mass[0]) for layer in layers]))
    return RankedProfile(np.stack(entropy)[1:], np.stack(mass)[1:].astype(np.float64))


def needs_of(profiles: Sequence[RankedProfile], budget: int, dense_layers: int = DENSE_LAYERS) -> np.ndarray:
    """Tokens that each head would read of the pages of most attention, `[layers, kv_heads]`.

    The mean mass of a rank over segments is made to fall with the rank. The largest of all heads above the
    dense layers are counted, so many that a head has `budget` tokens on average.

    Args:
        profiles: the profiles of texts of one length.
        budget: tokens a head on average.
        dense_layers: lowest layers, which do not compete.
    """
    mass = np.concatenate([profile.mass for profile in profiles]).mean(0)
    falling = np.minimum.accumulate(mass, -1)
    competing = np.sort(falling[dense_layers:].reshape(-1))
    count = round(budget / PAGE * falling[dense_layers:, :, 0].size)
    least = competing[-min(max(count, 1), len(competing))]
    pages = ((falling >= least) & (falling > 0)).sum(-1)
    return np.maximum(pages, 1) * float(PAGE)


def ranked_profiles(
    decoder: loop.Decoder,
    params: Any,
    tokens: Sequence[int],
    segment: int = SEGMENT,
    longest: int = LONGEST,
) -> list[RankedProfile]:
    """The profiles of a text, read in pieces of one length; what remains after the last piece is left out.

    Args:
        decoder: the model's functions.
        params: the model's parameters.
        tokens: the text.
        segment: queries of a segment, a power of two.
        longest: most tokens of a piece, at most the model's context.

    Raises:
        ValueError: for a text of fewer than two segments, or a model with sliding windows.
    """
    piece = max(min(longest, len(tokens)) // segment * segment, 1)
    starts = range(0, max(len(tokens) // piece, 1) * piece, piece)
    return [ranked_profile(decoder, params, tokens[at : at + piece], segment) for at in starts]


def head_needs(
    shape: ModelShape, profiles: Sequence[RankedProfile], budget: int, segment: int = SEGMENT
) -> HeadNeeds:
    """The table of head needs of a model.

    Args:
        shape: the model's sizes.
        profiles: the profiles of texts of one length.
        budget: tokens a head on average.
        segment: queries of a segment of the profiles.
    """
    dense_layers = min(DENSE_LAYERS, shape.layers - 1)
    segments = sum(len(profile.mass) + 1 for profile in profiles)  # the first of a text is not measured
    return HeadNeeds(
        **{name: int(getattr(shape, name)) for name in MODEL_FIELDS},
        tokens=segments * segment,
        segment=segment,
        page_size=PAGE,
        budget=budget,
        dense_layers=dense_layers,
        need=tuple(map(tuple, needs_of(profiles, budget, dense_layers).tolist())),
    )
