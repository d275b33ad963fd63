"""Longest match in plain JAX: all positions are compared at once."""

import jax
import jax.numpy as jnp


def longest_match(text: jax.Array, last: jax.Array, longest: int) -> tuple[jax.Array, jax.Array]:
    """The contract is in the package's docstring."""
    rows, context = text.shape
    position = jnp.arange(context)
    matched = jnp.zeros((rows, context), jnp.int32)
    same = position < last[:, None]
    padded = jnp.pad(text, ((0, 0), (longest, 0)), constant_values=-1)
    for back in range(longest):
        token = jnp.take_along_axis(text, jnp.maximum(last - back, 0)[:, None], 1)
        same &= (padded[:, longest - back : longest - back + context] == token) & (position >= back)
        matched += same.astype(jnp.int32)
    best = matched.max(1)
    end = jnp.where((matched == best[:, None]) & (position < last[:, None]), position, 0).max(1)
    return best, end
