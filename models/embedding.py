"""Token embeddings: looking up vectors, and the large table of a tied model, which is in memory once.

The output projection reads all of its kernel `[hidden, vocabulary]` for every token, the embedding one row of
a table `[vocabulary, hidden]`. Where the two are tied and the table is small, both are in memory, each in its
order. From `LARGE_TABLE` bytes on there is the kernel alone, and the vector of a token is gathered from its
column: the same numbers from more places of memory. On a CPU that takes little; other devices keep both. In
Params, the weights of `embed_tokens` and `lm_head` are then the same array.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from entropic_jax.mesh import first_of_shard, num_shards, sum_over_shards
from entropic_jax.mesh.devices import default_device
from entropic_jax.pallas.skinny_matmul import take_columns

from .config import Config

LARGE_TABLE = 2**28  # bytes from which a tied table is in memory once
MOST_SLICES = 32  # tokens whose embeddings are read by one slice each
EMBEDDING_MODULE, HEAD_MODULE = "embed_tokens", "lm_head"


class Embedding(nnx.Module):
    """Token embedding, `weight` [vocabulary, hidden], which the devices of a mesh hold by vocabulary.

    A weight of int8 has a `scale` for each row, of the dtype that the model computes in. A weight of another
    shape is the kernel of the output projection, whose columns are the vectors.
    """

    def __init__(self, vocabulary: int, hidden: int) -> None:
        self.shape = (vocabulary, hidden)
        self.weight = nnx.Param(jnp.zeros((vocabulary, hidden)))
        self.scale: nnx.Param | None = nnx.data(None)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        weight = self.weight[...]
        scale = None if self.scale is None else self.scale[...]
        if num_shards() == 1:
            if weight.shape != self.shape:
                return take_columns(*read_in_each_step(weight, tokens))
            vectors = look_up(weight, tokens)
            return vectors if scale is None else scaled_rows(vectors, look_up(scale[:, None], tokens))
        rows = weight.shape[0]
        last = rows * num_shards() - 1
        local = jnp.clip(tokens, 0, last) - first_of_shard(rows)
        held = (local >= 0) & (local < rows)
        vectors = jnp.take(weight, local, axis=0, mode="clip")
        if scale is not None:
            vectors = scaled_rows(vectors, jnp.take(scale[:, None], local, axis=0, mode="clip"))
        return sum_over_shards(jnp.where(held[..., None], vectors, jnp.zeros((), vectors.dtype)))


def scaled_rows(vectors: jax.Array, scale: jax.Array) -> jax.Array:
    """Rows of int8 times their scales `[..., 1]`, in the dtype of these."""
    return vectors.astype(scale.dtype) * scale


def look_up(weight: jax.Array, tokens: jax.Array) -> jax.Array:
    """The rows of a table for tokens; those outside of it have the nearest row."""
    if is_widened(weight):
        weight, tokens = read_in_each_step(weight, tokens)
        return jnp.take(weight, tokens, axis=0, mode="clip")
    if tokens.size > MOST_SLICES or default_device().platform != "cpu":
        return jnp.take(weight, tokens, axis=0, mode="clip")

    # XLA's CPU backend divides a gather among threads, and waking them takes longer than the gather.
    def row(token):
        return jax.lax.dynamic_index_in_dim(weight, token, 0, keepdims=False)

    vectors = jax.lax.map(row, jnp.clip(tokens.reshape(-1), 0, weight.shape[0] - 1))
    return vectors.reshape(*tokens.shape, weight.shape[1])


def is_widened(weight: jax.Array) -> bool:
    """Whether the default device widens numbers of this dtype before it copies them, as XLA does on a CPU."""
    half = weight.dtype.itemsize == 2 and jnp.issubdtype(weight.dtype, jnp.floating)
    return half and default_device().platform == "cpu"


def read_in_each_step(weight: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The arguments, such that vectors are read where they are looked up.

    XLA's CPU backend would move the widening of the table out of the loop over steps: the whole table, in
    every launch.
    """
    return jax.lax.optimization_barrier((weight, tokens)) if is_widened(weight) else (weight, tokens)


def may_have_one_table(config: Config, itemsize: int) -> bool:
    """Whether a model on the default device is to hold its table once; `itemsize` is bytes of a number."""
    size = config.vocab_size * config.hidden_size * itemsize
    large = size >= LARGE_TABLE and config.vocab_size != config.hidden_size
    return config.tie_word_embeddings and large and default_device().platform == "cpu"


def has_one_table(params: Any, config: Config) -> bool:
    """Whether the embedding of a model's Params is the kernel of its output projection."""
    return params[EMBEDDING_MODULE]["weight"].shape != (config.vocab_size, config.hidden_size)


def with_two_tables(params: Any, config: Config) -> Any:
    """The Params with an embedding `[vocabulary, hidden]`, of a model that is not in blocks."""
    if not has_one_table(params, config):
        return params
    table = params[EMBEDDING_MODULE]["weight"].T
    return {**params, EMBEDDING_MODULE: {**params[EMBEDDING_MODULE], "weight": table}}
