"""Per-row constraints applied to logits and tokens: allowed tokens, minimum length; and log-probabilities.

`lax.cond` skips everything that no row of the batch asks for.
"""

import jax
import jax.numpy as jnp
from jax import lax

from .. import entropy
from ..pallas.topk_entropy import topk_entropy
from ..state import TopLogprobs
from ..state.constraints import ANYTHING, Constraints
from . import step_entropy

MAX_LOGPROBS = 20  # log-probabilities of the likeliest tokens that a row can ask for


def constrain(logits: jax.Array, constraints: Constraints, stop: jax.Array, length: jax.Array) -> jax.Array:
    """Logits with −inf for the tokens that the constraints forbid.

    Args:
        logits: float32 `[rows, vocabulary]`.
        constraints: the constraints of the rows.
        stop: int32 `[rows, n]`, the tokens that end a row; −1 where unused.
        length: int32 `[rows]`, of the sequence with the token about to be sampled.

    >>> from entropic_jax.state.constraints import no_constraints
    >>> constraints = no_constraints(1, 4)._replace(min_length=jnp.array([9]))
    >>> constrain(jnp.zeros((1, 4)), constraints, jnp.array([[2, -1]]), jnp.array([5])).tolist()
    [[0.0, 0.0, -inf, 0.0]]
    """
    rows, vocabulary = logits.shape
    too_short = length < constraints.min_length

    def mask(logits: jax.Array) -> jax.Array:
        allowed = constraints.sets.value[constraints.planned(constraints.mask, length)]
        bits = (allowed[:, :, None] >> jnp.arange(32)) & 1  # of each word; a gather of words takes longer
        bit = bits.reshape(rows, -1)[:, :vocabulary]
        return jnp.where(constraints.masked[:, None] & (bit == 0), -jnp.inf, logits)

    def forbid_stop(logits: jax.Array) -> jax.Array:
        token = jnp.where(too_short[:, None] & (stop >= 0), stop, vocabulary)
        return logits.at[jnp.arange(rows)[:, None], token].set(-jnp.inf, mode="drop")

    logits = lax.cond(constraints.masked.any(), mask, lambda z: z, logits)
    return lax.cond(too_short.any(), forbid_stop, lambda z: z, logits)


def pauses(constraints: Constraints, token: jax.Array, length: jax.Array) -> jax.Array:
    """The rows whose next mask the host does not know before it has seen this token, bool `[rows]`.

    Args:
        constraints: the constraints of the rows.
        token: int32 `[rows]`, sampled last.
        length: int32 `[rows]`, of the sequence with it.
    """
    expected = constraints.planned(constraints.expected, length)
    word = constraints.sets.value[constraints.pausing, token // 32]
    in_set = (word >> (token % 32)) & 1 == 1
    return constraints.masked & jnp.where(expected == ANYTHING, in_set, token != expected)


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
