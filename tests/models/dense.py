"""A dense contiguous cache, and a way to run a model on it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from entropic_jax.models import Attend, Config, Decoder


def dense_attend(positions: jax.Array) -> Attend:
    """Attention over caches of (keys, values), `[rows, context, kv_heads, head_dim]` indexed by position."""

    def attend(query, key, value, cache, /, *, window):
        rows = jnp.arange(query.shape[0])[:, None]
        keys, values = (c.at[rows, positions].set(x) for c, x in zip(cache, (key, value), strict=True))
        groups = query.shape[2] // key.shape[2]
        grouped = query.reshape(*query.shape[:2], key.shape[2], groups, -1).astype(jnp.float32)
        scores = jnp.einsum("rnkgd,rckd->rkgnc", grouped, keys.astype(jnp.float32)) * query.shape[-1] ** -0.5
        age = positions[:, :, None] - jnp.arange(keys.shape[1])
        seen = (age >= 0) if window is None else (age >= 0) & (age < window)
        share = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
        out = jnp.einsum("rkgnc,rckd->rnkgd", share, values.astype(jnp.float32))
        return out.reshape(query.shape).astype(query.dtype), (keys, values)

    return attend


def empty_caches(config: Config, rows: int, context: int, dtype: Any = "float32") -> tuple[Any, ...]:
    shape = (rows, context, config.num_key_value_heads, config.head_dim)
    return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_hidden_layers))


@functools.partial(jax.jit, static_argnums=(0, 3))
def run(decoder: Decoder, params: Any, tokens: jax.Array, prompt: int) -> jax.Array:
    """Logits `[rows, n, vocabulary]`, the first `prompt` positions at once, then one after another."""
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    caches = empty_caches(decoder.config, rows, length, params["norm"]["weight"].dtype)

    def advance(caches, step):
        token, position = step
        out, caches = decoder.hidden(params, token, position, caches, dense_attend(position))
        return caches, decoder.logits(params, out)[:, 0]

    first = positions[:, :prompt]
    hidden, caches = decoder.hidden(params, tokens[:, :prompt], first, caches, dense_attend(first))
    rest = (tokens[:, prompt:].T[:, :, None], positions[:, prompt:].T[:, :, None])
    _, later = jax.lax.scan(advance, caches, rest)
    return jnp.concatenate([decoder.logits(params, hidden), later.transpose(1, 0, 2)], axis=1)
