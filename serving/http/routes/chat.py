"""`POST /v1/chat/completions`."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...engine.interface import Delta
from ..frontend import Frontend
from ..protocol.chat import ChatBody, ChatChunk, ChatCompletion
from ..tools.parser import MessageParser, call_fields
from . import conversation, generation, logprobs, preparation, rendering, unknown_fields
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
    silent = conversation.limit_of(body) == 0
    choices = await conversation.start(frontend, http, body, name)
    if body.stream:
        head = rendering.head_of(name, "chat.completion.chunk", model)
        parsers = [frontend.tool_calling.parser(body) for _ in choices]

        def render(choice, delta):
            return _pieces(frontend, body, choice, delta, parsers[choice.index])

        news = generation.arriving(frontend, choices, silent)
        source = generation.events(choices, body, head, render, news)
        return generation.EventStream(source, frontend, choices)
    deltas = await generation.unless_gone(http, generation.finished(frontend, choices, silent))
    if deltas is None:
        return Response(status_code=499)
    head = rendering.head_of(name, "chat.completion", model)
    answers = [_full_choice(frontend, body, c, delta) for c, delta in zip(choices, deltas, strict=True)]
    if body.prompt_logprobs is not None:
        naming = logprobs.naming(frontend.model, body.return_tokens_as_token_ids)
        head["prompt_logprobs"] = logprobs.of_prompt(deltas[0].prompt, body.prompt_logprobs, naming)
    return rendering.answered({**head, "choices": answers, "usage": generation.finish(choices, deltas)})


def _full_choice(
    frontend: Frontend, body: ChatBody, choice: generation.Choice, delta: Delta
) -> Mapping[str, Any]:
    """A choice of the answer."""
    parser = frontend.tool_calling.parser(body)
    part = conversation.part_of(delta, parser)
    message: dict[str, Any] = {"role": "assistant", "content": part.content or (None if part.calls else "")}
    if part.reasoning:
        message["reasoning_content"] = part.reasoning
    if part.calls:
        message["tool_calls"] = call_fields(part.calls, streamed=False)
    return {"index": choice.index, "message": message, **_said(frontend, body, delta, parser)}


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
        chunks.append({"index": choice.index, "delta": piece, **_said(frontend, body, delta, parser)})
    return chunks


def _piece(delta: Delta, parser: MessageParser | None) -> dict[str, Any]:
    """The part of the message that a delta adds."""
    part = conversation.part_of(delta, parser)
    if parser is None and delta.tokens:
        return {"content": part.content}
    piece: dict[str, Any] = {"content": part.content} if part.content else {}
    if part.reasoning:
        piece["reasoning_content"] = part.reasoning
    if part.calls:
        piece["tool_calls"] = call_fields(part.calls, streamed=True)
    return piece


def _said(
    frontend: Frontend,
    body: ChatBody,
    delta: Delta,
    parser: MessageParser | None,
) -> dict[str, Any]:
    """The fields of a choice or chunk, its text excepted."""
    calls = delta.finish_reason == "stop" and parser is not None and parser.num_calls > 0
    calls = calls and not conversation.cuts_call(delta, parser)
    fields: dict[str, Any] = {"logprobs": None}
    if body.wants_logprobs and delta.tokens:
        name = logprobs.naming(frontend.model, body.return_tokens_as_token_ids)
        fields["logprobs"] = logprobs.of_chat(delta.tokens, body.top_logprobs or 0, name)
    reason = "tool_calls" if calls else delta.finish_reason
    fields |= {"finish_reason": reason, "stop_reason": delta.stop_reason}
    if body.return_token_ids:
        fields["token_ids"] = [token.id for token in delta.tokens]
    return fields | rendering.entropic(body, delta)
