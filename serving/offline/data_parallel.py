"""Data-parallel offline generation: the requests of a batch in groups, each group on the next idle rank.

Each rank has a copy of the model on devices of its own. What a request is answered does not depend on its
rank: noise follows from its seed and the position. Copies are made when a batch has work for them.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from entropic_jax import models
from entropic_jax.mesh.devices import use_device

from ..options import draft_model
from ..options.parallelism import Place
from ..request import Request
from ..request.transcript import Completion, Token
from .engine import Engine


class DataParallelGenerator:
    """A `Generator` over several engines.

    Args:
        model: on the devices of the first place.
        places: where the engine of each rank runs.
        engine_of: makes an engine of a model.
    """

    def __init__(
        self, model: models.Model, places: Sequence[Place], engine_of: Callable[[models.Model], Engine]
    ) -> None:
        self.model, self.places, self._engine_of = model, tuple(places), engine_of
        with use_device(self.places[0].device):
            self.engines = [engine_of(model)]

    @property
    def defaults(self) -> Mapping[str, object]:
        """The sampling fields that the model's makers recommend; see `Engine.defaults`."""
        return self.engines[0].defaults

    @property
    def vocabulary(self) -> int:
        """The number of token ids of the model."""
        return self.engines[0].vocabulary

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt that the model's chat template makes of the messages."""
        return self.engines[0].chat(messages)

    def stream(self, request: Request) -> Iterator[Token]:
        """The tokens of one request as they become certain, from the first rank."""
        return self.engines[0].stream(request)

    def batch(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """The completions of the requests, in their order, computed by as many ranks as have work."""
        per_rank = -(-len(requests) // len(self.places))
        size = max(1, min(self.engines[0].together, per_rank))
        groups = [requests[first : first + size] for first in range(0, len(requests), size)]
        ranks = min(len(groups), len(self.places))
        self._copy_to(ranks)
        idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        for rank in range(ranks):
            idle.put(rank)
        cancelled = threading.Event()

        def run(group: Sequence[Request]) -> list[Completion]:
            rank = idle.get()
            try:
                with use_device(self.places[rank].device):
                    return list(self.engines[rank].batch(group, cancelled))
            finally:
                idle.put(rank)

        pool = ThreadPoolExecutor(max(1, ranks), "rank")
        try:
            for completions in pool.map(run, groups):
                yield from completions
        finally:  # also where the caller reads no further, or a rank has failed
            cancelled.set()
            pool.shutdown(cancel_futures=True)

    def _copy_to(self, ranks: int) -> None:
        """Make the engines that are missing of the first `ranks`."""
        for device, mesh in self.places[len(self.engines) : ranks]:
            assert device is not None, "each of several places has a device"
            with use_device(device):
                self.engines.append(self._engine_of(draft_model.copied(self.model, device, mesh)))
        sharers = len(self.engines) if jax.default_backend() == "cpu" else 1
        for engine in self.engines:
            engine.memory_sharers = sharers
