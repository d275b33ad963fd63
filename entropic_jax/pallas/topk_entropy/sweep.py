"""The body of the TPU kernel: one sweep over the logits, and the state that it carries."""

from itertools import islice
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .network import LANES, NOWHERE, before, merge
from .parts import distance, weigh
from .reference import exactly

DEPTH = 3  # tokens that a bucket keeps


class Shape(NamedTuple):
    """The static parameters of the kernel."""

    rows: int  # of the array
    block: int  # rows of one grid step
    group: int
    vocabulary: int
    k: int
    buckets: int
    width: int  # tokens of one block; a divisor or a multiple of `buckets`
    transposed: bool = False  # the weights that are projected with: [vocabulary, hidden]


class State(NamedTuple):
    """The state between sweeps over the logits; float32 `[rows, LANES]` unless stated.

    The arrays live in HBM. While a grid step works on its rows, VMEM holds its blocks under the same names.
    """

    end_values: Any  # float32 [rows, buckets]: where the lists ended
    end_rounds: Any  # int32, the same: the round over the buckets in which a token came
    best: Any  # ascending: the largest tokens so far
    best_indices: Any  # int32
    highest: Any  # the same in every lane
    sums: Any  # [2, 3, rows, LANES]: sums of this sweep over tokens that no list kept
    max_unlisted: Any  # the largest such logit of each lane
    dropped_sums: Any  # [2, 3, rows, LANES]: sums of all sweeps over tokens that the merges dropped
    overflow: Any  # above 0 where a list may have missed one of the k largest


class BucketLists(NamedTuple):
    """The largest tokens of each bucket; NOWHERE where a list has no token."""

    values: Any  # float32 [DEPTH, block, buckets]
    rounds: Any  # int32, the same


def kernel(shape: Shape, first: bool, projecting: bool, active_ref: Any, scales_ref: Any, *refs: Any) -> None:
    """One grid step: one block of logits of one block of rows.

    Args:
        shape: the static parameters.
        first: whether this is the first sweep, without a state before.
        projecting: whether logits are a product.
        active_ref: int32, per block of rows: above 0 where the sweep is needed.
        scales_ref: float32 `[rows, 2]`, 1/T of belief and sampling.
        *refs: hidden, where it is projected; logits or weights; the state before, but for the first sweep;
            the state; the lists; and the products, where there are any.
    """
    left = iter(refs)
    hidden_ref: Any = next(left) if projecting else None
    source_ref: Any = next(left)
    fields = len(State._fields)
    old = [] if first else list(islice(left, fields))
    state = State(*islice(left, fields))
    lists = BucketLists(next(left), next(left))
    block_ref: Any = next(left) if projecting else source_ref
    step = pl.program_id(1)
    active = active_ref[pl.program_id(0)] > 0
    groups = shape.block // shape.group

    def rows_of(g):
        return pl.ds(pl.multiple_of(g * shape.group, shape.group) if groups > 1 else 0, shape.group)

    @pl.when(step == 0)
    def begin():
        lists.values[...] = jnp.full(lists.values.shape, -jnp.inf)
        lists.rounds[...] = jnp.full(lists.rounds.shape, NOWHERE)
        if first:
            for ref, value in (
                (state.highest, -jnp.inf),
                (state.best, -jnp.inf),
                (state.best_indices, NOWHERE),
                (state.dropped_sums, 0.0),
            ):
                ref[...] = jnp.full(ref.shape, value, ref.dtype)
        else:
            for ref, value in zip(state, old, strict=True):
                ref[...] = value[...]

    @pl.when(active & (step == 0))
    def forget():
        state.sums[...] = jnp.zeros(state.sums.shape)
        state.max_unlisted[...] = jnp.full(state.max_unlisted.shape, -jnp.inf)

    @pl.when(active)
    def take_in():
        if projecting:
            block_ref[...] = lax.dot_general(
                hidden_ref[...],
                source_ref[...],
                (((1,), (1 if shape.transposed else 0,)), ((), ())),
                precision=exactly(hidden_ref.dtype),
                preferred_element_type=jnp.float32,
            )

        def merge_group(g, _):
            _take_in(shape, first, step, block_ref, rows_of(g), scales_ref, state, lists)

        lax.fori_loop(0, groups, merge_group, None)

    @pl.when(active & (step == pl.num_programs(1) - 1))
    def settle():
        lax.fori_loop(0, groups, lambda g, _: _settle(shape, rows_of(g), scales_ref, state, lists), None)


