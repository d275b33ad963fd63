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

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..pallas.gumbel_argmax import gumbel, gumbel_argmax
from ..pallas.gumbel_argmax.reference import first_largest, tempered
from ..state import Sampling
from ..state.sampling_parameters import defaults_unless
from .randomness import THREEFRY, random_bits, row_keys, typed
from .truncation import asks_for_truncation, choice_chance, truncate


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
    logits, randomness = logits.astype(jnp.float32), (typed(key), seed, position, active, numbers)

    def draw_truncated() -> jax.Array:
        truncated = _temper_and_truncate(logits, sampling, temperature, surprisal_limit, randomness)
        return _draw(truncated, (temperature > 0).astype(jnp.float32), *randomness)

    truncates = _truncates(logits, sampling, temperature, surprisal_limit)
    return lax.cond(truncates, draw_truncated, lambda: _draw(logits, temperature, *randomness))


def _truncates(
    logits: jax.Array, sampling: Sampling, temperature: jax.Array, surprisal_limit: jax.Array | None
) -> jax.Array:
    """Whether a row that is not greedy leaves out tokens, bool `[]`; see `sample`."""
    asks = asks_for_truncation(sampling, logits.shape[1])
    asks = asks if surprisal_limit is None else asks | (surprisal_limit < jnp.inf)
    return jnp.any(asks & (temperature > 0))


def _draw(
    logits: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    active: jax.Array | None,
    numbers: jax.Array | None,
) -> jax.Array:
    """A token of each row, without truncation; the arguments are those of `sample`, with a typed key."""
    if jax.random.key_impl(key) == THREEFRY:
        words = jax.random.key_data(key)
        column = gumbel_argmax(logits, temperature, words, seed, position, active, numbers)
        return column if numbers is None else numbers[column]
    if numbers is not None:
        raise ValueError(f"key must be a Threefry key for a list of tokens; got {key.dtype}")
    noise = gumbel(random_bits(row_keys(key, seed, position), logits.shape[-1]))
    noisy = tempered(logits, temperature) + noise
    return first_largest(jnp.where((temperature > 0)[:, None], noisy, logits))


def _temper_and_truncate(
    logits: jax.Array,
    sampling: Sampling,
    temperature: jax.Array,
    surprisal_limit: jax.Array | None,
    randomness: tuple[Any, ...],
) -> jax.Array:
    """truncate(logits / T), float32 `[rows, vocabulary]`; greedy rows keep their logits; see `sample`."""
    warm, scaled = temperature > 0, tempered(logits, temperature)
    if surprisal_limit is not None:
        limited = jnp.any(warm & (surprisal_limit < jnp.inf))
        scaled = lax.cond(limited, _limit_surprisal, lambda z, _: z, scaled, surprisal_limit)
    chance = choice_chance(sampling, *randomness[:3])
    truncated = truncate(scaled, defaults_unless(warm, sampling), chance)  # which no greedy row asks for
    return jnp.where(warm[:, None], truncated, logits)


def _limit_surprisal(scaled: jax.Array, limit: jax.Array) -> jax.Array:
    highest = jnp.max(scaled, axis=-1)
    floor = jnp.minimum(jax.nn.logsumexp(scaled, axis=-1) - limit, highest)
    return jnp.where(scaled < floor[:, None], -jnp.inf, scaled)
