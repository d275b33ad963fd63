"""An `Engine` without a model: it emits a scripted text at a scripted pace."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from threading import Event
from typing import Any

import numpy as np

from entropic_jax.parameter_tables.control_gains import GAINS, check_order
from entropic_jax.parameter_tables.table import AUTO
from entropic_jax.serving.engine.interface import (
    Delta,
    EmbeddingLimits,
    Embeddings,
    EngineRequest,
    PrefixCacheReset,
    PromptToken,
    QueueFullError,
)
from entropic_jax.serving.http.served_model import ServedModel
from entropic_jax.serving.request import RequestError
from entropic_jax.serving.request.transcript import Alternative, Transcript, Usage

SCRIPT = "def add(a, b):\n    return a + b\n"


class ScriptedOutputStream:
    """Emits the script token by token, starting at the token of index `seed`."""

    rank = 0

    def __init__(self, engine: "ScriptedEngine", engine_request: EngineRequest) -> None:
        self.engine, self.engine_request, self.cancelled = engine, engine_request, asyncio.Event()

    def __iter__(self) -> Iterator[Delta]:
        loop, deltas = asyncio.new_event_loop(), aiter(self)
        try:
            while True:
                yield loop.run_until_complete(anext(deltas))
        except StopAsyncIteration:
            return
        finally:
            loop.close()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        engine, request = self.engine, self.engine_request.request
        model, began = engine.model, time.perf_counter()
        transcript = Transcript(request, model.tokenizer.stream(), len(request.prompt), model.stop_tokens)
        engine.running += 1
        try:
            if await self._sleep(engine.prefill):
                yield self._last(transcript, "abort")
                return
            yield Delta(prompt=self._prompt(), cached_tokens=min(4, len(request.prompt) - 1))
            script = engine.script(request.seed)
            for count in range(10**9):
                late = (
                    self.engine_request.timeout is not None
                    and time.perf_counter() - began > self.engine_request.timeout
                )
                if late:
                    yield self._last(transcript, "error", "the timeout has passed")._replace(timed_out=True)
                    return
                if await self._sleep(engine.pace):
                    yield self._last(transcript, "abort")
                    return
                token = script[count % len(script)]
                if self.engine_request.grammar is not None:
                    try:
                        bits = self.engine_request.grammar.mask()
                    except RequestError as error:
                        yield self._last(transcript, "error", str(error))._replace(param=error.param)
                        return
                    token = next(t for t in range(model.vocabulary) if bits[t // 32] >> (t % 32) & 1)
                top = ()
                if self.engine_request.logprobs is not None:
                    top = tuple(
                        Alternative(token + k, -0.25 - k) for k in range(self.engine_request.logprobs)
                    )
                logprob = None if self.engine_request.logprobs is None else -0.25
                metrics = {
                    "entropy": 0.5 * count,
                    "temperature": 0.75,
                    "kept_fraction": 1.0,
                    "surprisal": 0.25,
                }
                settled = transcript.add(token, metrics, logprob, top)
                try:
                    ended = self.engine_request.grammar is not None and not (
                        self.engine_request.grammar.accept(token)
                    )
                except RequestError as error:
                    yield self._last(transcript, "error", str(error))._replace(param=error.param)
                    return
                if ended:
                    settled += transcript.finish("stop")
                if transcript.finish_reason is not None:
                    yield self._last(transcript, transcript.finish_reason)._replace(tokens=tuple(settled))
                    return
                if settled:
                    yield Delta(tuple(settled))
        finally:
            engine.running -= 1

    def cancel(self) -> None:
        self.engine.cancelled.append(self.engine_request.id)
        self.cancelled.set()

    async def _sleep(self, seconds: float) -> bool:
        """Sleep; whether the request was cancelled in the meantime."""
        if not seconds:
            return self.cancelled.is_set()
        try:
            await asyncio.wait_for(self.cancelled.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _last(self, transcript: Transcript, reason: Any, error: str | None = None) -> Delta:
        settled = transcript.finish(reason, error)
        usage = Usage(len(self.engine_request.request.prompt), len(transcript._token_ids))
        summary = {"entropic_time": 1.5, "mean_entropy": 0.5, "kept_fraction": 1.0}
        return Delta(
            tuple(settled),
            (),
            reason,
            transcript.stop_reason,
            error,
            usage,
            0,
            {**summary, "queue_time": 0.01},
        )

    def _prompt(self) -> tuple[PromptToken, ...]:
        number = self.engine_request.prompt_logprobs
        if number is None:
            return ()
        text = self.engine.model.token_text
        return tuple(
            PromptToken(t, text(t), None)
            if not place
            else PromptToken(t, text(t), -1.0, tuple(Alternative(t + k, -1.0 - k) for k in range(number)))
            for place, t in enumerate(self.engine_request.request.prompt)
        )


class ScriptedEngine:
    """Runs up to `room` requests at a time. `prefill` and `pace` are seconds before and between tokens."""

    ranks = 1

    def __init__(self, model: ServedModel, text: str = SCRIPT) -> None:
        self.model = model
        self.tokens = model.tokenizer.encode(text, special=False)
        self.prefill = self.pace = 0.0
        self.room = 10**6
        self.running = 0
        self.is_ready = self.does_serve = True
        self.failed: str | None = None
        self.engine_requests: list[EngineRequest] = []
        self.cancelled: list[str] = []
        self.closed: float | None = None
        self.embedded: list[tuple[list[list[int]], str]] = []
        self.embed_seconds, self.stopped = 0.0, 0
        self.adapters: dict[str, str] = {}

    def script(self, seed: int) -> Sequence[int]:
        """The tokens for a seed: the script from another start, and the end of the text."""
        first = seed % len(self.tokens)
        return [*self.tokens[first:], *self.tokens[:first], *self.model.stop_tokens[:1]]

    def submit(self, engine_request: EngineRequest) -> ScriptedOutputStream:
        if self.failed is not None:
            raise RuntimeError(self.failed)
        if self.running >= self.room:
            raise QueueFullError(7.0)
        stated = {name: value for name, value in engine_request.control.gains if value != AUTO}
        check_order({**{name: line.default for name, line in GAINS.items()}, **stated}, stated)
        self.engine_requests.append(engine_request)
        return ScriptedOutputStream(self, engine_request)

    def ready(self) -> bool:
        return self.is_ready

    def serves(self) -> bool:
        return self.does_serve and self.failed is None

    def failure(self) -> BaseException | None:
        return None if self.failed is None else RuntimeError(self.failed)

    def snapshot(self) -> dict[str, Any]:
        return {
            "running": self.running,
            "waiting": 0,
            "kv_usage": 0.25,
            "preemptions": 3,
            "prefix_queries": 10,
            "prefix_hits": 4,
            "compilations": 0,
            "presets": ("off", "micro"),
            "explored": 5,
            "looked": 6,
            "returned": 7,
            "discarded": 80,
            "sequences": [],
        }

    def describe(self) -> dict[str, Any]:
        return {"versions": {}, "devices": [], "kv_cache": {"pages": 4}}

    def reset_prefix_cache(self) -> Future[PrefixCacheReset]:
        if self.failed is not None:
            raise RuntimeError(self.failed)
        reset: Future[PrefixCacheReset] = Future()
        reset.set_result(PrefixCacheReset(3, 1))
        return reset

    def sleep(self, mode: str) -> Future[None]:
        raise RequestError(f"the scripted engine never sleeps; got {mode}")

    def wake_up(self) -> Future[None]:
        raise RuntimeError("the scripted engine never sleeps")

    def is_sleeping(self) -> bool:
        return False

    def adapter_paths(self) -> dict[str, str]:
        return dict(self.adapters)

    def load_adapter(self, name: str, path: str) -> None:
        if name in self.adapters:
            raise RequestError(f"lora_name must not be a loaded adapter; got {name!r}", "lora_name")
        self.adapters[name] = path

    def unload_adapter(self, name: str) -> None:
        if self.adapters.pop(name, None) is None:
            raise RequestError(f"lora_name must be a loaded adapter; got {name!r}", "lora_name")

    embedding_limits = EmbeddingLimits(100, 8)

    def embed(self, texts: list[list[int]], pooling: str, stop: Event) -> Embeddings | None:
        """Component k counts the tokens that are k modulo 8; "last" counts only the last token."""
        self.embedded.append((texts, pooling))
        if self.embed_seconds and stop.wait(self.embed_seconds):
            self.stopped += 1
            return None
        counted = texts if pooling == "mean" else [text[-1:] for text in texts]
        counts = [np.bincount(np.array(text) % 8, minlength=8) for text in counted]
        return Embeddings(np.array(counts, np.float32))

    def close(self, drain: float | None = None, timeout: float | None = None) -> bool:
        self.closed = drain
        return True
