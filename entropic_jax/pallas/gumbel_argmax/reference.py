"""Gumbel-max sampling in plain JAX, with Threefry unrolled.

For a CPU, JAX lowers Threefry to loops of small operations, whose dispatch, three draws a token, takes as
long as reading millions of weights.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)
SMALLEST = np.finfo(np.float32).tiny  # temperature that divides


def threefry(key: tuple[jax.Array, jax.Array], x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds: two words of random bits for each counter.

    Args:
        key: two words, uint32.
        x: uint32, the first word of the counter.
        y: uint32, the second; the shape is that of x.

    Source: Salmon et al. 2011, Parallel Random Numbers: As Easy as 1, 2, 3.
    """
    words = (*key, key[0] ^ key[1] ^ PARITY)
    x, y = x + words[0], y + words[1]
    for group in range(5):
        for bits in ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << np.uint32(bits)) | (y >> np.uint32(32 - bits)))
        x, y = x + words[(group + 1) % 3], y + words[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


def folded(key: jax.Array, seed: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two words of each row's key, fold_in(fold_in(key, seed), position); uint32 `[rows]` each.

    Args:
        key: uint32 `[2]`, a Threefry key.
        seed: int32 `[rows]`.
        position: int32 `[rows]`.
    """
    pair = key[0], key[1]
    for data in (seed, position):
        pair = threefry(pair, jnp.zeros(data.shape, jnp.uint32), data.astype(jnp.uint32))
    return pair


def gumbel(bits: jax.Array) -> jax.Array:
    """Standard Gumbel noise from uniform uint32, finite, between −2.8 and 22.9.

    Differs from jax.random.gumbel: all 32 bits count where the noise is large, so that tokens of a
    probability below 2⁻²³ are drawn as often as they should.
    """
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def first_largest(values: jax.Array) -> jax.Array:
    """The index of the largest value of each row, the first of ties; int32 `[rows]`."""
    # As argmax, NaN included: XLA's CPU backend vectorises two plain reductions, but not one over pairs.
    index = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    largest = jnp.max(values, axis=-1, keepdims=True)
    return jnp.min(jnp.where((values == largest) | jnp.isnan(values), index, values.shape[-1] - 1), axis=-1)


def tempered(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """(z − max z) / T of each row, `[rows, vocabulary]`; greedy rows, of T = 0, are divided by 1.

    Args:
        logits: z, float32 `[rows, vocabulary]`.
        temperature: T, float32 `[rows]`.
    """
    # The largest logit is moved to 0 so that no temperature, however small, overflows.
    highest = jnp.max(logits, axis=-1, keepdims=True)
    shifted = logits - jnp.where(jnp.isfinite(highest), highest, 0.0)
    return shifted / jnp.where(temperature > 0, jnp.maximum(temperature, SMALLEST), 1.0)[:, None]


def gumbel_argmax(
    logits: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    active: jax.Array,
    numbers: jax.Array | None = None,
) -> jax.Array:
    """The contract is in the package's docstring."""
    noisy = temperature > 0

    def draw() -> jax.Array:
        first, second = folded(key, seed, position)
        number = jnp.arange(logits.shape[1]) if numbers is None else numbers
        number = jnp.broadcast_to(number.astype(jnp.uint32), logits.shape)
        x, y = threefry((first[:, None], second[:, None]), jnp.zeros_like(number), number)
        values = tempered(logits, temperature) + gumbel(x ^ y)
        return first_largest(jnp.where(noisy[:, None], values, logits))

    index = lax.cond(jnp.any(noisy), draw, lambda: first_largest(logits))
    return jnp.where(active, index, 0)
