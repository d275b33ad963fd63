"""The engine that serves jobs: continuous batching in one thread, behind `Engine`.

engine = start("models/embedded", EngineOptions(max_num_seqs=16))
for delta in engine.submit(Job(id="1", request=Request(prompt="def add("))):
    print("".join(token.text for token in delta.tokens), end="")
engine.close()
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from entropic_jax import allocate, loop, models, parameters
from entropic_jax.control.presets import preset
from entropic_jax.methods import registry
from entropic_jax.methods.entropix_branches import Tally
from entropic_jax.pallas.paged_attention.quantised import bytes_per_number
from entropic_jax.sampling.constraints import MOST_ALTERNATIVES, no_constraints

from .. import samplers
from ..control_options import SAMPLERS, Control, calibration_of
from ..generation import default_dtype
from ..kv_cache import pages_of
from ..request import RequestError
from ..transcript import Transcript
from . import warmup
from .block_manager import BlockManager
from .branching import new_branch_state
from .detokenizer import detokenizer_factory
from .device_state import DeviceState
from .interface import EngineRequest, QueueFullError
from .metrics_hooks import MetricsHooks
from .options import EngineOptions, Sizes, may_prune, sizes
from .output_stream import QueuedOutputStream, wake
from .prefix_cache import ROOT_HASH, PrefixCache, page_hashes
from .priority import Ranking
from .programs import Programs
from .row_controllers import RowControllers, num_gains
from .scheduler import Scheduler
from .sequence import DECODE, ENDED, PREFILL, Sequence
from .state_updates import BIASES, STOPS, StateUpdates

log = logging.getLogger(__name__)
IDLE, SOON = 0.2, 0.02  # seconds between looks at what may time out, when idle and when busy


class LLMEngine:
    """A `Engine` over one model. `start` makes one."""

    def __init__(
        self,
        model: models.Model,
        options: EngineOptions | None = None,
        calibration: Any = None,
        metrics_hooks: MetricsHooks | None = None,
        progress: Callable[[int, int], None] = lambda done, all_: None,
    ) -> None:
        """`progress(done, all)` is called after each program that is compiled ahead."""
        if model.tokenizer is None:
            raise ValueError("model has no tokenizer; accepted is a directory with tokenizer.json")
        self.model, self.tokenizer = model, model.tokenizer
        self.options = EngineOptions() if options is None else options
        self.metrics_hooks = MetricsHooks() if metrics_hooks is None else metrics_hooks
        stored = pages_of(self.options.kv_cache_dtype, model.params)
        itemsize = bytes_per_number(stored, model.decoder.shape.head_dim)
        self.sizes: Sizes = sizes(model, self.options, itemsize)
        self.stream = detokenizer_factory(self.tokenizer)
        self.method = self.sizes.shapes.method
        always = registry.add_method(
            self.options.method, preset("off"), **dict(self.options.budgets)
        ).controller
        self.row_controllers = RowControllers(
            self.options.law,
            calibration,
            may_prune(self.options, self.method),
            *self._sampler(calibration),
            self.options.method,
            always.controllers,
            self.sizes.shapes.branches,
        )
        self._progress = progress
        self._belief = 1.0 if calibration is None else calibration.temperature
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued = 0  # jobs that were taken and have no row
        self._service = 1.0  # seconds that a job takes, smoothed
        self._open, self._stopping = True, threading.Event()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._live: dict[QueuedOutputStream, Sequence] = {}
        self._timed: dict[Sequence, None] = {}  # those that may time out
        self._looked = 0.0  # when they were looked through
        self._warm = 0
        device_state = self._new_device_state(stored)
        self.programs = Programs(
            model.decoder, model.params, device_state, self.row_controllers.prior, self.sizes.shapes
        )
        prefix = PrefixCache() if self.options.enable_prefix_caching else None
        rows, pages = self.sizes.rows, self.sizes.pages
        vocabulary = model.decoder.shape.vocabulary
        per_row = device_state.state.cache.table.shape[1]
        updates = StateUpdates(rows, pages, per_row, num_gains(device_state.controller), vocabulary)
        self.scheduler = Scheduler(
            self.programs,
            device_state,
            self.sizes,
            BlockManager(rows, pages, self.sizes.page_size, prefix),
            updates,
            Ranking(self.options.scheduling_policy, self.row_controllers.prior),
            self.metrics_hooks,
            self.tokenizer,
            exact=self.options.batch_invariant,
            overlapped=jax.default_backend() != "cpu",
        )
        self.scheduler.finished, self.scheduler.left_queue = self._finished, self._left_queue
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _sampler(self, calibration: Any) -> tuple[str | None, Any]:
        """The name of the sampler and its law; RequestError where the model cannot have it."""
        name, said = self.options.preset, self.options.clarification
        if name not in SAMPLERS:
            return None, None
        gains = (("clarification", said),) if said else ()
        return name, samplers.law(Control(name, gains), calibration, self.model, together=False)

    def _new_device_state(self, dtype: Any) -> DeviceState:
        shapes, context, decoder = self.sizes.shapes, self.sizes.context, self.model.decoder
        rows = self.sizes.rows * shapes.branches
        controller = self.row_controllers.controller(rows)
        state = loop.start(
            decoder,
            self.model.params,
            controller,
            allocate(
                decoder.shape,
                rows,
                context,
                pages=self.sizes.pages,
                page_size=self.sizes.page_size,
                dtype=dtype,
            ),
            [[]] * rows,
            key=jax.random.key(0),
            max_tokens=0,
            sample=parameters(rows, bias_slots=BIASES),
            stop=[[-1] * STOPS],
            belief_temperature=self._belief,
        )
        if self.method is not None:
            # Launches consume the state: no two leaves may share a buffer.
            state = state._replace(
                page_policy_state=jax.tree.map(jnp.copy, self.method.memory(decoder.shape, state.cache))
            )
        if shapes.plan is None:
            return DeviceState(state, controller)
        constraints = no_constraints(rows, decoder.shape.vocabulary)
        step = lambda state: loop.step(
            decoder, self.model.params, controller, state, constraints=constraints
        )[1]
        return DeviceState(
            state,
            controller,
            new_branch_state(state, jax.eval_shape(step, state), shapes.plan, shapes.capacity),
        )

    # What a front end calls, from any thread.

    def submit(self, engine_request: EngineRequest) -> QueuedOutputStream:
        """Take a job. Raises QueueFullError, or RequestError where the model cannot serve it."""
        sequence = self._sequence(engine_request)
        with self._lock:
            if self._failure is not None:
                raise RuntimeError(f"the engine has failed: {self._failure}")
            if not self._open or self._queued >= self.options.max_queue:
                rounds = self._queued / self.sizes.rows + 1
                raise QueueFullError(min(60.0, max(1.0, rounds * self._service)))
            self._queued += 1
            self._inbox.put(sequence)
        return sequence.output_stream

    def ready(self) -> bool:
        """Whether the programs are compiled and jobs run at full speed."""
        return self._ready.is_set() and self._failure is None and self._open

    def failure(self) -> BaseException | None:
        """What has ended the engine, if anything has."""
        return self._failure

    @property
    def context(self) -> int:
        """Most positions of a sequence, prompt and continuation."""
        return min(self.sizes.context, self.sizes.longest)

    @property
    def compilations(self) -> int:
        """Programs compiled after the warm-up."""
        return self.programs.compilations - self._warm if self._ready.is_set() else 0

    def snapshot(self) -> Mapping[str, Any]:
        """What is going on, as `Engine` says."""
        scheduler, now = self.scheduler, time.perf_counter()
        sequences = [s for s in list(self._live.values()) if not s.ended]
        running = [s for s in sequences if s.stage in (PREFILL, DECODE)]
        prefix = scheduler.block_manager.prefix
        return {
            "running": len(running),
            "waiting": len(sequences) - len(running),
            "rows": self.sizes.rows,
            "kv_usage": scheduler.block_manager.usage,
            "pages": self.sizes.pages,
            "pages_free": scheduler.block_manager.num_free_pages,
            "page_size": self.sizes.page_size,
            "preemptions": scheduler.preemptions,
            "longest_wait": scheduler.ranking.longest,
            "longest_wait_allowed": scheduler.ranking.longest_allowed(self.sizes.rows),
            **dict(zip(Tally._fields, scheduler.tally.tolist(), strict=True)),
            "prefix_queries": prefix.queries if prefix else 0,
            "prefix_hits": prefix.hits if prefix else 0,
            "prefix_pages": len(prefix) if prefix else 0,
            "compilations": self.compilations,
            "sequences": [s.describe(now) for s in sequences],
        }

    def close(self, drain: float | None = None) -> None:
        """Take no more jobs, let those in flight run for up to `drain` seconds, then end them and stop."""
        self._open = False
        if drain:
            end = time.perf_counter() + drain
            while (self._live or self._queued) and self._thread.is_alive() and time.perf_counter() < end:
                time.sleep(0.01)
        self._stopping.set()
        self._inbox.put(None)
        self._thread.join()

    # Taking a job in.

    def _sequence(self, engine_request: EngineRequest) -> Sequence:
        request = engine_request.request
        prompt = self.prompt_tokens(request.prompt)
        vocabulary = self.model.decoder.shape.vocabulary
        eos = () if request.ignore_eos else tuple(self.model.stop_tokens)
        stops = tuple(dict.fromkeys((*eos, *request.stop_token_ids)))
        for name, number, most in (
            ("stop_token_ids", len(stops), STOPS),
            ("logit_bias", len(request.logit_bias), BIASES),
            ("alternatives", engine_request.alternatives or 0, MOST_ALTERNATIVES),
            ("prompt_alternatives", engine_request.prompt_alternatives or 0, MOST_ALTERNATIVES),
        ):
            if number > most:
                raise RequestError(f"{name} has {number} entries; accepted are up to {most}")
        for name, tokens in (("stop_token_ids", request.stop_token_ids), ("logit_bias", request.logit_bias)):
            wrong = [t for t in tokens if t >= vocabulary]
            if wrong:
                raise RequestError(f"{name} holds the token {wrong[0]}; accepted are 0 to {vocabulary - 1}")
        row_gains = self.row_controllers.row_gains(engine_request.control)
        transcript = Transcript(request, self.stream(), len(prompt), self.model.stop_tokens, keep=False)
        output_stream = QueuedOutputStream(engine_request, self._inbox.put)
        sequence = Sequence(engine_request, output_stream, prompt, transcript, row_gains)
        sequence.stops = stops
        sequence.private = self.method is not None and self.method.alters(len(prompt) - 1)
        if self.options.enable_prefix_caching and not sequence.private:
            sequence.prompt_keys = list(page_hashes(ROOT_HASH, prompt, self.sizes.page_size))
        return sequence

    def prompt_tokens(self, prompt: Any) -> tuple[int, ...]:
        """A prompt as token ids; RequestError if the model cannot take it."""
        ids = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if not 0 < len(ids) < self.context:
            raise RequestError(
                f"prompt has {len(ids)} tokens; accepted are 1 to {self.context - 1}, so that one is left"
            )
        if max(ids) >= self.model.decoder.shape.vocabulary:
            last = self.model.decoder.shape.vocabulary - 1
            raise RequestError(f"prompt holds the token {max(ids)}; accepted are 0 to {last}")
        return ids

    # The engine's thread.

    def _run(self) -> None:
        try:
            warmup.compile_ahead(self.programs, self.scheduler, self.options, self._progress)
            self._warm = self.programs.compilations
            self._ready.set()
            busy = False
            while not self._stopping.is_set():
                self._take_in(wait=not busy)
                busy = self.scheduler.step()
            self._end_all("abort", None)
        except BaseException as error:
            log.exception("the engine has failed")
            self._failure = error
            self._end_all("error", f"the engine has failed: {error}")
            if not isinstance(error, Exception):
                raise

    def _take_in(self, wait: bool) -> None:
        """Take jobs and cancellations; when idle, wait for one."""
        timeout = IDLE if self._timed else None
        while True:
            try:
                item = self._inbox.get(block=wait, timeout=timeout)
            except queue.Empty:
                break
            wait = False
            if isinstance(item, Sequence):
                item.arrival_round = self.scheduler.rounds
                self._live[item.output_stream] = item
                self.scheduler.waiting.append(item)
                if item.engine_request.timeout is not None:
                    self._timed[item] = None
            elif item is not None and item in self._live:
                self.scheduler.end(self._live[item], "abort")
        now = time.perf_counter()
        if now - self._looked < SOON:
            return
        self._looked = now
        for sequence in [s for s in self._timed if now - s.arrival > (s.engine_request.timeout or 0)]:
            message = f"the job took longer than its timeout of {sequence.engine_request.timeout:g} s"
            self.scheduler.end(sequence, "error", message, timed_out=True)

    def _finished(self, sequence: Sequence) -> None:
        """A sequence has ended: forget it."""
        self._live.pop(sequence.output_stream, None)
        self._timed.pop(sequence, None)
        if sequence.admitted is not None:
            self._service += 0.1 * (time.perf_counter() - sequence.admitted - self._service)

    def _left_queue(self) -> None:
        with self._lock:
            self._queued -= 1

    def _end_all(self, reason: Any, error: str | None) -> None:
        """End every job there is, and all that still come."""
        with self._lock:
            self._open = False
        self.scheduler.deliver()
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, Sequence):
                self._live[item.output_stream] = item
        for sequence in list(self._live.values()):
            if not sequence.ended:
                tokens = sequence.transcript.finish(reason, error)
                sequence.stage = ENDED
                sequence.output_stream.put(sequence.delta(tokens))
        wake(list(self._live))
        self._live.clear()


def start(
    path: str | Path,
    options: EngineOptions | None = None,
    metrics_hooks: MetricsHooks | None = None,
    progress: Callable[[int, int], None] = lambda done, all_: None,
) -> LLMEngine:
    """The engine of a Hugging Face model directory, with the calibration that it has.

    Raises ValueError, or OSError, which say what in the directory is at fault. It compiles in its own thread:
    jobs may be submitted at once, and run when it is `ready`.
    """
    options = EngineOptions() if options is None else options
    model = models.load(path, options.dtype or default_dtype())
    return LLMEngine(model, options, calibration_of(Path(path)), metrics_hooks, progress)
