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
from ..pallas.gumbel_argmax.reference import first_largest, tempered
from ..state import Sampling
from ..state.sampling_parameters import defaults_unless
from .randomness import THREEFRY, random_bits, row_keys, typed
from .truncation import asks_for_truncation, truncate


def sample(
    logits: jax.Array,
    sampling: Sampling,
    temperature: jax.Array,
    key: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    surprisal_limit: jax.Array | None = None,
    active: jax.Array | None = None,
    numbers: jax.Array | None = None,
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
        surprisal_limit: float32 `[rows]`, nats: tokens with −ln softmax(z / T) above it are cut off first,
            all but the most probable; None cuts off none.
        active: bool `[rows]`, the rows whose token is needed; None if each is.
        numbers: int32 `[columns]`, ascending: the tokens whose logits are given, if those of all others are
            −inf; None if all are given. The key must then be a Threefry key.
    """
    logits, key = logits.astype(jnp.float32), typed(key)
    warm = temperature > 0
    truncates = warm & asks_for_truncation(sampling, logits.shape[1])
    if surprisal_limit is not None:
        truncates |= warm & (surprisal_limit < jnp.inf)

    def draw(logits: jax.Array, temperature: jax.Array) -> jax.Array:
        if jax.random.key_impl(key) == THREEFRY:
            words = jax.random.key_data(key)
            column = gumbel_argmax(logits, temperature, words, seed, position, active, numbers)
            return column if numbers is None else numbers[column]
        if numbers is not None:
            raise ValueError(f"key must be a Threefry key for a list of tokens; got {key.dtype}")
        noise = gumbel(random_bits(row_keys(key, seed, position), logits.shape[-1]))
        noisy = tempered(logits, temperature) + noise
        return first_largest(jnp.where(warm[:, None], noisy, logits))

    def draw_truncated() -> jax.Array:
        scaled = tempered(logits, temperature)
        if surprisal_limit is not None:
            limited = jnp.any(warm & (surprisal_limit < jnp.inf))
            scaled = lax.cond(limited, _limit_surprisal, lambda z, _: z, scaled, surprisal_limit)
        truncated = truncate(scaled, defaults_unless(warm, sampling))  # which no greedy row asks for
        return draw(jnp.where(warm[:, None], truncated, logits), warm.astype(jnp.float32))

    return lax.cond(jnp.any(truncates), draw_truncated, lambda: draw(logits, temperature))


def _limit_surprisal(scaled: jax.Array, limit: jax.Array) -> jax.Array:
    highest = jnp.max(scaled, axis=-1)
    floor = jnp.minimum(jax.nn.logsumexp(scaled, axis=-1) - limit, highest)
    return jnp.where(scaled < floor[:, None], -jnp.inf, scaled)
