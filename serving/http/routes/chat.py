"""`POST /v1/chat/completions`."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...engine.interface import Delta, EngineRequest
from ...request import RequestError
from ..frontend import Frontend
from ..protocol.chat import ChatBody, ChatChunk, ChatCompletion
from ..tools.parser import MessageParser, MessagePart, call_fields
from . import generation, logprobs, preparation, rendering, unknown_fields
from .errors import documented

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "model": ChatCompletion,
        "description": f"The answer, or where it streams events that each hold a {ChatChunk.__name__}",
        "content": {"text/event-stream": {}},
    }
}


def router(frontend: Frontend) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["generation"])

    @routes.post(
        "/v1/chat/completions",
        summary="Answer in a conversation",
        responses=STREAMED | documented(400, 401, 404, 408, 413, 429, 500, 503),
    )
    async def chat(body: ChatBody, http: Request) -> Response:
        return await unknown_fields.warn(http, body, await _answer(frontend, body, http))

    return routes


async def _answer(frontend: Frontend, body: ChatBody, http: Request) -> Response:
    """The response to a request, whole or as a stream."""
    model = frontend.check_model(body.model)
    name = preparation.identifier("chatcmpl", body.request_id)
    silent = _limit(body) == 0
    choices = await preparation.start(frontend, http, body, lambda: _prepare(frontend, body, name))
    if body.stream:
        head = rendering.head_of(name, "chat.completion.chunk", model)
        parsers = [frontend.tool_calling.parser(body) for _ in choices]
        render = lambda choice, delta: _pieces(frontend, body, choice, delta, parsers[choice.index])
        news = generation.arriving(frontend, choices, silent)
        source = generation.events(choices, body, head, render, news)
        return generation.EventStream(source, frontend, choices)
    deltas = await generation.unless_gone(http, generation.finished(frontend, choices, silent))
    if deltas is None:
        return Response(status_code=499)
    head = rendering.head_of(name, "chat.completion", model)
    answers = [_full_choice(frontend, body, c, delta) for c, delta in zip(choices, deltas, strict=True)]
    return rendering.answered({**head, "choices": answers, "usage": generation.finish(choices, deltas)})


def _limit(body: ChatBody) -> int | None:
    """The limit on the tokens of the answer, by either of its names."""
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _prepare(
    frontend: Frontend, body: ChatBody, name: str
) -> tuple[list[EngineRequest], list[tuple[Sequence[int], EngineRequest | None]]]:
    """The engine requests of a body, and the prompt and the request of every text.

    There is no request if no token is to be generated.
    """
    count, most = body.choices, _limit(body)
    if count > frontend.settings.limits.sequences:
        raise RequestError(f"n must be at most {frontend.settings.limits.sequences}; got {count}", "n")
    messages, tools = frontend.tool_calling.messages(body)
    text = frontend.model.chat(
        messages,
        continue_last=bool(body.continue_final_message),
        variables=body.chat_template_kwargs,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt is not False,
    )
    if body.truncate_prompt_tokens is None:
        frontend.model.check_length(text)
    tokens = tuple(frontend.model.encode(text, special=False))[-(body.truncate_prompt_tokens or 0) :]
    most = frontend.model.context if most is None else most
    requests = preparation.requests_of(frontend, body, tokens, count, most)
    if most == 0:
        return [], [(tokens, None)] * count
    num_logprobs = (body.top_logprobs or 0) if body.wants_logprobs else None
    engine_requests = preparation.engine_requests_of(frontend, body, requests, name, num_logprobs)
    return engine_requests, [(tokens, engine_request) for engine_request in engine_requests]


def _full_choice(
    frontend: Frontend, body: ChatBody, choice: generation.Choice, delta: Delta
) -> Mapping[str, Any]:
    """A choice of the answer."""
    parser = frontend.tool_calling.parser(body)
    text = "".join(token.text for token in delta.tokens)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if parser is not None:
        parts = parser.push(delta.tokens), parser.finish()
        message["content"] = "".join(part.content for part in parts) or (None if parser.num_calls else "")
        if reasoning := "".join(part.reasoning for part in parts):
            message["reasoning_content"] = reasoning
        if calls := [call for part in parts for call in part.calls]:
            message["tool_calls"] = call_fields(calls, streamed=False)
    return {"index": choice.index, "message": message, **_said(frontend, body, choice, delta, parser)}


def _pieces(
    frontend: Frontend,
    body: ChatBody,
    choice: generation.Choice,
    delta: Delta,
    parser: MessageParser | None,
) -> list[Mapping[str, Any]]:
    """The next chunks of an answer; the first states the role."""
    chunks: list[Mapping[str, Any]] = []
    if not choice.begun:
        choice.begun = True
        opening = {"role": "assistant", "content": ""}
        chunks.append({"index": choice.index, "delta": opening, "logprobs": None, "finish_reason": None})
    if delta.tokens or delta.finish_reason is not None:
        piece = _piece(delta, parser)
        chunks.append({"index": choice.index, "delta": piece, **_said(frontend, body, choice, delta, parser)})
    return chunks


def _piece(delta: Delta, parser: MessageParser | None) -> dict[str, Any]:
    """What a delta adds to the message."""
    if parser is None:
        return {"content": "".join(token.text for token in delta.tokens)} if delta.tokens else {}
    part = parser.push(delta.tokens)
    if delta.finish_reason is not None:
        rest = parser.finish()
        part = MessagePart(
            part.content + rest.content, part.reasoning + rest.reasoning, part.calls + rest.calls
        )
    piece: dict[str, Any] = {"content": part.content} if part.content else {}
    if part.reasoning:
        piece["reasoning_content"] = part.reasoning
    if part.calls:
        piece["tool_calls"] = call_fields(part.calls, streamed=True)
    return piece


def _said(
    frontend: Frontend,
    body: ChatBody,
    choice: generation.Choice,
    delta: Delta,
    parser: MessageParser | None,
) -> dict[str, Any]:
    """The fields of a choice or chunk, its text excepted."""
    calls = delta.finish_reason == "stop" and parser is not None and parser.num_calls > 0
    fields: dict[str, Any] = {"logprobs": None}
    if body.wants_logprobs and delta.tokens:
        name = logprobs.naming(frontend.model, body.return_tokens_as_token_ids)
        fields["logprobs"] = logprobs.of_chat(delta.tokens, body.top_logprobs or 0, name)
    reason = "tool_calls" if calls else delta.finish_reason
    fields |= {"finish_reason": reason, "stop_reason": delta.stop_reason}
    if body.return_token_ids:
        fields["token_ids"] = [token.id for token in delta.tokens]
    return fields | rendering.entropic(body, delta)
