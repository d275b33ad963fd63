"""Front end between HTTP and the engine: submits engine requests, follows them, and records metrics."""

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from entropic_jax.parameter_tables.table import AUTO, ParameterError

from ..engine.interface import Delta, Engine, EngineRequest, OutputStream, QueueFullError
from ..engine.text_grammar import Grammars
from ..options.control_options import calibration_of
from .metrics import Metrics
from .protocol import entropic
from .served_model import ServedModel
from .settings import Settings
from .tools.calling import ToolCalling
from .worker_pools import AbandonedError, WorkerPool, worker_pools

RETRY = 5.0  # seconds of Retry-After while the server shuts down
T = TypeVar("T")


class FrontendError(Exception):
    """A refused request: its HTTP status, the parameter at fault, and when to try again."""

    def __init__(
        self, status: int, message: str, param: str | None = None, retry_after: float | None = None
    ) -> None:
        """A refusal.

        Args:
            status: HTTP status of the response, from 400 to 599.
            message: sent to the client.
            param: field of the request that is at fault, if it is one.
            retry_after: seconds after which the client may try again; None sends no Retry-After.
        """
        super().__init__(message)
        self.status, self.param, self.retry_after = status, param, retry_after


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turn a ParameterError into a FrontendError with status 400; `param` is the field's path in the body."""
    try:
        yield
    except ParameterError as error:
        message, param = str(error), error.param
        if param in entropic.FIELDS and message.startswith(param):
            message, param = f"entropic.{message}", f"entropic.{param}"  # the name that the client wrote
        raise FrontendError(400, message, param) from error


