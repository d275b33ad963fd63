"""Following of generation requests: the deltas of their texts, and the events of a stream."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ...engine.interface import Delta, OutputStream
from ...request.transcript import Usage
from .. import tracing
from ..frontend import Frontend, FrontendError, collected, merged
from ..protocol.fields import usage
from ..protocol.sampling import SamplingBody
from . import errors
from .rendering import encoded

T = TypeVar("T")


class Choice:
    """A text that is being generated: its output stream, and how much of it has been sent.

    Args:
        index: its `index` in the answer, from 0.
        prompt: token ids.
        output_stream: its deltas; None where no token is to be generated.
    """

    def __init__(self, index: int, prompt: Sequence[int], output_stream: OutputStream | None) -> None:
        self.index, self.prompt, self.output_stream = index, prompt, output_stream
        self.begun = False  # whether anything was sent
        self.offset = 0  # characters sent
        self.tokens = 0
        self.cached = 0

    def take(self, delta: Delta, frontend: Frontend) -> None:
        """Count what a delta brings; FrontendError if it ends in an error, or in nothing at a shutdown."""
        self.tokens += len(delta.tokens)
        if delta.finish_reason == "abort" and not self.tokens:
            frontend.check_able()
        self.cached = max(self.cached, delta.cached_tokens)
        if delta.finish_reason == "error":
            status = 400 if delta.param else 408 if delta.timed_out else 500
            message = delta.error or "the request took longer than the server allows"
            raise FrontendError(status, message, delta.param)


async def _deltas_of(frontend: Frontend, choice: Choice, silent: bool) -> AsyncIterator[Delta]:
    """The deltas of a choice; where its prompt alone is wanted (`silent`), without the tokens after it."""
    if choice.output_stream is None:
        yield Delta(finish_reason="length", usage=Usage(len(choice.prompt), 0))
        return
    async with contextlib.aclosing(frontend.follow(choice.output_stream)) as deltas:  # type: ignore[type-var]
        async for delta in deltas:
            if not silent or delta.finish_reason == "error":
                yield delta
            elif delta.finish_reason is None:
                yield delta._replace(tokens=())
            else:
                yield delta._replace(tokens=(), finish_reason="length", stop_reason=None)


async def finished(frontend: Frontend, choices: Sequence[Choice], silent: bool) -> list[Delta]:
    """One delta per choice, once all have ended; the first failure ends the others.

    Args:
        frontend: follows the output streams.
        choices: texts of which nothing has been read.
        silent: leave the generated tokens out, since only the prompt is evaluated (`max_tokens` 0).
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(collected(_deltas_of(frontend, choice, silent))) for choice in choices]
    finally:
        release(frontend, choices)
    results = [task.result() for task in tasks]
    for choice, delta in zip(choices, results, strict=True):
        choice.take(delta, frontend)
    return results


def release(frontend: Frontend, choices: Sequence[Choice]) -> None:
    """Cancel the choices that have not ended, since nobody reads them."""
    frontend.release([choice.output_stream for choice in choices if choice.output_stream is not None])


async def arriving(
    frontend: Frontend, choices: Sequence[Choice], silent: bool
) -> AsyncIterator[tuple[Choice, Delta]]:
    """The deltas of all choices as they come.

    Args:
        frontend, choices, silent: as for `finished`.
    """
    sources = [_deltas_of(frontend, choice, silent) for choice in choices]
    async with contextlib.aclosing(merged(sources)) as news:  # type: ignore[type-var]
        async for index, delta in news:
            choices[index].take(delta, frontend)
            yield choices[index], delta


async def unless_gone(http: HttpRequest, work: Awaitable[T]) -> T | None:
    """The result of the work. If the client disconnects first, cancels the work and returns None."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class EventStream(StreamingResponse):
    """Server-sent events. Their engine requests end as soon as the client disconnects.

    Args:
        source: encoded events.
        frontend: cancels the engine requests.
        choices: the texts in the stream.
    """

    def __init__(self, source: AsyncIterator[bytes], frontend: Frontend, choices: Sequence[Choice]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(source, headers=headers, media_type="text/event-stream")
        self.release = lambda: release(frontend, choices)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the source ends or the client leaves, which it may do before the first event."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.release()


async def events(
    choices: Sequence[Choice],
    body: SamplingBody,
    head: Mapping[str, Any],
    render: Callable[[Choice, Delta], list[Mapping[str, Any]]],
    news: AsyncIterator[tuple[Choice, Delta]],
) -> AsyncIterator[bytes]:
    """The events of a stream: a chunk for each delta, the usage, the end.

    Args:
        choices: the texts in the stream, whose tokens make up the usage.
        body: holds the stream options.
        head: fields that every event begins with, from `head_of`.
        render: returns the entries of `choices` for a delta, one event each.
        news: deltas as they come, each with its choice.
    """
    options = body.stream_options
    include = bool(options and options.include_usage)
    running = bool(options and options.continuous_usage_stats)
    ends: list[Delta] = []
    try:
        async with contextlib.aclosing(news) as pieces:  # type: ignore[type-var]
            async for choice, delta in pieces:
                ends += [delta] if delta.finish_reason is not None else []
                for rendered in render(choice, delta):
                    event = {**head, "choices": [rendered]}
                    if running:
                        event["usage"] = usage(len(choice.prompt), choice.tokens, choice.cached)
                    elif include:
                        event["usage"] = None
                    yield encoded(event)
        used = finish(choices, ends)
        if include:
            yield encoded({**head, "choices": [], "usage": used})
    except FrontendError as error:
        yield encoded(errors.body(error.status, str(error), error.param))
    yield b"data: [DONE]\n\n"


def finish(choices: Sequence[Choice], deltas: Sequence[Delta]) -> Mapping[str, Any]:
    """The token usage of a request, which is also recorded in its trace span."""
    token_usage = total(choices)
    tracing.note(
        **{
            "gen_ai.usage.input_tokens": token_usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": token_usage["completion_tokens"],
            "entropic.time": sum(delta.summary.get("entropic_time", 0.0) for delta in deltas),
        }
    )
    return token_usage


def total(choices: Sequence[Choice]) -> Mapping[str, Any]:
    """The usage of a request: each prompt counts once, however many texts follow it."""
    prompts = {id(choice.prompt): choice for choice in choices}.values()
    return usage(
        sum(len(choice.prompt) for choice in prompts),
        sum(choice.tokens for choice in choices),
        sum(choice.cached for choice in prompts),
    )
