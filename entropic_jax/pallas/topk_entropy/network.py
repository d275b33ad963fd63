"""Bitonic sorting and merging networks over the 128 lanes of a TPU register.

Tokens are pairs of a value and an index, ordered by descending value and then by ascending index.
K. E. Batcher, Sorting networks and their applications, 1968.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

LANES = 128
STAGES = 7  # log₂ of the lanes
NOWHERE = 2**31 - 1  # the index of no token, whose value is −inf


def before(value: Any, index: Any, other: Any, other_index: Any) -> Any:
    """Whether a token comes before another: it is likelier, or as likely with a lower index.

    Args:
        value, index: the value and the index of the first token.
        other, other_index: the value and the index of the second token.
    """
    return (value > other) | ((value == other) & (index < other_index))


def _exchange(values, indices, distance, flipped):
    """Order each pair of lanes at a distance that is a power of two; ascending where `flipped`."""
    lane = lax.broadcasted_iota(jnp.int32, values.shape, 1)
    upper = (lane & distance) != 0

    # Lane i receives lane i ^ distance.
    def exchange(x):
        return jnp.where(upper, pltpu.roll(x, distance, 1), pltpu.roll(x, LANES - distance, 1))

    others, other_indices = exchange(values), exchange(indices)
    keep = before(values, indices, others, other_indices) ^ upper ^ flipped
    return jnp.where(keep, values, others), jnp.where(keep, indices, other_indices)


def _exchange_from(start, values, indices, flipped):
    """Exchange at distances 2^start, …, 2, 1. A loop: unrolled, the network takes a minute to compile."""

    def step(n, pair):
        return _exchange(pair[0], pair[1], jnp.int32(1) << (start - n), flipped)

    return lax.fori_loop(0, start + 1, step, (values, indices))


def _sort(values, indices, ascending):
    """Sort every row of lanes."""
    lane = lax.broadcasted_iota(jnp.int32, values.shape, 1)

    # Merges runs of 2, 4, … lanes, of which every other one is ascending.
    def runs(n, pair):
        return _exchange_from(n, pair[0], pair[1], (lane & (jnp.int32(2) << n)) != 0)

    values, indices = lax.fori_loop(0, STAGES - 1, runs, (values, indices))
    return _exchange_from(STAGES - 1, values, indices, ascending)


def _fold(values, indices, ascending):
    """The first 128 tokens of each pair of rows: one descending, in the first half, and one ascending."""
    half = values.shape[0] // 2
    first = before(values[:half], indices[:half], values[half:], indices[half:])
    values = jnp.where(first, values[:half], values[half:])
    indices = jnp.where(first, indices[:half], indices[half:])
    return _exchange_from(STAGES - 1, values, indices, ascending)


def merge(values: jax.Array, indices: jax.Array, best: jax.Array, best_indices: jax.Array, group: int) -> Any:
    """The first 128 tokens of each row of the group, in ascending order.

    They come from `best` `[group, 128]`, ascending, and from values and indices
    `[strips · 3 · group, 128]`, in this order, where strips is a power of two.

    Args:
        values, indices: `[strips · 3 · group, 128]` in this order, strips a power of two.
        best, best_indices: `[group, 128]`, ascending.
        group: rows that are worked on at once.
    """
    three = 3 * group

    def second_half(rows: int):
        # The two halves that are folded together must be sorted in opposite directions, and so must `best`.
        row = lax.broadcasted_iota(jnp.int32, (rows, LANES), 0)
        return row >= (rows // 2 if rows > three else 2 * group)

    values, indices = _sort(values, indices, second_half(values.shape[0]))
    while values.shape[0] > three:
        values, indices = _fold(values, indices, second_half(values.shape[0] // 2))
    values, indices = jnp.concatenate([values, best]), jnp.concatenate([indices, best_indices])
    row = lax.broadcasted_iota(jnp.int32, (2 * group, LANES), 0)
    values, indices = _fold(values, indices, row >= group)
    return _fold(values, indices, jnp.ones((group, LANES), bool))
