"""Per-row constraints on sampling: allowed-token mask, minimum length, forced tokens; and log-probabilities.

`lax.cond` skips everything that no row of the batch asks for.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import entropy, step_entropy
from ..pallas.topk_entropy import topk_entropy
from ..state import TopLogprobs

MAX_LOGPROBS = 20  # log-probabilities of the likeliest tokens that a row can ask for


class Constraints(NamedTuple):
    """Constraints of one step, or of every step of a launch; see `no_constraints`."""

    masked: jax.Array  # bool [rows]: only tokens of `allowed` may be sampled
    allowed: jax.Array  # int32 [rows, ⌈vocabulary / 32⌉]: bit t mod 32 of word t div 32 is token t
    min_length: jax.Array  # int32 [rows], length of the sequence before which no stop token may be sampled
    forced: jax.Array  # int32 [rows], the token to emit instead of sampling one; −1 samples
    report_logprobs: jax.Array  # bool [rows]: the row asks for log-probabilities


def mask_words(vocabulary: int) -> int:
    """32-bit words that hold one bit per token."""
    return -(-vocabulary // 32)


def no_constraints(rows: int, vocabulary: int) -> Constraints:
    """Constraints that allow everything."""
    no, zero = jnp.zeros(rows, bool), jnp.zeros(rows, jnp.int32)
    allowed = jnp.zeros((rows, mask_words(vocabulary)), jnp.int32)
    return Constraints(no, allowed, zero, zero - 1, jnp.zeros(rows, bool))


def constrain(logits: jax.Array, constraints: Constraints, stop: jax.Array, length: jax.Array) -> jax.Array:
    """Logits with −inf for the tokens that the constraints forbid.

    Args:
        logits: float32 `[rows, vocabulary]`.
        constraints: of the rows.
        stop: int32 `[rows, n]`, the tokens that end a row; −1 where unused.
        length: int32 `[rows]`, of the sequence with the token about to be sampled.

    >>> constraints = no_constraints(1, 4)._replace(min_length=jnp.array([9]))
    >>> constrain(jnp.zeros((1, 4)), constraints, jnp.array([[2, -1]]), jnp.array([5])).tolist()
    [[0.0, 0.0, -inf, 0.0]]
    """
    rows, vocabulary = logits.shape
    too_short = length < constraints.min_length

    def mask(logits: jax.Array) -> jax.Array:
        token = jnp.arange(vocabulary)
        bit = (constraints.allowed[:, token // 32] >> (token % 32)) & 1
        return jnp.where(constraints.masked[:, None] & (bit == 0), -jnp.inf, logits)

    def forbid_stop(logits: jax.Array) -> jax.Array:
        token = jnp.where(too_short[:, None] & (stop >= 0), stop, vocabulary)
        return logits.at[jnp.arange(rows)[:, None], token].set(-jnp.inf, mode="drop")

    logits = lax.cond(constraints.masked.any(), mask, lambda z: z, logits)
    return lax.cond(too_short.any(), forbid_stop, lambda z: z, logits)


def any_constraint(constraints: Constraints, length: jax.Array) -> jax.Array:
    """Whether `constrain` may change any logit, bool `[]`; `length` as there."""
    return constraints.masked.any() | (length < constraints.min_length).any()


def top_logprobs(logits: jax.Array, token: jax.Array, requested: jax.Array) -> TopLogprobs:
    """Log-probabilities of `token` and of the likeliest tokens under softmax(logits). Ties: lower id first.

    Args:
        logits: float32 `[rows, vocabulary]`.
        token: int32 `[rows]`.
        requested: bool `[rows]`; where no row asks for them, the result is 0 and nothing is computed.

    >>> result = top_logprobs(jnp.zeros((1, 2)), jnp.array([1]), jnp.array([True]))
    >>> round(float(result.logprob[0]), 4), result.token.tolist()
    (-0.6931, [[0, 1]])
    """
    rows, vocabulary = logits.shape
    k = min(MAX_LOGPROBS, vocabulary)

    def compute() -> TopLogprobs:
        if step_entropy.kernel(logits, k) is not None:
            top = topk_entropy(logits, k)
            log_normaliser = top.calibrated.log_normaliser
            logprob = -entropy.surprisal(logits, token, log_normaliser)
            return TopLogprobs(logprob, top.indices, top.values - log_normaliser[:, None])
        logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
        largest, index = lax.top_k(logprobs, k)
        logprob = jnp.take_along_axis(logprobs, token[:, None], 1)[:, 0]
        return TopLogprobs(logprob, index.astype(jnp.int32), largest)

    def skip() -> TopLogprobs:
        zero = jnp.zeros((rows, k), jnp.float32)
        return TopLogprobs(zero[:, 0], zero.astype(jnp.int32), zero)

    return lax.cond(requested.any(), compute, skip)
