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
from typing import Any

import jax
import numpy as np

from entropic_jax import models
from entropic_jax.devices import chosen_device, use_device
from entropic_jax.pallas.paged_attention.quantised import bytes_per_number

from ..options import draft_model
from ..options.control_options import Control
from ..options.kv_cache import pages_of
from ..request.transcript import Transcript
from . import description
from .block_manager import BlockManager
from .detokenizer import detokenizer_factory
from .embedding import Embedder
from .engine_controllers import row_controllers_of
from .initial_state import initial_device_state
from .interface import EmbeddingLimits, EngineRequest, Pooling, PrefixCacheReset, QueueFullError
from .metrics_hooks import MetricsHooks
from .options import EngineOptions, Sizes, sizes
from .output_stream import QueuedOutputStream, wake
from .prefix_cache import PageHash, PrefixCache, page_hashes, root_hash
from .priority import Ranking
from .programs import Programs
from .request_check import check_prompt, check_request
from .row_controllers import num_gains
from .scheduler import Scheduler
from .sequence import ENDED, Sequence
from .state_updates import StateUpdates
from .token_rules import token_rules
from .warmup import Warmup

log = logging.getLogger(__name__)
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
    ) -> None:
        """Allocate the KV cache, start the engine's thread, and begin to compile its programs.

        Args:
            model: With its tokenizer.
            options: None is the defaults.
            calibration: The calibration of the model, None without one.
            metrics_hooks: Called at each event, None without any.
            progress: `progress(done, total)` is called after each program of the warm-up.
            control: The control of requests to come; checked before anything is allocated.
            sharers: Engines that the memory of this machine is left for, if the device is a CPU.

        Raises:
            ValueError: Where the options do not suit the model.
        """
        self.device = chosen_device()  # of this thread; what the engine's threads do is done there
        if model.tokenizer is None:
            raise ValueError("model must have a tokenizer (tokenizer.json in its directory); got none")
        self.model, self.tokenizer = model, model.tokenizer
        self.options = EngineOptions() if options is None else options
        self.tokenizer.parse_special &= self.options.parse_special
        self.new_detokenizer = detokenizer_factory(self.tokenizer)
        cache_dtype = pages_of(self.options.kv_cache_dtype, model.params)
        itemsize = bytes_per_number(cache_dtype, model.decoder.shape.head_dim)
        self.sizes: Sizes = sizes(model, self.options, itemsize, sharers)
        self.method = self.sizes.shapes.method
        log.info("KV cache", extra=description.cache_size(model, self.sizes, cache_dtype))
        self.row_controllers = row_controllers_of(model, self.options, self.sizes.shapes, calibration)
        if control is not None:
            self.row_controllers.row_gains(control)  # refused now rather than at each request
        belief_temperature = 1.0 if calibration is None else calibration.temperature
        device_state = initial_device_state(
            model, self.sizes, self.row_controllers, cache_dtype, belief_temperature
        )
        prior = self.row_controllers.prior
        self.programs = Programs(model.decoder, model.params, device_state, prior, self.sizes.shapes)
        self.scheduler = self._scheduler(device_state, metrics_hooks or MetricsHooks())
        self._embedder = Embedder(draft_model.target_of(model), self.context)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued = 0  # requests accepted that have not had a row
        self.load = 0  # requests accepted that have not ended
        self._service_seconds = 1.0  # that a request takes, smoothed
        self._open, self._stopping = True, threading.Event()
        self._failure: BaseException | None = None
        self._live: dict[QueuedOutputStream, Sequence] = {}
        self._with_timeout: dict[Sequence, None] = {}
        self._timeouts_checked = 0.0
        # A program that is compiled, and a failure to compile one, wake the engine's thread.
        self.warmup = Warmup(self.programs, self.scheduler, self.options, progress, self._inbox.put)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _scheduler(self, device_state: Any, metrics_hooks: MetricsHooks) -> Scheduler:
        rows, pages, page_size = self.sizes.rows, self.sizes.pages, self.sizes.page_size
        pages_per_row = device_state.state.cache.table.shape[1]
        vocabulary, gains = self.model.decoder.shape.vocabulary, num_gains(device_state.controller)
        text = device_state.state.text
        text_length = None if text is None else text.shape[1]
        scheduler = Scheduler(
            self.programs,
            device_state,
            self.sizes,
            BlockManager(
                rows, pages, page_size, PrefixCache() if self.options.enable_prefix_caching else None
            ),
            StateUpdates(rows, pages, pages_per_row, gains, vocabulary, text_length),
            Ranking(self.options.policy, self.row_controllers.prior),
            metrics_hooks,
            self.tokenizer,
            exact=self.options.batch_invariant,
            overlapped=jax.default_backend() != "cpu",
        )
        scheduler.on_dequeue, scheduler.batch.on_finish = self._dequeued, self._finished
        return scheduler

    # What a front end calls, from any thread.

    def submit(self, engine_request: EngineRequest) -> QueuedOutputStream:
        """Queue a request. Raises QueueFullError, or RequestError where the model cannot serve it."""
        sequence = self._new_sequence(engine_request)
        with self._lock:
            if self._failure is not None:
                raise RuntimeError(f"the engine has failed: {self._failure}")
            if not self._open or self._queued >= self.options.max_queue:
                rounds = self._queued / self.sizes.rows + 1
                raise QueueFullError(min(60.0, max(1.0, rounds * self._service_seconds)))
            self._queued += 1
            self.load += 1
            self._inbox.put(sequence)
        return sequence.output_stream

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
        return min(self.sizes.context, self.sizes.longest)

    @property
    def compilations(self) -> int:
        """Programs compiled after the warm-up."""
        return self.warmup.late_compilations

    def snapshot(self) -> Mapping[str, Any]:
        """The state of the engine, see `Engine.snapshot`."""
        live, presets = list(self._live.values()), self.row_controllers.accepted
        return description.snapshot(self.scheduler, live, self._queued, presets, self.compilations)

    @property
    def embedding_limits(self) -> EmbeddingLimits:
        """The longest text that `embed` accepts, and the size of an embedding."""
        return self._embedder.limits

    def embed(self, texts: list[list[int]], pooling: Pooling, stop: threading.Event) -> np.ndarray | None:
        """Pooled hidden states of texts, see `Engine.embed`.

        Args:
            texts: Token ids of each text.
            pooling: "mean" or "last".
            stop: Ends the work when it is set.
        """
        with use_device(self.device):
            return self._embedder.embed(texts, pooling, stop)

    def describe(self) -> Mapping[str, Any]:
        """The configuration of the engine, see `Engine.describe`."""
        return description.describe(self.model, self.options, self.sizes)

    def reset_prefix_cache(self) -> Future[PrefixCacheReset]:
        """Drop the cached prefixes that no sequence uses, see `Engine.reset_prefix_cache`."""
        reset: Future[PrefixCacheReset] = Future()
        with self._lock:
            if not self._open:
                raise RuntimeError("the engine has stopped")
            self._inbox.put(reset)
        return reset

    def close(self, drain: float | None = None, timeout: float | None = None) -> bool:
        """Accept no more requests and end those in flight, see `Engine.close`."""
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
        return self.warmup.stop(left) and not self._thread.is_alive()

    # From a request to a sequence.

    def _new_sequence(self, engine_request: EngineRequest) -> Sequence:
        request = engine_request.request
        prompt = self.prompt_tokens(request.prompt)
        eos = () if request.ignore_eos else tuple(self.model.stop_tokens)
        stop_tokens = tuple(dict.fromkeys((*eos, *request.stop_token_ids)))
        check_request(engine_request, len(stop_tokens), self.model.decoder.shape.vocabulary)
        row_gains = self.row_controllers.row_gains(engine_request.control)
        detokenizer, eos = self.new_detokenizer(), self.model.stop_tokens
        transcript = Transcript(request, detokenizer, len(prompt), eos, keep=False)
        output_stream = QueuedOutputStream(engine_request, self._inbox.put)
        rules = token_rules(engine_request, self.tokenizer, self.model.decoder.shape.vocabulary)
        sequence = Sequence(engine_request, output_stream, prompt, transcript, row_gains, rules)
        sequence.stop_tokens, sequence.context_key = stop_tokens, self.model.decoder.context_key
        sequence.private_pages = self.method is not None and self.method.alters(len(prompt) - 1)
        sequence.page_hashes = self.page_hashes(prompt)
        return sequence

    def page_hashes(self, prompt: Many[int]) -> list[PageHash]:
        """Hashes of the full pages of a prompt; none where it shares no page with others."""
        private = self.method is not None and self.method.alters(len(prompt) - 1)
        if private or not self.options.enable_prefix_caching:
            return []
        root = root_hash(self.model.decoder.context_key(len(prompt)))
        return list(page_hashes(root, prompt, self.sizes.page_size))

    def is_cached(self, page_hash: PageHash) -> bool:
        """Whether the prefix cache holds a page; from any thread."""
        prefix_cache = self.scheduler.block_manager.prefix_cache
        return prefix_cache is not None and page_hash in prefix_cache

    def prompt_tokens(self, prompt: Any) -> tuple[int, ...]:
        """A prompt as token ids; RequestError if the model cannot take it."""
        ids = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        check_prompt(ids, self.context, self.model.decoder.shape.vocabulary)
        return ids

    # The engine's thread.

    def _run(self) -> None:
        with use_device(self.device):
            self._serve()

    def _serve(self) -> None:
        try:
            busy = False
            while not self._stopping.is_set():
                self._receive(wait=not busy)
                busy = self.scheduler.step()
            self._end_all("abort", None)
        except BaseException as error:
            log.exception("the engine has failed")
            self._failure = error
            self._end_all("error", f"the engine has failed: {error}")
            if not isinstance(error, Exception):
                raise

    def _receive(self, wait: bool) -> None:
        """Receive new requests and cancellations; if nothing can run, wait for one, or for a program."""
        timeout = IDLE_POLL if self._with_timeout else None
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
            elif isinstance(item, Future):
                self.scheduler.reset_prefix_cache(item)
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
        self._live.pop(sequence.output_stream, None)
        self._with_timeout.pop(sequence, None)
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
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, Sequence):
                self._live[item.output_stream] = item
            elif isinstance(item, Future):
                item.cancel()
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
