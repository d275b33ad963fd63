"""What a step is held to beyond sampling, row by row: tokens allowed, no end too early, tokens known before.

And what could have been drawn instead. Everything is skipped where no row asks for it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import entropy, step_entropy
from ..pallas.topk_entropy import topk_entropy
from ..state import Likeliest

MOST_ALTERNATIVES = 20


class Constraints(NamedTuple):
    """The terms of a step, or of all steps of a launch; `no_constraints` are none."""

    constrained: jax.Array  # bool [rows]: only tokens of `allowed` may be drawn
    allowed: jax.Array  # int32 [rows, ⌈vocabulary / 32⌉], bit t mod 32 of word t div 32 is token t
    least: jax.Array  # int32 [rows], length of the sequence before which no stop token may be drawn
    forced: jax.Array  # int32 [rows], the token to emit instead of drawing one; −1 draws
    reported: jax.Array  # bool [rows]: the likeliest tokens are asked for


def words(vocabulary: int) -> int:
    """How many words of 32 bits hold a bit for every token."""
    return -(-vocabulary // 32)


def no_constraints(rows: int, vocabulary: int) -> Constraints:
    """Nothing is asked."""
    no, zero = jnp.zeros(rows, bool), jnp.zeros(rows, jnp.int32)
    allowed = jnp.zeros((rows, words(vocabulary)), jnp.int32)
    return Constraints(no, allowed, zero, zero - 1, jnp.zeros(rows, bool))


def constrain(logits: jax.Array, constraints: Constraints, stop: jax.Array, length: jax.Array) -> jax.Array:
    """Logits `[rows, vocabulary]` with −inf where the terms forbid a token.

    stop int32 `[rows, n]` (−1 unused) are the tokens that end a row, length `[rows]` what the sequence will
    have with the token about to be drawn.

    >>> terms = no_constraints(1, 4)._replace(least=jnp.array([9]))
    >>> hold(jnp.zeros((1, 4)), terms, jnp.array([[2, -1]]), jnp.array([5])).tolist()
    [[0.0, 0.0, -inf, 0.0]]
    """
    rows, vocabulary = logits.shape
    early = length < constraints.least

    def allow(logits):
        token = jnp.arange(vocabulary)
        bit = (constraints.allowed[:, token // 32] >> (token % 32)) & 1
        return jnp.where(constraints.constrained[:, None] & (bit == 0), -jnp.inf, logits)

    def postpone(logits):
        where = jnp.where(early[:, None] & (stop >= 0), stop, vocabulary)
        return logits.at[jnp.arange(rows)[:, None], where].set(-jnp.inf, mode="drop")

    logits = lax.cond(constraints.constrained.any(), allow, lambda z: z, logits)
    return lax.cond(early.any(), postpone, lambda z: z, logits)


def any_constraint(constraints: Constraints, length: jax.Array) -> jax.Array:
    """Whether `constrain` may change any logit, bool `[]`; length as there."""
    return constraints.constrained.any() | (length < constraints.least).any()


def likeliest(logits: jax.Array, token: jax.Array, reported: jax.Array) -> Likeliest:
    """The likeliest tokens of softmax(z), z `[rows, vocabulary]`, and how likely `token` `[rows]` was.

    Of equally likely tokens the first comes first.

    >>> found = likeliest(jnp.zeros((1, 2)), jnp.array([1]), jnp.array([True]))
    >>> round(float(found.logprob[0]), 4), found.token.tolist()
    (-0.6931, [[0, 1]])
    """
    rows, vocabulary = logits.shape
    most = min(MOST_ALTERNATIVES, vocabulary)

    def find():
        if step_entropy.kernel(logits, most) is not None:
            found = topk_entropy(logits, most)
            total = found.calibrated.log_normaliser
            chosen = -entropy.surprisal(logits, token, total)
            return Likeliest(chosen, found.indices, found.values - total[:, None])
        logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
        largest, index = lax.top_k(logprobs, most)
        chosen = jnp.take_along_axis(logprobs, token[:, None], 1)[:, 0]
        return Likeliest(chosen, index.astype(jnp.int32), largest)

    def nothing():
        zero = jnp.zeros((rows, most), jnp.float32)
        return Likeliest(zero[:, 0], zero.astype(jnp.int32), zero)

    return lax.cond(reported.any(), find, nothing)
