"""Random bits per row, from run key, row seed and position only.

The very bits of `jax.random`, unrolled. For a CPU, JAX lowers Threefry to loops of small operations, whose
dispatch, three draws a token, takes as long as reading millions of weights.
"""

import jax
import jax.numpy as jnp
import numpy as np

THREEFRY = "threefry2x32"
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)


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
    words = jax.random.key_data(key)
    pair = words[0], words[1]
    for data in (seed, position):
        pair = threefry(pair, jnp.zeros(data.shape, jnp.uint32), data.astype(jnp.uint32))
    return jax.random.wrap_key_data(jnp.stack(pair, -1), impl=THREEFRY)


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
