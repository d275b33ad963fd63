"""Data-parallel engines behind the interface of one: each request goes to one of them, its rank.

Each engine has a copy of the model on devices of its own, a page pool, a prefix cache, rows and a thread. No
program runs on the devices of two engines, so none has a collective over them. What a request is answered
does not depend on its rank: noise follows from its seed and the position.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from .interface import (
    EmbeddingLimits,
    Embeddings,
    EngineRequest,
    Pooling,
    PrefixCacheReset,
    QueueFullError,
    SleepMode,
)
from .output_stream import QueuedOutputStream
from .routing import Router
from .sleep import Sleep

if TYPE_CHECKING:
    from entropic_jax.models import Model, Tokenizer

    from .engine import LLMEngine

# Of `Engine.snapshot`: what all ranks have in common, and what is the largest or the mean of theirs. Other
# numbers are added up.
COMMON, LARGEST = ("page_size", "scheduling_policy", "presets"), ("longest_wait", "longest_wait_allowed")
MEAN = "kv_usage"


class DataParallelEngine:
    """An `Engine` that spreads requests over several.

    Args:
        engines: engines of equal sizes; their ranks are their places.
    """

    def __init__(self, engines: "Sequence[LLMEngine]") -> None:
        self.engines = tuple(engines)
        first = self.engines[0]
        self.model: Model = first.model
        self.tokenizer: Tokenizer = first.tokenizer
        bound = max(1, first.sizes.rows // 4)
        pages = sum(engine.sizes.pages for engine in self.engines)
        held = lambda rank, page_hash: self.engines[rank].is_cached(page_hash)
        self.router = Router(len(self.engines), bound, pages, held)
        self._lock = threading.Lock()
        self._embedding = [0] * len(self.engines)  # calls of `embed` that run

    @property
    def ranks(self) -> int:
        """How many engines there are."""
        return len(self.engines)

    @property
    def context(self) -> int:
        """Positions of a sequence, prompt and continuation, at most."""
        return self.engines[0].context

    @property
    def compilations(self) -> int:
        """Programs compiled after the warm-up."""
        return sum(engine.compilations for engine in self.engines)

    def prompt_tokens(self, prompt: Any) -> tuple[int, ...]:
        """A prompt as token ids; RequestError if the model cannot take it."""
        return self.engines[0].prompt_tokens(prompt)

    def submit(self, engine_request: EngineRequest) -> QueuedOutputStream:
        """Queue a request at the best rank, or at the next whose queue is not full; see `Engine.submit`."""
        prompt = self.prompt_tokens(engine_request.request.prompt)
        hashes = self.engines[0].page_hashes(prompt, engine_request.cache_salt)
        with self._lock:
            order = self.router.order(hashes, self._loads(), self._able())
            full: list[QueueFullError] = []
            for rank in order:
                try:
                    output_stream = self.engines[rank].submit(engine_request)
                except QueueFullError as error:
                    full.append(error)
                    continue
                output_stream.rank = rank
                self.router.sent(rank, hashes)
                return output_stream
        raise min(full, key=lambda error: error.retry_after)

    def _loads(self) -> list[int]:
        """Requests that each rank has accepted and not ended, those to embed texts included."""
        return [
            engine.load + embedding for engine, embedding in zip(self.engines, self._embedding, strict=True)
        ]

    def _able(self) -> list[int]:
        """Ranks that requests may be given to: those that serve, else those that have not failed."""
        alive = self._alive()
        serving = [rank for rank in alive if self.engines[rank].serves()]
        return serving or alive or [0]  # which says why it cannot

    def _alive(self) -> list[int]:
        return [rank for rank, engine in enumerate(self.engines) if engine.failure() is None]

    def ready(self) -> bool:
        """Whether the warm-up of every rank is over."""
        return all(engine.ready() for engine in self.engines)

    def serves(self) -> bool:
        """Whether most requests can run, if only at one rank."""
        return any(engine.serves() for engine in self.engines)

    def failure(self) -> BaseException | None:
        """The exception that has stopped one of the engines, if any. The others go on."""
        return next(filter(None, (engine.failure() for engine in self.engines)), None)

    def snapshot(self) -> Mapping[str, Any]:
        """The state of all engines together, see `Engine.snapshot`; `engines` are those of each."""
        parts = [engine.snapshot() for engine in self.engines]
        numbers = [{name: part[name] for name in part if name != "sequences"} for part in parts]
        total = {name: combined(name, [part[name] for part in numbers]) for name in numbers[0]}
        return {
            **total,
            "sequences": [
                {**sequence, "engine": rank}
                for rank, part in enumerate(parts)
                for sequence in part["sequences"]
            ],
            "engines": [
                {"engine": rank, "ready": engine.ready(), "load": load, **part}
                for rank, (engine, load, part) in enumerate(
                    zip(self.engines, self._loads(), numbers, strict=True)
                )
            ],
        }

    def describe(self) -> Mapping[str, Any]:
        """The configuration of the first engine and the devices of each; see `Engine.describe`."""
        return {
            **self.engines[0].describe(),
            "engines": [
                {"engine": rank, "devices": engine.device_ids(), "pages": engine.sizes.pages}
                for rank, engine in enumerate(self.engines)
            ],
            "router": {"bound": self.router.bound},
        }

    def reset_prefix_cache(self) -> "Future[PrefixCacheReset]":
        """Drop the cached prefixes of all ranks that no sequence uses; see `Engine.reset_prefix_cache`."""
        with self._lock:
            self.router.forget()
        return gathered([self.engines[rank].reset_prefix_cache() for rank in self._alive() or [0]])

    def sleep(self, mode: SleepMode) -> "Future[None]":
        """Release the KV pools of all ranks that have not failed; see `Engine.sleep`."""
        ranks = [self.engines[rank] for rank in self._alive() or [0]]
        unable = [engine for engine in ranks if not engine.ready()]  # says so before another falls asleep
        return all_done([engine.sleep(mode) for engine in unable or ranks])

    def wake_up(self) -> "Future[None]":
        """Allocate the KV pools of all ranks that have not failed, or of none; see `Engine.wake_up`."""
        with self._lock:
            self.router.forget()
        return wake_together([self.engines[rank] for rank in self._alive() or [0]])

    def is_sleeping(self) -> bool:
        """Whether the KV pool of a rank that has not failed is released."""
        return any(self.engines[rank].is_sleeping() for rank in self._alive())

    def adapter_paths(self) -> Mapping[str, str]:
        """None: adapters are served by one engine only."""
        return {}

    def load_adapter(self, name: str, path: str) -> None:
        """Raises RequestError, see `adapter_paths`."""
        self.engines[0].load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        """Raises RequestError, see `adapter_paths`."""
        self.engines[0].unload_adapter(name)

    @property
    def embedding_limits(self) -> EmbeddingLimits:
        """The longest text that `embed` accepts, and the size of an embedding."""
        return self.engines[0].embedding_limits

    def embed(self, texts: list[list[int]], pooling: Pooling, stop: threading.Event) -> Embeddings | None:
        """Pooled hidden states of texts, all at the least loaded rank; see `Engine.embed`.

        Args:
            texts: token ids of each text.
            pooling: "mean" or "last".
            stop: ends the work when it is set.
        """
        with self._lock:
            rank = self.router.order((), self._loads(), self._able())[0]
            self.router.sent(rank, ())
            self._embedding[rank] += 1
        try:
            embeddings = self.engines[rank].embed(texts, pooling, stop)
        finally:
            with self._lock:
                self._embedding[rank] -= 1
        return None if embeddings is None else embeddings._replace(rank=rank)

    def close(self, drain: float | None = None, timeout: float | None = None) -> bool:
        """Close all engines at the same time; whether all of their threads have ended. See `Engine.close`."""
        with ThreadPoolExecutor(len(self.engines), "close") as pool:
            return all(list(pool.map(lambda engine: engine.close(drain, timeout), self.engines)))


class Progress:
    """Adds up the progress of several warm-ups.

    Args:
        report: `report(done, total)` is called after each program of any of them.
        ranks: number of warm-ups. Until one has reported, it counts like the others.
    """

    def __init__(self, report: Callable[[int, int], None], ranks: int) -> None:
        self._report, self._parts = report, [(0, 0)] * ranks
        self._lock = threading.Lock()

    def of(self, rank: int) -> Callable[[int, int], None]:
        """The observer that the warm-up of a rank reports to."""

        def report(done: int, total: int) -> None:
            with self._lock:
                self._parts[rank] = done, total
                largest = max(total for _, total in self._parts)
                everything = sum(total or largest for _, total in self._parts)
                self._report(sum(done for done, _ in self._parts), everything)

        return report


def combined(name: str, values: list[Any]) -> Any:
    """An entry of the snapshot of all engines, from those of each.

    >>> combined("running", [1, 2]), combined("kv_usage", [0.5, 0.25]), combined("page_size", [16, 16])
    (3, 0.375, 16)
    """
    if name in COMMON:
        return values[0]
    if name in LARGEST:
        return max(values)
    return sum(values) / len(values) if name == MEAN else sum(values)


def gathered(resets: "list[Future[PrefixCacheReset]]") -> "Future[PrefixCacheReset]":
    """The sum of results, once all are there; RuntimeError if an engine has stopped before."""
    return combined_future(
        resets, lambda counts: PrefixCacheReset(*(sum(column) for column in zip(*counts, strict=True)))
    )


def all_done(futures: "list[Future[None]]") -> "Future[None]":
    """Done once all are; the first exception of them; RuntimeError if an engine has stopped before."""
    return combined_future(futures, lambda _: None)


def wake_together(engines: "Sequence[LLMEngine]") -> "Future[None]":
    """Wake engines up once all have the memory that they need; without it all stay asleep.

    The future has the first exception, RuntimeError where there is not enough memory.
    """
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()
    all_of = lambda change: all_done([_changed(engine, change) for engine in engines])

    def woken(awake: "Future[None]") -> None:
        if (error := awake.exception()) is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def prepared(reserved: "Future[None]") -> None:
        if (error := reserved.exception()) is None:
            all_of(Sleep.wake_up).add_done_callback(woken)
        else:
            all_of(Sleep.give_up).add_done_callback(lambda _: done.set_exception(error))

    all_of(Sleep.prepare).add_done_callback(prepared)
    return done


def _changed(engine: "LLMEngine", change: Callable[[Sleep], None]) -> "Future[None]":
    """`LLMEngine.with_sleep`, where an engine that has stopped is an exception of the future, too."""
    try:
        return engine.with_sleep(change)
    except RuntimeError as error:
        stopped: Future[None] = Future()
        stopped.set_exception(error)
        return stopped


def combined_future(parts: "list[Future[Any]]", combine: Callable[[list[Any]], Any]) -> "Future[Any]":
    """The combination of results, once all are there; RuntimeError if an engine has stopped before."""
    total: Future[Any] = Future()
    total.set_running_or_notify_cancel()
    left, lock = len(parts), threading.Lock()

    def ended(_: "Future[Any]") -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        try:
            total.set_result(combine([part.result() for part in parts]))
        except CancelledError:
            total.set_exception(RuntimeError("an engine has stopped"))
        except Exception as error:
            total.set_exception(error)

    for part in parts:
        part.add_done_callback(ended)
    return total
