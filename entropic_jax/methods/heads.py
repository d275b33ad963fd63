"""The entropy of every head over a text: which heads look at a few places, and which look everywhere."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import loop
from ..cache import allocate
from ..control import chain
from .entropy_prefill import EntropyPrefill
from .method import Method

EVERYWHERE = 2**30  # tokens below which a text is read densely: all of it


class Heads(NamedTuple):
    """What was measured of the KV heads; NaN in segments before which there are less than two pages."""

    entropy: np.ndarray  # [layers, kv_heads, segments], as the policy defines it
    rigid: np.ndarray  # bool [layers, kv_heads]: below the policy's threshold in every segment


def measure(
    decoder: loop.Decoder, params: Any, tokens: Sequence[int], policy: EntropyPrefill | None = None
) -> Heads:
    """The block-attention entropy of each KV head in each segment of a text, which is read densely.

    Raises ValueError for a text that does not fill one segment and begin another.
    """
    policy = replace(EntropyPrefill() if policy is None else policy, dense_below=EVERYWHERE)
    if len(tokens) <= policy.segment:
        raise ValueError(f"tokens has {len(tokens)}; accepted are more than {policy.segment}, a segment")
    dtype = jax.tree.leaves(params)[0].dtype
    pool = allocate(decoder.shape, 1, len(tokens), page_size=policy.page_size, dtype=dtype)
    given = dict(key=jax.random.key(0), max_tokens=len(tokens), selection=Method(policy))
    state = loop.start(decoder, params, chain(), pool, [list(tokens[:1])], **given)
    found = []
    for begin in range(0, len(tokens), policy.segment):
        some = np.zeros((1, policy.segment + 1), np.int32)
        piece = tokens[begin : begin + policy.segment]
        some[0, : len(piece)] = piece
        count = jnp.array([len(piece)], jnp.int32)
        state, _ = loop.prefill(decoder, params, state, jnp.asarray(some), count)
        found.append([np.asarray(course.entropy[0]) for course in state.lists.prefill])
    entropy = np.moveaxis(np.array(found), 0, -1)
    entropy[..., : -(-2 * pool.page_size // policy.segment)] = np.nan
    rigid = np.nanmax(entropy, -1) < policy.rigid_below
    return Heads(entropy, rigid)
