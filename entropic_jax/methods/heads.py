"""The entropy of every head over a text: which heads look at a few places, and which look everywhere."""

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import loop
from ..cache import allocate
from ..control import chain
from ..prefill import PrefillChunk
from .entropy_prefill import Course, EntropyPrefill
from .method import Method, Scene, Verdict, best
from .oracle import attention_of_pages

EVERYWHERE = 2**30  # tokens below which a text is read densely: all of it


class Heads(NamedTuple):
    """What was measured of the KV heads; NaN in segments before which there are less than two pages."""

    entropy: np.ndarray  # [layers, kv_heads, segments], as the policy defines it
    rigid: np.ndarray  # bool [layers, kv_heads]: below the policy's threshold in every segment
    # As `entropy`, where asked for: the share of true attention that the base budget would leave unread.
    unread: np.ndarray | None = None


class Seen(NamedTuple):
    """A `Course`, and what the base budget would leave unread of the segment, `[rows, kv_heads]`."""

    course: Any
    unread: jax.Array


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Witness:
    """Judges as a policy does, and looks at the true attention, as expensive as dense attention."""

    policy: EntropyPrefill
    segment: int
    page_size: int | None
    dense_below: int = EVERYWHERE
    dense_layers: int = 0

    def begin(self, rows: int, kv_heads: int, pages: int) -> Seen:
        """See `Prefill`."""
        return Seen(self.policy.begin(rows, kv_heads, pages), jnp.zeros((rows, kv_heads)))

    def judge(self, scene: Scene, memory: Seen, below: None) -> tuple[Verdict, Seen, None]:
        """See `Prefill`."""
        verdict, course, _ = self.policy.judge(scene, memory.course, None)
        pages = jnp.full(verdict.budget.shape, self.policy.base // scene.layer.keys.shape[2], jnp.int32)
        earlier = scene.earlier[:, None]
        left = earlier & ~best(verdict.worth, earlier, jnp.minimum(pages, scene.earlier.sum(1)[:, None]))
        mass = jnp.where(left, attention_of_pages(scene), 0.0).sum(-1)
        unread = mass / jnp.maximum(scene.asked.sum(1), 1).astype(jnp.float32)[:, None]
        return verdict, Seen(course, unread), None


def measure(
    decoder: loop.Decoder,
    params: Any,
    tokens: Sequence[int],
    policy: EntropyPrefill | None = None,
    *,
    unread: bool = False,
) -> Heads:
    """The block-attention entropy of each KV head in each segment of a text, which is read densely.

    With `unread`, what the base budget would miss, too, at the price of the whole attention once more.
    Raises ValueError for a text that does not fill one segment and begin another.
    """
    policy = replace(EntropyPrefill() if policy is None else policy, dense_below=EVERYWHERE)
    if len(tokens) <= policy.segment:
        raise ValueError(f"tokens has {len(tokens)}; accepted are more than {policy.segment}, a segment")
    dtype = jax.tree.leaves(params)[0].dtype
    pool = allocate(decoder.shape, 1, len(tokens), page_size=policy.page_size, dtype=dtype)
    asked = Witness(policy, policy.segment, policy.page_size) if unread else policy
    given = dict(key=jax.random.key(0), max_tokens=len(tokens), page_policy=Method(asked))
    state = loop.start(decoder, params, chain(), pool, [list(tokens[:1])], **given)
    found, missed = [], []
    for begin in range(0, len(tokens), policy.segment):
        some = np.zeros((1, policy.segment + 1), np.int32)
        piece = tokens[begin : begin + policy.segment]
        some[0, : len(piece)] = piece
        count = np.array([len(piece)], np.int32)
        chunk = PrefillChunk(np.zeros(1, np.int32), some, count, count + begin)
        state, _ = loop.launch_prefill(decoder, params, state, chunk)
        seen: tuple[Any, ...] = state.page_policy_state.prefill
        courses: list[Course] = [x.course if unread else x for x in seen]
        found.append([np.asarray(course.entropy[0]) for course in courses])
        missed.append([np.asarray(x.unread[0]) for x in seen] if unread else ())
    first = -(-2 * pool.page_size // policy.segment)
    by_segment = lambda values: np.where(np.arange(len(found)) < first, np.nan, np.moveaxis(values, 0, -1))
    entropy = by_segment(np.array(found))
    rigid = np.nanmax(entropy, -1) < policy.rigid_below
    return Heads(entropy, rigid, by_segment(np.array(missed)) if unread else None)


def rigid_threshold(found: Heads, tolerance: float = 0.01) -> float:
    """The highest threshold below which heads need no more than the base budget, in [0, 1].

    A head is rigid below it; the rigid heads together, each held to the base budget throughout, leave at
    most the `tolerance` of their attention unread. It lies midway between the entropies of two heads.

    >>> entropy, unread = np.array([[[0.2], [0.4], [0.8]]]), np.array([[[0.0], [0.01], [0.2]]])
    >>> round(rigid_threshold(Heads(entropy, entropy[..., 0] > 9, unread)), 6)
    0.6
    """
    if found.unread is None:
        raise ValueError("found.unread is None; accepted is that of `measure(…, unread=True)`")
    most, missed = np.nanmax(found.entropy, -1).reshape(-1), np.nanmean(found.unread, -1).reshape(-1)
    order = np.argsort(most)
    together = np.cumsum(missed[order]) / np.arange(1, len(order) + 1)
    count = int((together <= tolerance).cumprod().sum())
    edges = np.concatenate([[0.0], most[order], [1.0]])
    return float((edges[count] + edges[count + 1]) / 2) if count < len(order) else 1.0
