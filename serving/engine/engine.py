"""The engine: serves requests over one model in a separate thread, by continuous batching.

engine = start("models/embedded", EngineOptions(max_num_seqs=16))  # of the module `start`
for delta in engine.submit(EngineRequest(id="1", request=Request(prompt="def add("))):
    print("".join(token.text for token in delta.tokens), end="")
engine.close()
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from concurrent.futures import Future
from typing import Any, TypeVar

import jax

from entropic_jax import models
from entropic_jax.mesh.devices import chosen_device, use_device

from ..options.adapted_model import ModelWithAdapters, with_adapters
from ..options.control_options import Control
from ..request import RequestError
from . import description, kernel_report
from .adapters import AdapterSlots
from .assembly import assemble
from .broadcast import Broadcaster
from .embedding import Embedder
from .engine_call import EngineCall, EngineStoppedError, drained, pass_failure
from .interface import (
    EmbeddingLimits,
    Embeddings,
    EngineRequest,
    Pooling,
    PrefixCacheReset,
    QueueFullError,
    SleepMode,
)
from .metrics_hooks import MetricsHooks
from .options import EngineOptions
from .output_stream import QueuedOutputStream, wake
from .prefix_cache import PageHash
from .sequence import ENDED, Sequence
from .sequence_factory import SequenceFactory
from .sleep import Sleep
from .warmup import Warmup

log = logging.getLogger(__name__)
T = TypeVar("T")
IDLE_POLL, BUSY_POLL = 0.2, 0.02  # seconds between checks for timeouts, when idle and when busy


def no_progress(done: int, total: int) -> None:
    """Reports nothing."""


class LLMEngine:
    """An `Engine` over one model; `start` makes one from a model directory."""

    def __init__(
        self,
        model: models.Model,
        options: EngineOptions | None = None,
        calibration: Any = None,
        metrics_hooks: MetricsHooks | None = None,
        progress: Callable[[int, int], None] = no_progress,
        control: Control | None = None,
        sharers: int = 1,
        broadcaster: Broadcaster | None = None,
    ) -> None:
        """Allocate the KV cache, start the engine's thread, and begin to compile its programs.

        Args:
            model: with its tokenizer.
            options: None is the defaults.
            calibration: the calibration of the model, None without one.
            metrics_hooks: called at each event, None without any.
            progress: `progress(done, total)` is called after each program of the warm-up.
            control: the control of requests to come; checked before anything is allocated.
            sharers: engines that the memory of this machine is left for, if the device is a CPU.
            broadcaster: to the other processes that the mesh of the model spans, which end with the engine.

        Raises:
            ValueError: Where the options do not suit the model.
        """
        self.device = chosen_device()  # of this thread; what the engine's threads do is done there
        if model.tokenizer is None:
            raise ValueError("model must have a tokenizer (tokenizer.json in its directory); got none")
        self.options = EngineOptions() if options is None else options
        self.tokenizer = model.tokenizer
        if self.options.enable_lora:
            model = with_adapters(model, self.options.lora_slots, self.options.max_lora_rank)
        self.model = model
        self.tokenizer.parse_special &= self.options.parse_special
        self.broadcaster = broadcaster
        parts = assemble(model, self.options, calibration, metrics_hooks, control, sharers, broadcaster)
        self.sizes, self.row_controllers, self.programs, self.scheduler = parts
        self.method = self.sizes.shapes.method
        self.kernels = kernel_report.report(model, self.options, self.sizes)
        self.scheduler.on_dequeue, self.scheduler.batch.on_finish = self._dequeued, self._finished
        self._sleep = Sleep(self.scheduler)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.adapters = AdapterSlots(model) if isinstance(model, ModelWithAdapters) else None
        self._factory = SequenceFactory(
            model, self.options, self.sizes, self.row_controllers, self.adapters, self._inbox.put
        )
        self._embedder = Embedder(model, self.context, self._in_engine, self.failure, broadcaster)
        self._queued = 0  # requests accepted that have not had a row
        self.load = 0  # requests accepted that have not ended
        self._work_done = 0.0  # decode steps, of the sequences that have been forgotten
        self._service_seconds = 1.0  # that a request takes, smoothed
        self._open, self._stopping, self._lock = True, threading.Event(), threading.Lock()
        self._failure: BaseException | None = None
        self._live: dict[QueuedOutputStream, Sequence] = {}
        self._with_timeout: dict[Sequence, None] = {}
        self._timeouts_checked = 0.0
        # A program that is compiled, and a failure to compile one, wake the engine's thread.
        self.warmup = Warmup(self.programs, self.scheduler, self.options, progress, self._inbox.put)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        if broadcaster is not None:
            broadcaster.close_at_exit(self.close)
            broadcaster.tell_at_loss(self._abandon)

    # What a front end calls, from any thread.

    def submit(self, engine_request: EngineRequest) -> QueuedOutputStream:
        """Queue a request. Raises QueueFullError, or RequestError where the model cannot serve it."""
        sequence = self._factory.sequence(engine_request)
        try:
            with self._lock:
                if self._failure is not None:
                    raise RuntimeError(f"the engine has failed: {self._failure}")
                if not self._open or self._queued >= self.options.max_queue:
                    rounds = self._queued / self.sizes.rows + 1
                    raise QueueFullError(min(60.0, max(1.0, rounds * self._service_seconds)))
                self._queued += 1
                self.load += 1
                self._inbox.put(sequence)
        except BaseException:
            self._factory.release(sequence)
            raise
        return sequence.output_stream

    def prompt_tokens(self, prompt: Any) -> tuple[int, ...]:
        """A prompt as token ids; RequestError if the model cannot take it."""
        return self._factory.prompt_tokens(prompt)

    def ready(self) -> bool:
        """Whether the warm-up is over."""
        return self.warmup.ended.is_set() and self._failure is None and self._open

    def serves(self) -> bool:
        """Whether most requests can run, if only with some of the programs."""
        return self.warmup.serves and self._failure is None and self._open

    def failure(self) -> BaseException | None:
        """The exception that has stopped the engine, if any."""
        return self._failure

    @property
    def ranks(self) -> int:
        """One: see `Engine.ranks`."""
        return 1

    def device_ids(self) -> list[int]:
        """Numbers of the devices that the engine runs on."""
        leaf = jax.tree.leaves(self.model.params)[0]
        return sorted(device.id for device in leaf.sharding.device_set)

    @property
    def context(self) -> int:
        """Positions of a sequence, prompt and continuation, at most."""
        return self._factory.context

    @property
    def compilations(self) -> int:
        """Programs compiled after the warm-up."""
        return self.warmup.late_compilations

    def snapshot(self) -> Mapping[str, Any]:
        """The state of the engine, see `Engine.snapshot`."""
        with self._lock:
            live, work_done = list(self._live.values()), self._work_done
        presets = self.row_controllers.accepted
        return description.snapshot(self.scheduler, live, self._queued, work_done, presets, self.compilations)

    @property
    def embedding_limits(self) -> EmbeddingLimits:
        """The longest text that `embed` accepts, and the size of an embedding."""
        return self._embedder.limits

    def embed(self, texts: list[list[int]], pooling: Pooling, stop: threading.Event) -> Embeddings | None:
        """Pooled hidden states of texts, see `Engine.embed`.

        Args:
            texts: token ids of each text.
            pooling: "mean" or "last".
            stop: ends the work when it is set.
        """
        with use_device(self.device):
            vectors = self._embedder.embed(texts, pooling, stop)
        return None if vectors is None else Embeddings(vectors)

    def describe(self) -> Mapping[str, Any]:
        """The configuration of the engine, see `Engine.describe`."""
        adapters = None if self.adapters is None else self.adapters.describe()
        return {**description.describe(self.model, self.options, self.sizes), "adapters": adapters}

    def reset_prefix_cache(self) -> Future[PrefixCacheReset]:
        """Drop the cached prefixes that no sequence uses, see `Engine.reset_prefix_cache`."""
        return self._in_engine(self.scheduler.reset_prefix_cache)

    def sleep(self, mode: SleepMode) -> Future[None]:
        """Release the KV pool, see `Engine.sleep`."""
        if not self.ready():
            raise RequestError("the server must be ready before it sleeps; it compiles, or has stopped")
        done: Future[None] = Future()

        def begin() -> None:
            self._sleep.begin(done)
            running = list(self._live.values()) if mode == "abort" and not self._sleep.asleep else ()
            for sequence in running:
                self.scheduler.end(sequence, "abort")

        self._in_engine(begin).add_done_callback(lambda begun: pass_failure(begun, done))
        return done

    def wake_up(self) -> Future[None]:
        """Allocate the KV pool again, see `Engine.wake_up`."""
        return self._in_engine(self._sleep.wake_up)

    def with_sleep(self, change: Callable[[Sleep], None]) -> Future[None]:
        """Call a function with the sleep of this engine in its thread, for engines that wake together."""
        return self._in_engine(lambda: change(self._sleep))

    def is_sleeping(self) -> bool:
        """Whether the KV pool is released."""
        return self._sleep.asleep

    def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter, see `Engine.load_adapter`."""
        self._adapter_slots().load(name, path, self._in_engine, self.programs.replace_adapters)

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter, see `Engine.unload_adapter`."""
        self._adapter_slots().unload(name)

    def adapter_paths(self) -> Mapping[str, str]:
        """The path of every loaded adapter by its name."""
        return {} if self.adapters is None else self.adapters.names()

    def _adapter_slots(self) -> AdapterSlots:
        if self.adapters is None:
            raise RequestError("enable_lora must be on to load adapters; got False", "lora_name")
        return self.adapters

    def _in_engine(self, function: Callable[[], T]) -> Future[T]:
        """Call a function in the engine's thread, between two steps. EngineStoppedError if it has stopped."""
        call = EngineCall(function, Future())
        with self._lock:
            if not self._open:
                raise EngineStoppedError
            self._inbox.put(call)
        return call.future

    def page_hashes(self, prompt: Many[int], salt: str | None) -> list[PageHash]:
        """Hashes of the full pages of a prompt under no adapter; none where it shares no page with others."""
        return self._factory.page_hashes(prompt, salt)

    def is_cached(self, page_hash: PageHash) -> bool:
        """Whether the prefix cache holds a page; from any thread."""
        prefix_cache = self.scheduler.block_manager.prefix_cache
        return prefix_cache is not None and page_hash in prefix_cache

    def close(self, drain: float | None = None, timeout: float | None = None) -> bool:
        """Accept no more requests and end those that run or wait, see `Engine.close`."""
        self._open = False
        if drain:
            end = time.perf_counter() + drain
            while (self._live or self._queued) and self._thread.is_alive() and time.perf_counter() < end:
                time.sleep(0.01)
        self._stopping.set()
        self._inbox.put(None)
        deadline = None if timeout is None else time.perf_counter() + timeout
        self._thread.join(timeout)
        left = None if deadline is None else max(0.0, deadline - time.perf_counter())
        ended = self.warmup.stop(left) and not self._thread.is_alive()
        if self.broadcaster is not None:
            self.broadcaster.close()
        return ended

    def _abandon(self, error: str) -> None:
        """End the streams of all requests with an error, from any thread: the process is about to end."""
        self._failure = RuntimeError(error)
        live = dict(self._live) | {item.output_stream: item for item in drained(self._inbox)}
        for stream, sequence in live.items():
            if not sequence.ended:
                stream.put(sequence.delta(sequence.transcript.finish("error", error)))
        wake(live)

    # The engine's thread.

    def _run(self) -> None:
        with use_device(self.device):
            self._serve()

    def _serve(self) -> None:
        try:
            busy = False
            while not self._stopping.is_set():
                self._receive(wait=not busy)
                busy = self._sleep.step()
            self._end_all("abort", None)
        except BaseException as error:
            if self.broadcaster is not None:
                self.broadcaster.fail(error)
            log.exception("the engine has failed")
            self._failure = error
            self._end_all("error", f"the engine has failed: {error}")
            if not isinstance(error, Exception):
                raise

    def _receive(self, wait: bool) -> None:
        """Receive new requests and cancellations; if nothing can run, wait for one, or for a program."""
        next_drop = self.programs.drop_unused()  # seconds
        timeout = IDLE_POLL if self._with_timeout else next_drop
        while True:
            try:
                item = self._inbox.get(block=wait, timeout=timeout)
            except queue.Empty:
                break
            wait = False
            if isinstance(item, BaseException):  # of the compiler
                raise item
            if isinstance(item, Sequence):
                item.arrival_round = self.scheduler.rounds
                self._live[item.output_stream] = item
                self.scheduler.waiting.append(item)
                if item.engine_request.timeout is not None:
                    self._with_timeout[item] = None
            elif isinstance(item, EngineCall):
                item.run()
            elif item is not None and item in self._live:
                self.scheduler.end(self._live[item], "abort")
        self._end_timed_out()

    def _end_timed_out(self) -> None:
        timestamp = time.perf_counter()
        if timestamp - self._timeouts_checked < BUSY_POLL:
            return
        self._timeouts_checked = timestamp
        for sequence in list(self._with_timeout):
            timeout = sequence.engine_request.timeout or 0
            if timestamp - sequence.arrival_time > timeout:
                message = f"the request took longer than its timeout of {timeout:g} s"
                self.scheduler.end(sequence, "error", message, timed_out=True)

    def _finished(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        with self._lock:
            self.load -= 1
            if self._live.pop(sequence.output_stream, None) is not None:
                self._work_done += sequence.work_done
        self._with_timeout.pop(sequence, None)
        self._factory.release(sequence)
        if sequence.admitted_time is not None:
            seconds = time.perf_counter() - sequence.admitted_time
            self._service_seconds += 0.1 * (seconds - self._service_seconds)

    def _dequeued(self) -> None:
        with self._lock:
            self._queued -= 1

    def _end_all(self, reason: Any, error: str | None) -> None:
        """End every request, and those that are still in the inbox."""
        with self._lock:
            self._open = False
        self.scheduler.batch.deliver()
        self._live.update((item.output_stream, item) for item in drained(self._inbox))
        for sequence in list(self._live.values()):
            if not sequence.ended:
                tokens = sequence.transcript.finish(reason, error)
                sequence.stage = ENDED
                if sequence.admitted_time is None:
                    self._dequeued()
                sequence.output_stream.put(sequence.delta(tokens))
        wake(list(self._live))
        self._live.clear()
        self.load = 0
