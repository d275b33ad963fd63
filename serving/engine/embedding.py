"""Embeddings: pooled hidden states of texts, computed beside the engine's own programs.

A text is read in chunks through a small KV cache of its own, so the engine's pages and rows are not touched.
A launch has few tokens, so that decode steps, which share the device with it, are never delayed by more than
that. Programs are compiled when they are first needed.

On a mesh, launches are made in the engine's thread, between two of its own: programs with collectives must
begin in the same order on all devices.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotDone
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
from ..request import RequestError
from .engine_call import EngineStoppedError
from .interface import EmbeddingLimits, Pooling

LONGEST = 8192  # tokens of a text, at most: the size of the KV cache that a text may need
CPU_BUDGET, BUDGET = 256, 2048  # tokens of a launch, on a CPU and on an accelerator
SHORTEST = 32  # tokens of a row, in the program for the shortest texts
GROWTH = 4  # from a program to that for longer texts
POLL = 0.2  # seconds between looks whether a caller still wants its embeddings

InEngine = Callable[[Callable[[], Any]], Future[Any]]  # calls a function in the engine's thread


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


class Embedder:
    """Computes embeddings with a model. May be called from several threads."""

    def __init__(self, model: models.Model, context: int, in_engine: InEngine) -> None:
        """An embedder without a compiled program.

        Args:
            model: whose hidden states are pooled.
            context: positions of a sequence, at most.
            in_engine: calls a function in the engine's thread, for programs on a mesh.
        """
        self.model, self._in_engine = model, in_engine
        self.limits = EmbeddingLimits(min(context, LONGEST), model.decoder.shape.hidden)
        self._lock = threading.Lock()  # of the programs
        self._launching = threading.Lock()  # one launch at a time shares the device with the engine
        self._compiled: dict[Shape, Callable[..., Any]] = {}

    def embed(
        self, texts: Sequence[Sequence[int]], pooling: Pooling, stop: threading.Event
    ) -> np.ndarray | None:
        """Pooled hidden states, see `Engine.embed`.

        Args:
            texts: token ids, between 1 and `limits.tokens` of each text.
            pooling: mean over the tokens, or the last token alone.
            stop: once it is set, the work ends after the launch that runs.

        Raises:
            RequestError: The model is divided over the devices of several processes.
        """
        if self.model.mesh is not None and (count := jax.process_count()) > 1:
            raise RequestError(f"num_processes must be 1 for embeddings; got {count}", "model")
        result = np.zeros((len(texts), self.limits.dimensions), np.float32)
        for shape, indices in batches([len(text) for text in texts], self.limits.tokens):
            if stop.is_set():
                return None
            pooled = self._embed_batch(shape, [texts[i] for i in indices], pooling, stop)
            if pooled is None:
                return None
            result[list(indices)] = pooled
        return result

    def _embed_batch(
        self, shape: Shape, texts: Sequence[Sequence[int]], pooling: Pooling, stop: threading.Event
    ) -> np.ndarray | None:
        kv_cache = self._launched(partial(self._new_cache, shape), stop)
        if kv_cache is None:
            return None
        sums, last = 0.0, np.zeros(0)
        total = np.zeros(shape.rows, np.int32)
        total[: len(texts)] = [len(text) for text in texts]
        for start in range(0, int(total.max()), shape.tokens):
            if stop.is_set():
                return None
            chunk = Chunk(
                np.zeros((shape.rows, shape.tokens), np.int32),
                np.full(shape.rows, start, np.int32),
                np.clip(total - start, 0, shape.tokens).astype(np.int32),
                total,
            )
            for row, text in enumerate(texts):
                chunk.tokens[row, : chunk.num_tokens[row]] = text[start : start + shape.tokens]
            program = self._program(shape, kv_cache, chunk)
            with self._launching:
                results = self._launched(partial(program, self.model.params, kv_cache, chunk), stop)
                if results is None:
                    return None
                kv_cache, (summed, newest) = results
                sums, last = sums + np.asarray(summed, np.float64), np.asarray(newest)
        pooled = last if pooling == "last" else sums / np.maximum(total, 1)[:, None]
        return pooled[: len(texts)]

    def _launched(self, launch: Callable[[], Any], stop: threading.Event) -> Any:
        """What a launch returns; on a mesh None if it was no longer wanted before the engine made it."""
        if self.model.mesh is None:
            return launch()
        done = self._in_engine(lambda: jax.block_until_ready(launch()))
        while not (stop.is_set() and done.cancel()):
            try:
                return done.result(POLL)
            except NotDone:
                continue
            except CancelledError:
                raise EngineStoppedError from None
        return None

    def _new_cache(self, shape: Shape) -> Cache:
        """An empty cache that has given every row its pages."""
        dtype = pages_of("auto", self.model.params)

        def create() -> Cache:
            empty = cache.allocate(self.model.decoder.shape, shape.rows, shape.capacity, dtype=dtype)
            rows, per_row = empty.table.shape
            table = jnp.arange(rows * per_row, dtype=jnp.int32).reshape(rows, per_row)
            return empty._replace(table=table, granted=jnp.full(rows, per_row, jnp.int32))

        return sharding.create(create, self.model.mesh)

    def _program(self, shape: Shape, kv_cache: Cache, chunk: Chunk) -> Callable[..., Any]:
        with self._lock:
            if shape not in self._compiled:
                decoder, arguments = self.model.decoder, (self.model.params, kv_cache, chunk)
                program = partial(sharding.launch, decoder, partial(encode_chunk, decoder))
                self._compiled[shape], _ = load_or_compile(program, arguments, 1)
            return self._compiled[shape]


def batches(
    lengths: Sequence[int], longest: int, budget: int | None = None
) -> Iterator[tuple[Shape, Sequence[int]]]:
    """Yield the launches for texts: the shape of their program, and the indices of the texts in it.

    Texts of at most `budget` tokens are batched with others of similar length. Each longer one is read in
    several launches.

    Args:
        lengths: tokens of each text, between 1 and `longest`.
        longest: tokens of a text, at most.
        budget: tokens of a launch; None is what suits the device.

    >>> [(shape.rows, shape.tokens, shape.capacity, i) for shape, i in batches([5, 300, 30, 90], 4096, 256)]
    [(8, 32, 32, [0, 2]), (2, 128, 128, [3]), (1, 256, 1024, [1])]
    """
    if budget is None:
        budget = CPU_BUDGET if jax.default_backend() == "cpu" else BUDGET
    waiting = sorted(range(len(lengths)), key=lengths.__getitem__)
    tokens = SHORTEST
    while waiting:
        shape = Shape(max(1, budget // tokens), min(tokens, budget), min(tokens, max(longest, budget)))
        fitting = [i for i in waiting if lengths[i] <= tokens]
        for first in range(0, len(fitting), shape.rows):
            yield shape, fitting[first : first + shape.rows]
        waiting = waiting[len(fitting) :]
        tokens = min(tokens * GROWTH, budget) if tokens < budget else tokens * GROWTH
