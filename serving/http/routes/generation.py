"""Steps that completions and chat share: bodies to engine requests, deltas to choices and events."""

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import pydantic_core
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ...engine.interface import Delta, EngineRequest, OutputStream
from ...request import Request, RequestError
from ...transcript import Token, Usage
from .. import grammar, log, tracing
from ..frontend import Frontend, FrontendError, collected, merged, refusals
from ..protocol.entropic import TRACED
from ..protocol.fields import usage
from ..protocol.sampling import ObjectFormat, SamplingBody, SchemaFormat
from ..worker_pools import LONG
from . import errors

SUMMARY = ("entropic_time", "mean_entropy", "kept_fraction", "certificate")
COUNTS = ("passes", "num_drafted", "num_accepted")  # of the summary, too
T = TypeVar("T")


class Choice:
    """A text that is being generated: its output stream, and how much of it has been sent.

    Args:
        index: Its `index` in the answer, from 0.
        prompt: Token ids.
        output_stream: Its deltas; None where no token is to be generated.
    """

    def __init__(self, index: int, prompt: Sequence[int], output_stream: OutputStream | None) -> None:
        self.index, self.prompt, self.output_stream = index, prompt, output_stream
        self.begun = False  # whether anything was sent
        self.offset = 0  # characters sent
        self.tokens = 0
        self.cached = 0

    def take(self, delta: Delta) -> None:
        """Count what a delta brings; FrontendError if it ends in an error."""
        self.tokens += len(delta.tokens)
        self.cached = max(self.cached, delta.cached_tokens)
        if delta.finish_reason == "error":
            status = 400 if delta.param else 408 if delta.timed_out else 500
            message = delta.error or "the request took longer than the server allows"
            raise FrontendError(status, message, delta.param)


def identifier(prefix: str, request_id: str | None) -> str:
    """The id of an answer, derived from the request id."""
    return f"{prefix}-{request_id or log.request_id.get() or uuid.uuid4().hex}"


def requests_of(
    frontend: Frontend, body: SamplingBody, prompt: Sequence[int], count: int, most: int
) -> list[Request]:
    """Requests for one prompt, which differ in their seed. RequestError for a field that is out of range.

    Args:
        frontend: Whose model and limits hold.
        body: Holds the sampling parameters.
        prompt: Token ids, at least one and fewer than the model's context.
        count: Number of requests.
        most: Tokens to generate at most; the context may leave room for fewer.
    """
    limits, context = frontend.settings.limits, frontend.model.context
    if isinstance(body.stop, list) and len(body.stop) > limits.stops:
        raise RequestError(f"stop must have at most {limits.stops} strings; got {len(body.stop)}", "stop")
    if not 0 < len(prompt) < context:
        raise RequestError(
            f"prompt must have between 1 and {context - 1} tokens, one less than the model's maximum context "
            f"length of {context} tokens; got {len(prompt)}",
            "prompt",
        )
    fields = body.sampling(dict(frontend.model.defaults))
    max_tokens = max(1, min(most, context - len(prompt)))
    fields["min_tokens"] = min(fields.get("min_tokens", 0), max_tokens)
    last = frontend.model.vocabulary - 1
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        if (highest := max(fields.get(name, ()), default=0)) > last:
            raise RequestError(f"{name} must hold token ids between 0 and {last}; got {highest}", name)
    first = body.first_seed()
    return [
        Request(prompt=prompt, max_tokens=max_tokens, seed=(first + k) % 2**31, **fields)
        for k in range(count)
    ]


