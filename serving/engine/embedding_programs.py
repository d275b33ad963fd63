"""Programs that compute embeddings, and the KV cache of the texts that are read.

On a mesh of several processes each has these programs, and launches them in the order of process 0.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax import models
from entropic_jax.attention.attend import TokenSpan, attend_to
from entropic_jax.mesh import sharding
from entropic_jax.state import cache
from entropic_jax.state.cache import Cache

from ..executable_cache import load_or_compile
from ..options.kv_cache import pages_of
from . import allocator

CREATE, READ = "create-embedding-cache", "embed"  # first words of the names of launches


class Chunk(NamedTuple):
    """The next tokens of some texts, one text a row."""

    tokens: Any  # int32 [rows, n]
    start: Any  # int32 [rows], position of the first
    num_tokens: Any  # int32 [rows], how many of the n are real
    total: Any  # int32 [rows], tokens of the whole text


class Shape(NamedTuple):
    """The shapes that a program is compiled for."""

    rows: int
    tokens: int  # of each row, in a launch
    capacity: int  # positions of each row's KV cache

    def empty_chunk(self) -> Chunk:
        """A chunk without tokens."""
        per_row = [np.zeros(self.rows, np.int32) for _ in range(3)]
        return Chunk(np.zeros((self.rows, self.tokens), np.int32), *per_row)


def named_shape(name: str) -> tuple[str, Shape] | None:
    """The first word and the shape of a launch's name; None for the name of another program.

    >>> named_shape("embed 8 32 32"), named_shape("decode 4 None False True")
    (('embed', Shape(rows=8, tokens=32, capacity=32)), None)
    """
    word, *sizes = name.split()
    return (word, Shape(*map(int, sizes))) if word in (CREATE, READ) else None


def encode_chunk(
    decoder: Any, params: Any, kv_cache: Cache, chunk: Chunk
) -> tuple[Cache, tuple[jax.Array, jax.Array]]:
    """Read a chunk of some texts.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        kv_cache: the KV cache of the texts so far; consumed.
        chunk: the tokens.

    Returns:
        The cache, and float32 `[rows, hidden]` twice: the sum of the hidden states of the chunk's tokens, and
        the hidden state of the last of them.
    """
    steps = jnp.arange(chunk.tokens.shape[1])
    positions = chunk.start[:, None] + steps
    attend = attend_to(kv_cache, TokenSpan(chunk.start, chunk.num_tokens))
    lengths = jnp.maximum(positions + 1, chunk.total[:, None])
    hidden, layers = decoder.hidden(params, chunk.tokens, positions, kv_cache.layers, attend, lengths)
    hidden = hidden.astype(jnp.float32)
    real = (steps < chunk.num_tokens[:, None])[..., None]
    last = jnp.maximum(chunk.num_tokens - 1, 0)[:, None, None]
    pooled = jnp.where(real, hidden, 0.0).sum(1), jnp.take_along_axis(hidden, last, 1)[:, 0]
    return kv_cache._replace(layers=layers), pooled


class EmbeddingPrograms:
    """The programs of a model that have been needed so far. May be called from several threads."""

    def __init__(self, model: models.Model) -> None:
        """No program; those of `model` are compiled when they are first needed."""
        self.model = model
        self._lock = threading.Lock()
        self._compiled: dict[Shape, Callable[..., Any]] = {}
        self._creators: dict[Shape, Callable[[], Cache]] = {}

    def __len__(self) -> int:
        return len(self._compiled)

    def new_cache(self, shape: Shape) -> Cache:
        """An empty cache that has given every row its pages."""
        with self._lock:
            if shape not in self._creators:
                self._creators[shape] = sharding.creator(partial(self._cache_of, shape), self.model.mesh)
            create = self._creators[shape]
        return create()

    def _cache_of(self, shape: Shape) -> Cache:
        dtype = pages_of("auto", self.model.params)
        empty = cache.allocate(self.model.decoder.shape, shape.rows, shape.capacity, dtype=dtype)
        rows, per_row = empty.table.shape
        table = jnp.arange(rows * per_row, dtype=jnp.int32).reshape(rows, per_row)
        return empty._replace(table=table, granted=jnp.full(rows, per_row, jnp.int32))

    def compiled(self, shape: Shape, kv_cache: Cache) -> Callable[..., Any]:
        """The program of a shape: of a cache and a chunk, with the results of `encode_chunk`.

        Args:
            shape: the shapes of the program.
            kv_cache: a cache of the shape.
        """
        with self._lock:
            if shape not in self._compiled:
                decoder = self.model.decoder
                program = partial(sharding.launch, decoder, partial(encode_chunk, decoder))
                arguments = (self.model.params, kv_cache, shape.empty_chunk())
                self._compiled[shape], is_new = load_or_compile(program, arguments, 1)
                if is_new:
                    allocator.trim()
            return partial(self._compiled[shape], self.model.params)
