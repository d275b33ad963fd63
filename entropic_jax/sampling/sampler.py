"""Draws one next token per row from the processed logits: temperature, truncation, Gumbel-max.

Rows are independent: what a row gets is bit for bit the same, whatever its neighbours ask for. Parameters
are arrays, so new values never retrace, and `lax.cond` skips a computation that no row of the batch asks for:
a greedy batch draws no random numbers, and a batch of plain sampling finds no thresholds.

Nothing is sorted: on a CPU, XLA takes far longer to sort a vocabulary than to bisect for a threshold.

>>> from entropic_jax.sampling import parameters
>>> logits = jnp.array([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
>>> temperature, seed, position = jnp.array([0.0, 5.0]), jnp.arange(2), jnp.zeros(2, jnp.int32)
>>> sample(logits, parameters(2, top_k=1), temperature, jax.random.key(0), seed, position).tolist()
[1, 1]
"""

import jax
import jax.numpy as jnp
from jax import lax

from ..pallas.gumbel_argmax import gumbel, gumbel_argmax
from ..pallas.gumbel_argmax.reference import first_largest
from ..state import Sampling
from ..state.sampling_parameters import defaults_unless
from .randomness import THREEFRY, random_bits, row_keys
from .truncation import SMALLEST, truncate


def sample(
    logits: jax.Array,
    sampling: Sampling,
    temperature: jax.Array,
    key: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    surprisal_limit: jax.Array | None = None,
    active: jax.Array | None = None,
) -> jax.Array:
    """Draws one token per row from softmax(truncate(logits / T)); int32 `[rows]`.

        token = argmax(truncate(z / T) + G),  G Gumbel noise from fold_in(fold_in(key, seed), position)

    Where T is 0 the row is greedy: the exact argmax, the first of ties, without truncation. A token with the
    logit −inf is drawn only if there is no other; a row with NaN gives a valid but arbitrary token. Not
    differentiable.

    Args:
        logits: float32 `[rows, vocabulary]`, after the processors.
        sampling: parameters of the rows.
        temperature: float32 `[rows]`, in force now, in place of `sampling.temperature`.
        key: the run's random key, typed or raw.
        seed: int32 `[rows]`.
        position: int32 `[rows]`, of the token in its text.
        surprisal_limit: as in `temper_and_truncate`.
        active: bool `[rows]`, the rows whose token is needed; None if each is.
    """
    logits = logits.astype(jnp.float32)
    warm = temperature > 0

    def draw():
        keys = row_keys(key, seed, position)
        truncated = temper_and_truncate(logits, sampling, temperature, warm, surprisal_limit)
        if jax.random.key_impl(keys) == THREEFRY:
            return gumbel_argmax(truncated, jax.random.key_data(keys), warm, active)
        noise = gumbel(random_bits(keys, logits.shape[-1]))
        return first_largest(truncated + jnp.where(warm[:, None], noise, 0.0))

    return lax.cond(jnp.any(warm), draw, lambda: first_largest(logits))


def temper_and_truncate(
    logits: jax.Array,
    sampling: Sampling,
    temperature: jax.Array,
    warm: jax.Array,
    surprisal_limit: jax.Array | None,
) -> jax.Array:
    """truncate(logits / T), float32 `[rows, vocabulary]`; greedy rows keep their logits.

    Args:
        logits: float32 `[rows, vocabulary]`.
        sampling: parameters of the rows.
        temperature: float32 `[rows]`.
        warm: bool `[rows]`, T > 0; the other rows are greedy.
        surprisal_limit: float32 `[rows]`, nats: tokens with −ln softmax(z / T) above it are cut off first,
            all but the most probable; None cuts off none.
    """
    # The largest logit is moved to 0 so that no temperature, however small, overflows.
    highest = jnp.max(logits, axis=-1, keepdims=True)
    shifted = logits - jnp.where(jnp.isfinite(highest), highest, 0.0)
    scaled = shifted / jnp.where(warm, jnp.maximum(temperature, SMALLEST), 1.0)[:, None]
    if surprisal_limit is not None:
        limited = jnp.any(warm & (surprisal_limit < jnp.inf))
        scaled = lax.cond(limited, _limit_surprisal, lambda z, _: z, scaled, surprisal_limit)
    truncated = truncate(scaled, defaults_unless(warm, sampling))  # which no greedy row asks for
    return jnp.where(warm[:, None], truncated, logits)


def _limit_surprisal(scaled: jax.Array, limit: jax.Array) -> jax.Array:
    highest = jnp.max(scaled, axis=-1)
    floor = jnp.minimum(jax.nn.logsumexp(scaled, axis=-1) - limit, highest)
    return jnp.where(scaled < floor[:, None], -jnp.inf, scaled)