def engine_requests_of(
    frontend: Frontend,
    body: SamplingBody,
    requests: Sequence[Request],
    name: str,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> list[EngineRequest]:
    """The engine requests, each with its own state of the body's grammar, if it has one.

    Args:
        frontend: Supplies the default control, the timeout and the grammars.
        body: Holds control, priority, deadline and grammar.
        requests: Prompts with their sampling parameters.
        name: Id of the answer, with which the ids of the engine requests begin.
        logprobs: Alternatives reported per generated token; None reports no log-probabilities.
        prompt_logprobs: The same per token of the prompt.
    """
    default = frontend.settings.control
    constraint = constraint_of(body)
    return [
        EngineRequest(
            id=f"{name}-{index}",
            request=request,
            control=default if body.entropic is None else body.entropic.control(default),
            priority=body.priority or 0,
            deadline=body.deadline,
            timeout=frontend.settings.request_timeout,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=None if constraint is None else frontend.grammars.compile(*constraint),
        )
        for index, request in enumerate(requests)
    ]


def constraint_of(body: SamplingBody) -> tuple[str, str] | None:
    """The field that constrains the text, and the grammar it stands for."""
    form = body.response_format
    if isinstance(form, ObjectFormat):
        return "response_format", grammar.any_object()
    if isinstance(form, SchemaFormat):
        schema = form.json_schema.schema_
        return "response_format.json_schema", grammar.from_schema("response_format.json_schema", schema)
    constraints = body.structured_outputs
    if constraints is None:
        return None
    if constraints.json_ is not None:
        return "structured_outputs.json", grammar.from_schema("structured_outputs.json", constraints.json_)
    if constraints.regex is not None:
        return "structured_outputs.regex", grammar.from_regex(constraints.regex)
    if constraints.choice is not None:
        return "structured_outputs.choice", grammar.from_choices(constraints.choice)
    if constraints.grammar is not None:
        return "structured_outputs.grammar", grammar.from_text(constraints.grammar)
    return ("structured_outputs.json_object", grammar.any_object()) if constraints.json_object else None


async def start(
    frontend: Frontend,
    http: HttpRequest,
    body: SamplingBody,
    prepare: Callable[[], tuple[list[EngineRequest], list[tuple[Sequence[int], EngineRequest | None]]]],
) -> list[Choice]:
    """Prepare engine requests and submit them.

    Args:
        frontend: Submits the engine requests.
        http: The request, whose size decides which threads prepare it.
        body: Of the request.
        prepare: Returns the engine requests, and for every text its prompt and its engine request. Runs in a
            thread, since long prompts take their time.
    """
    frontend.check_able()
    pools = frontend.pools
    with refusals():
        if body.constrains:
            constraint = await frontend.run_in(pools.for_text(size_of(http)), constraint_of, body)
            if constraint is not None and frontend.grammars.is_hard(constraint[1]):
                await frontend.run_in(pools.grammars, frontend.grammars.compile, *constraint)
        engine_requests, plan = await frontend.run_in(pools.for_text(size_of(http)), prepare)
        output_streams = dict(
            zip(
                (engine_request.id for engine_request in engine_requests),
                frontend.submit(engine_requests),
                strict=True,
            )
        )
    return [
        Choice(index, prompt, None if engine_request is None else output_streams[engine_request.id])
        for index, (prompt, engine_request) in enumerate(plan)
    ]


def size_of(http: HttpRequest) -> int:
    """Bytes of the body; that of a body which does not say counts as long."""
    stated = http.headers.get("content-length", "")
    return int(stated) if stated.isdecimal() else LONG


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
        frontend: Follows the output streams.
        choices: Texts of which nothing has been read.
        silent: Leave the generated tokens out, since only the prompt is evaluated (`max_tokens` 0).
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(collected(_deltas_of(frontend, choice, silent))) for choice in choices]
    finally:
        release(frontend, choices)
    results = [task.result() for task in tasks]
    for choice, delta in zip(choices, results, strict=True):
        choice.take(delta)
    return results


def release(frontend: Frontend, choices: Sequence[Choice]) -> None:
    """Cancel the choices that have not ended, since nobody reads them."""
    frontend.release([choice.output_stream for choice in choices if choice.output_stream is not None])


async def arriving(
    frontend: Frontend, choices: Sequence[Choice], silent: bool
) -> AsyncIterator[tuple[Choice, Delta]]:
    """The deltas of all choices as they come.

    Args:
        frontend, choices, silent: As for `finished`.
    """
    sources = [_deltas_of(frontend, choice, silent) for choice in choices]
    async with contextlib.aclosing(merged(sources)) as news:  # type: ignore[type-var]
        async for index, delta in news:
            choices[index].take(delta)
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
        source: Encoded events.
        frontend: Cancels the engine requests.
        choices: The texts in the stream.
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
        choices: The texts in the stream, whose tokens make up the usage.
        body: Holds the stream options.
        head: Fields that every event begins with, from `head_of`.
        render: Returns the entries of `choices` for a delta, one event each.
        news: Deltas as they come, each with its choice.
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


def head_of(name: str, kind: str, model: str) -> dict[str, Any]:
    """The fields that every answer begins with.

    Args:
        name, kind, model: Values of the fields `id`, `object` and `model`.
    """
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def entropic(body: SamplingBody, delta: Delta, choice: Choice) -> dict[str, Any]:
    """The `entropic` object of a choice: a summary at its end, and the trace if requested.

    Args:
        body: Says whether the trace is requested.
        delta, choice: The new tokens, and the text that they belong to. The last delta holds the summary.
    """
    fields: dict[str, Any] = {}
    if delta.finish_reason is not None:
        fields = {name: number(delta.summary.get(name)) for name in SUMMARY}
        fields |= {name: int(delta.summary[name]) for name in COUNTS if name in delta.summary}
    if body.entropic is not None and body.entropic.trace and (delta.tokens or fields):
        fields["trace"] = {
            "token_ids": [token.id for token in delta.tokens],
            "text": [token.text for token in delta.tokens],
            **{name: measured(delta.tokens, name) for name in TRACED},
        }
    return {"entropic": fields} if fields else {}


def measured(tokens: Sequence[Token], name: str) -> list[float | None]:
    """One metric of every token."""
    return [number(token.metrics.get(name)) for token in tokens]


def number(value: float | None) -> float | None:
    """A number that JSON can hold, or null."""
    return value if value is not None and math.isfinite(value) else None


def encoded(event: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + pydantic_core.to_json(event, inf_nan_mode="null") + b"\n\n"


def answered(answer: Mapping[str, Any]) -> Response:
    """A complete answer."""
    return Response(pydantic_core.to_json(answer, inf_nan_mode="null"), media_type="application/json")