class Frontend:
    """An engine with the text side of its model, and the state of the server around them."""

    def __init__(
        self, engine: Engine, model: ServedModel, settings: Settings, metrics: Metrics | None = None
    ) -> None:
        """A front end without requests in flight.

        Args:
            engine: generates the tokens.
            model: names, tokenizer and chat template of the model that the engine runs.
            settings: limits, timeouts and default control.
            metrics: record of the requests; None begins a new one.
        """
        self.engine, self.model, self.settings = engine, model, settings
        self.metrics = metrics or Metrics(engine, model.names[0], settings.metrics_prefix)
        self.grammars = Grammars(model, settings.limits.grammar)
        self.tool_calling = ToolCalling(model, settings.tool_call_parser, settings.reasoning_parser)
        self.pools = worker_pools(engine.ranks)
        self.started = int(time.time())
        self.draining = False
        self.abandoned = False  # while it drains: whether not even accepted requests go on
        self.output_streams: set[OutputStream] = set()
        self.embedding_stops: set[threading.Event] = set()  # of the embeddings that are computed

    @property
    def busy(self) -> bool:
        """Whether requests are in flight."""
        return self.num_in_flight > 0

    @property
    def num_in_flight(self) -> int:
        """Texts that are generated, and other work that a request waits for."""
        return len(self.output_streams) + self.pools.awaited

    def check_model(self, name: str | None) -> str:
        """The name under which the model answers; FrontendError for one that is not served."""
        if name is None:
            return self.model.names[0]
        if name not in self.model.names and name not in (adapters := self.engine.adapter_paths()):
            known = ", ".join((*self.model.names, *adapters))
            raise FrontendError(404, f"model must be one of {known}; got {name[:200]!r}", "model")
        return name

    def adapter(self, name: str | None) -> str | None:
        """The LoRA adapter that a request's `model` names; None for the model itself."""
        return None if name is None or name in self.model.names else name

    def check_base_model(self, name: str | None) -> str:
        """Like `check_model`, for requests that no adapter can serve."""
        if self.adapter(self.check_model(name)) is not None:
            known = ", ".join(self.model.names)
            message = f"model must be one of {known}, since adapters have no embeddings; got {name!r}"
            raise FrontendError(400, message, "model")
        return self.check_model(name)

    def check_able(self) -> None:
        """FrontendError while the server is shutting down. For requests that are new."""
        if self.draining:
            raise _ending()

    def check_not_abandoned(self) -> None:
        """FrontendError at the end of a shutdown. For requests that were accepted before."""
        if self.draining and self.abandoned:
            raise _ending()

    def check_room(self, *pools: WorkerPool) -> None:
        """FrontendError (429) if the queue of one of these pools is full."""
        try:
            for pool in pools:
                pool.check_room()
        except QueueFullError as error:
            raise self._too_many(error) from None

    async def run_in(
        self, pool: WorkerPool, function: Callable[..., T], *arguments: Any, admitted: bool = False
    ) -> T:
        """Call a function in a thread of a pool, and return its result.

        Args:
            pool: whose thread makes the call.
            function: may block.
            *arguments: the arguments of the function.
            admitted: as for `WorkerPool.run`.

        Raises:
            FrontendError: The pool's queue is full (429), or the server ends (503).
        """
        self.check_not_abandoned()
        try:
            return await pool.run(function, *arguments, admitted=admitted)
        except QueueFullError as error:
            raise self._too_many(error) from None
        except AbandonedError:
            raise _ending() from None

    def _too_many(self, error: QueueFullError) -> FrontendError:
        self.metrics.refused()
        return FrontendError(429, str(error), retry_after=error.retry_after)

    def submit(self, engine_requests: Sequence[EngineRequest]) -> list[OutputStream]:
        """Submit all engine requests, or none of them."""
        self.check_not_abandoned()
        output_streams: list[OutputStream] = []
        try:
            for engine_request in engine_requests:
                output_streams.append(self.engine.submit(engine_request))
        except BaseException as error:
            for output_stream in output_streams:
                output_stream.cancel()
            if isinstance(error, QueueFullError):
                raise self._too_many(error) from None
            if isinstance(error, ParameterError) and error.param == "model":  # unloaded since it was checked
                raise FrontendError(404, str(error), "model") from None
            if isinstance(error, RuntimeError):  # the engine has stopped
                raise FrontendError(
                    503, f"the engine cannot take requests: {error}", retry_after=RETRY
                ) from error
            raise
        self.output_streams.update(output_streams)
        return output_streams

    async def follow(self, output_stream: OutputStream) -> AsyncIterator[Delta]:
        """The deltas of an engine request; closing the iterator before the last one cancels it."""
        watch = self.metrics.watch(output_stream)
        try:
            async for delta in output_stream:
                watch.note(delta)
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            if watch.ended:
                self.output_streams.discard(output_stream)
            else:
                self.release((output_stream,))

    def release(self, output_streams: Iterable[OutputStream]) -> None:
        """Cancel the engine requests that nobody has followed to their end."""
        for output_stream in output_streams:
            if output_stream in self.output_streams:
                self.output_streams.discard(output_stream)
                output_stream.cancel()
                self.metrics.abandoned(output_stream)

    def abandon(self) -> None:
        """End all requests in flight at once; readers get the text so far, or 503 without one."""
        self.abandoned = True
        self.pools.abandon()
        for output_stream in tuple(self.output_streams):
            output_stream.cancel()
        for stop in tuple(self.embedding_stops):
            stop.set()

    @functools.cached_property
    def target_entropy(self) -> float:
        """Default set-point of the temperature law, in nats."""
        from entropic_jax.methods.presets import Gains

        target = dict(self.settings.control.gains).get("target_entropy", AUTO)
        if target != AUTO:
            return float(target)
        calibration = calibration_of(Path(self.model.path))
        return Gains().target_entropy if calibration is None else calibration.target_entropy

    def state(self) -> dict[str, Any]:
        """The state of the engine for the dashboard."""
        return {
            "ready": self.engine.ready() and not self.draining,
            "draining": self.draining,
            "model": self.model.names[0],
            "max_model_len": self.model.context,
            "preset": self.settings.control.preset,
            "target_entropy": self.target_entropy,
            **self.engine.snapshot(),
        }


def _ending() -> FrontendError:
    return FrontendError(503, "the server is shutting down", retry_after=RETRY)


async def collected(deltas: AsyncIterator[Delta]) -> Delta:
    """All deltas of an engine request, combined into one."""
    async with contextlib.aclosing(deltas) as source:  # type: ignore[type-var]
        all_of_them = [delta async for delta in source]
    last = all_of_them[-1]
    return last._replace(
        tokens=tuple(token for delta in all_of_them for token in delta.tokens),
        prompt=tuple(token for delta in all_of_them for token in delta.prompt),
        cached_tokens=max(delta.cached_tokens for delta in all_of_them),
    )


async def merged(sources: Sequence[AsyncIterator[Delta]]) -> AsyncIterator[tuple[int, Delta]]:
    """The deltas of several engine requests as they come, each with the index of its request."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as source:  # type: ignore[type-var]
            async for delta in source:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta | BaseException]] = asyncio.Queue()

    async def pump(index: int, source: AsyncIterator[Delta]) -> None:
        try:
            async with contextlib.aclosing(source) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    queue.put_nowait((index, delta))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(index, source)) for index, source in enumerate(sources)]
    try:
        left = len(tasks)
        while left:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            left -= item.finish_reason is not None
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
