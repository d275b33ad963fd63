"""Random bits per row, from run key, row seed and position only.

The very bits of `jax.random`, by an unrolled Threefry.
"""

import jax
import jax.numpy as jnp

from ..pallas.gumbel_argmax import folded, threefry

THREEFRY = "threefry2x32"


def typed(key: jax.Array) -> jax.Array:
    """A key as a typed one; raw words are of JAX's default kind."""
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)


def row_keys(key: jax.Array, seed: jax.Array, position: jax.Array) -> jax.Array:
    """The random keys of the rows, typed, `[rows]`: fold_in(fold_in(key, seed), position).

    Args:
        key: the run's random key.
        seed: int32 `[rows]`.
        position: int32 `[rows]`, of the token that is drawn.

    >>> found = row_keys(jax.random.key(0), jnp.array([3]), jnp.array([9]))
    >>> bool(found[0] == jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 3), 9))
    True
    """
    key = typed(key)
    if jax.random.key_impl(key) != THREEFRY:
        return jax.vmap(lambda s, p: jax.random.fold_in(jax.random.fold_in(key, s), p))(seed, position)
    words = folded(jax.random.key_data(key), seed, position)
    return jax.random.wrap_key_data(jnp.stack(words, -1), impl=THREEFRY)


def random_bits(keys: jax.Array, count: int) -> jax.Array:
    """Uniform uint32 `[rows, count]`: of each of the typed keys `[rows]`, what jax.random.bits gives.

    >>> keys = jax.random.split(jax.random.key(0), 2)
    >>> bool((random_bits(keys, 5)[1] == jax.random.bits(keys[1], (5,))).all())
    True
    """
    if jax.random.key_impl(keys) != THREEFRY:
        return jax.vmap(lambda key: jax.random.bits(key, (count,), jnp.uint32))(keys)
    words = jax.random.key_data(keys)
    number = jnp.broadcast_to(jnp.arange(count, dtype=jnp.uint32), (len(words), count))
    x, y = threefry((words[:, :1], words[:, 1:]), jnp.zeros_like(number), number)
    return x ^ y
