"""Embeddings: pooled hidden states of texts, computed beside the engine's own programs.

A text is read in chunks through a small KV cache of its own, so the engine's pages and rows are not touched.
A launch has few tokens, so that decode steps, which share the device with it, are never delayed by more than
that. Programs are compiled when they are first needed.

On a mesh, launches are made in the engine's thread, between two of its own: programs with collectives must
begin in the same order on all devices. Several processes launch them together, for one batch of texts at a
time.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotDone
from functools import partial
from typing import Any

import jax
import numpy as np

from entropic_jax import models
from entropic_jax.state.cache import Cache

from ..options import draft_model
from .broadcast import Broadcaster, Key
from .embedding_programs import CREATE, READ, EmbeddingPrograms, Shape
from .engine_call import EngineStoppedError
from .interface import EmbeddingLimits, Pooling

LONGEST = 8192  # tokens of a text, at most: the size of the KV cache that a text may need
CPU_BUDGET, BUDGET = 256, 2048  # tokens of a launch, on a CPU and on an accelerator
SHORTEST = 32  # tokens of a row, in the program for the shortest texts
GROWTH = 4  # from a program to that for longer texts
POLL = 0.2  # seconds between looks whether a caller still wants its embeddings

InEngine = Callable[[Callable[[], Any]], Future[Any]]  # calls a function in the engine's thread


class Embedder:
    """Computes embeddings with a model. May be called from several threads."""

    def __init__(
        self,
        model: models.Model,
        context: int,
        in_engine: InEngine,
        failure: Callable[[], BaseException | None] = lambda: None,
        broadcaster: Broadcaster | None = None,
    ) -> None:
        """An embedder without a compiled program.

        Args:
            model: whose hidden states are pooled.
            context: positions of a sequence, at most.
            in_engine: calls a function in the engine's thread, for programs on a mesh.
            failure: what has stopped the engine, if anything, whose thread may wait for a dead process.
            broadcaster: tells the other processes of a mesh what is launched.
        """
        model = draft_model.target_of(model)
        self.programs, self._in_engine, self._broadcaster = EmbeddingPrograms(model), in_engine, broadcaster
        self._failure, self._on_mesh = failure, model.mesh is not None
        self.limits = EmbeddingLimits(min(context, LONGEST), model.decoder.shape.hidden)
        self._launching = threading.Lock()  # one launch at a time shares the device with the engine
        self._batch = threading.Lock()  # of several processes, each of which holds one cache

    def embed(
        self, texts: Sequence[Sequence[int]], pooling: Pooling, stop: threading.Event
    ) -> np.ndarray | None:
        """Pooled hidden states, see `Engine.embed`.

        Args:
            texts: token ids, between 1 and `limits.tokens` of each text.
            pooling: mean over the tokens, or the last token alone.
            stop: once it is set, the work ends after the launch that runs.
        """
        result = np.zeros((len(texts), self.limits.dimensions), np.float32)
        for shape, indices in batches([len(text) for text in texts], self.limits.tokens):
            if stop.is_set():
                return None
            with self._batch if self._broadcaster is not None else contextlib.nullcontext():
                pooled = self._embed_batch(shape, [texts[i] for i in indices], pooling, stop)
            if pooled is None:
                return None
            result[list(indices)] = pooled
        return result

    def _embed_batch(
        self, shape: Shape, texts: Sequence[Sequence[int]], pooling: Pooling, stop: threading.Event
    ) -> np.ndarray | None:
        create = partial(self.programs.new_cache, shape)
        kv_cache = self._launched((CREATE, *shape), create, (), stop)
        if kv_cache is None:
            return None
        program = self._compiled(shape, kv_cache)
        sums, last = 0.0, np.zeros(0)
        total = np.zeros(shape.rows, np.int32)
        total[: len(texts)] = [len(text) for text in texts]
        for start in range(0, int(total.max()), shape.tokens):
            if stop.is_set():
                return None
            num_tokens = np.clip(total - start, 0, shape.tokens).astype(np.int32)
            first = np.full(shape.rows, start, np.int32)
            chunk = shape.empty_chunk()._replace(start=first, num_tokens=num_tokens, total=total)
            for row, text in enumerate(texts):
                chunk.tokens[row, : chunk.num_tokens[row]] = text[start : start + shape.tokens]
            with self._launching:
                results = self._launched((READ, *shape), partial(program, kv_cache, chunk), chunk, stop)
                if results is None:
                    return None
                kv_cache, (summed, newest) = results
                sums, last = sums + np.asarray(summed, np.float64), np.asarray(newest)
        pooled = last if pooling == "last" else sums / np.maximum(total, 1)[:, None]
        return pooled[: len(texts)]

    def _compiled(self, shape: Shape, kv_cache: Cache) -> Callable[..., Any]:
        """The program of a shape, once all processes have compiled it."""
        if self._broadcaster is not None:
            self._broadcaster.begin_compilation((READ, *shape))
        program = self.programs.compiled(shape, kv_cache)
        if self._broadcaster is not None:
            self._broadcaster.await_compilation((READ, *shape))
        return program

    def _launched(self, key: Key, launch: Callable[[], Any], sent: Any, stop: threading.Event) -> Any:
        """The result of a launch; on a mesh None if it was cancelled before the engine made it.

        Args:
            key: the name of the launch for other processes.
            launch: makes it.
            sent: the arrays that the other processes get.
            stop: set once it is not wanted any more.
        """
        if not self._on_mesh:
            return launch()

        def launch_everywhere() -> Any:
            if self._broadcaster is not None:
                self._broadcaster.launch(key, sent)
            return jax.block_until_ready(launch())

        done = self._in_engine(launch_everywhere)
        while not (stop.is_set() and done.cancel()):
            try:
                return done.result(POLL)
            except NotDone:
                if self._failure() is not None:
                    raise EngineStoppedError from None
            except CancelledError:
                raise EngineStoppedError from None
        return None


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
