"""Constraints as data: which tokens each row may sample next, as the host has planned it.

Which tokens are allowed may follow from those before them, by rules that only the host knows (a grammar). The
host plans ahead: it states the masks of the next positions of a row, each under the condition that the tokens
before it are those that it expects. A row that emits another token pauses until the host plans again.
`sampling.constraints` applies them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .row_subset import Shared

NOTHING, ANYTHING = -1, -2  # in `Constraints.expected`


class Constraints(NamedTuple):
    """Constraints of one step, or of every step of a launch; see `no_constraints`.

    A set of tokens is a row of `sets`: bit t mod 32 of word t div 32 is token t. The mask of a position past
    the n planned ones is the last.
    """

    masked: jax.Array  # bool [rows]: only tokens of the masks may be sampled
    sets: Shared  # int32 [m, ⌈vocabulary / 32⌉], shared by all rows
    mask: jax.Array  # int32 [rows, n]: the set of tokens that may be sampled at each of the next positions
    # int32 [rows, n], of a masked row: the token after which the next mask holds; it pauses after others.
    # NOTHING pauses after every token, ANYTHING after those of the set `pausing`.
    expected: jax.Array
    pausing: jax.Array  # int32 [rows]: a set of tokens
    start: jax.Array  # int32 [rows], length of the sequence with the token of the first planned position
    min_length: jax.Array  # int32 [rows], length of the sequence before which no stop token may be sampled
    forced: jax.Array  # int32 [rows], the token to emit instead of sampling one; −1 samples
    report_logprobs: jax.Array  # bool [rows]: the row asks for log-probabilities
    drafts: jax.Array  # bool [rows]: tokens may be drafted for the row

    def planned(self, values: jax.Array, length: jax.Array) -> jax.Array:
        """The entries of `mask` or `expected` for the token about to be sampled.

        Args:
            values: `[rows, n]`.
            length: int32 `[rows]`, of the sequence with that token.
        """
        index = jnp.clip(length - self.start, 0, values.shape[1] - 1)
        return jnp.take_along_axis(values, index[:, None], 1)[:, 0]


def mask_words(vocabulary: int) -> int:
    """32-bit words that hold one bit per token."""
    return -(-vocabulary // 32)


def no_constraints(rows: int, vocabulary: int, positions: int = 1, num_sets: int = 1) -> Constraints:
    """Constraints that allow everything.

    Args:
        rows: number of rows of the batch.
        vocabulary: number of tokens.
        positions: n, that can be planned ahead.
        num_sets: m, sets of tokens that the constraints have room for.
    """
    no, zero = jnp.zeros(rows, bool), jnp.zeros(rows, jnp.int32)
    planned = jnp.zeros((rows, positions), jnp.int32)
    sets = Shared(jnp.zeros((num_sets, mask_words(vocabulary)), jnp.int32))
    return Constraints(
        masked=no,
        sets=sets,
        mask=planned,
        expected=planned + NOTHING,
        pausing=zero,
        start=zero,
        min_length=zero,
        forced=zero - 1,
        report_logprobs=no,
        drafts=jnp.ones(rows, bool),
    )