def _take_in(
    shape: Shape, first: bool, number, block_ref, rows, scales_ref, state: State, lists: BucketLists
):
    """Add one block of logits of a group of rows to the lists and the sums."""
    buckets, width = shape.buckets, shape.width
    strips, rounds = min(buckets, width) // LANES, max(1, width // buckets)
    first_round = number * rounds if width >= buckets else number * width // buckets
    first_strip = 0 if width >= buckets else (number * width % buckets) // LANES
    lane = lax.broadcasted_iota(jnp.int32, (shape.group, LANES), 1)
    ragged = shape.vocabulary % width != 0
    full = shape.vocabulary // width  # blocks before the ragged one

    def logits(place):
        x = block_ref[rows, pl.ds(pl.multiple_of(place, LANES), LANES)].astype(jnp.float32)
        if not ragged:
            return x
        # Memory beyond the vocabulary may hold anything.
        return jnp.where((number < full) | (place + lane < shape.vocabulary % width), x, -jnp.inf)

    def largest(strip, top):
        for iteration in range(rounds):
            top = jnp.maximum(top, logits(iteration * buckets + strip * LANES))
        return top

    old = state.highest[rows]
    top = lax.fori_loop(0, strips, largest, jnp.full((shape.group, LANES), -jnp.inf))
    highest = jnp.maximum(old, jnp.broadcast_to(jnp.max(top, axis=1, keepdims=True), old.shape))
    state.highest[rows] = highest
    scales = [jnp.broadcast_to(scales_ref[rows, n : n + 1], old.shape) for n in range(2)]
    # The sums so far, relative to the new largest logit.
    moved = jnp.where(old == -jnp.inf, 0.0, distance(old, highest))
    sums = []
    for n, scale in enumerate(scales):
        zeroth, once, twice = (state.sums[n, part, rows] for part in range(3))
        shrink = jnp.exp(moved * scale)
        sums += [
            shrink * zeroth,
            shrink * (once + moved * zeroth),
            shrink * (twice + moved * (2 * once + moved * zeroth)),
        ]

    def strip_of(strip, carry):
        *sums, max_unlisted = carry
        lanes = pl.ds(pl.multiple_of((first_strip + strip) * LANES, LANES), LANES)
        kept = [
            (lists.values[level, rows, lanes], lists.rounds[level, rows, lanes]) for level in range(DEPTH)
        ]
        for iteration in range(rounds):
            x = logits(iteration * buckets + strip * LANES)
            j = jnp.full(x.shape, first_round + iteration)
            if not first:
                end, end_round = state.end_values[rows, lanes], state.end_rounds[rows, lanes]
                # NaN compares false and stays.
                x = jnp.where((x > end) | ((x == end) & (j <= end_round)), -jnp.inf, x)
            # The token moves in before the first that is smaller, and the others move on, the last to the
            # sums. An equal one stays before it: it came first. NaN is not larger, and goes to the sums.
            token = x
            for level, (value, round_of) in enumerate(kept):
                larger = token > value
                kept[level] = jnp.where(larger, x, value), jnp.where(larger, j, round_of)
                x, j = jnp.where(larger, value, x), jnp.where(larger, round_of, j)
            max_unlisted = jnp.where(x > max_unlisted, x, max_unlisted)
            apart = distance(x, highest)
            for n, scale in enumerate(scales):
                for part, summand in enumerate(weigh(apart, scale)):
                    sums[3 * n + part] = sums[3 * n + part] + summand
        for level, (value, round_of) in enumerate(kept):
            lists.values[level, rows, lanes] = value
            lists.rounds[level, rows, lanes] = round_of
        return (*sums, max_unlisted)

    *sums, state.max_unlisted[rows] = lax.fori_loop(0, strips, strip_of, (*sums, state.max_unlisted[rows]))
    for n in range(2):
        for part in range(3):
            state.sums[n, part, rows] = sums[3 * n + part]


def _settle(shape: Shape, rows, scales_ref, state: State, lists: BucketLists) -> None:
    """Merge the lists of a group of rows into `best`, and flag rows where a list may have missed a token."""
    strips, group = shape.buckets // LANES, shape.group
    # Blocks of a group of rows by strip and level: [strips · DEPTH · group, LANES].
    blocks = [(strip, level) for strip in range(strips) for level in range(DEPTH)]

    def lanes_of(ref, level, strip):
        return ref[level, rows, strip * LANES : (strip + 1) * LANES]

    values = jnp.concatenate([lanes_of(lists.values, level, strip) for strip, level in blocks])
    lane = lax.broadcasted_iota(jnp.int32, (group, LANES), 1)

    def index(strip, level):
        iteration = lanes_of(lists.rounds, level, strip)
        return jnp.where(iteration == NOWHERE, NOWHERE, iteration * shape.buckets + strip * LANES + lane)

    indices = jnp.concatenate([index(strip, level) for strip, level in blocks])
    old, old_indices = state.best[rows], state.best_indices[rows]
    best, best_indices = merge(values, indices, old, old_indices, group)
    state.best[rows], state.best_indices[rows] = best, best_indices

    # Tokens that come after the last of `best` are out for good: they join the sums.
    last, last_index = best[:, :1], best_indices[:, :1]
    highest = state.highest[rows]
    everything = (
        jnp.concatenate([values, old]).reshape(-1, group, LANES),
        jnp.concatenate([indices, old_indices]).reshape(-1, group, LANES),
    )
    gone = before(last, last_index, *everything)
    apart = distance(everything[0], highest)
    for n in range(2):
        scale = scales_ref[rows, n : n + 1]
        for part, summand in enumerate(weigh(apart, scale)):
            state.dropped_sums[n, part, rows] += jnp.where(gone, summand, 0.0).sum(0)

    # The k-th token is at lane 128 − k. A list whose last token comes before it may have missed some, if its
    # lane has dropped any token.
    least, least_index = (x[:, LANES - shape.k : LANES - shape.k + 1] for x in (best, best_indices))
    short = jnp.zeros((group, LANES))
    for strip in range(strips):
        value, iteration = lanes_of(lists.values, DEPTH - 1, strip), lanes_of(lists.rounds, DEPTH - 1, strip)
        ended = before(value, index(strip, DEPTH - 1), least, least_index)
        short = jnp.where(ended, 1.0, short)
        state.end_values[rows, strip * LANES : (strip + 1) * LANES] = value
        state.end_rounds[rows, strip * LANES : (strip + 1) * LANES] = iteration
    max_unlisted = state.max_unlisted[rows]
    lost = jnp.where((max_unlisted > -jnp.inf) & (max_unlisted >= least), short, 0.0)
    state.overflow[rows] = jnp.broadcast_to(jnp.max(lost, axis=1, keepdims=True), lost.shape)
