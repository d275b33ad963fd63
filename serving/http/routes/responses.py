"""`/v1/responses`, in the form of OpenAI's Responses API, with stored responses."""

import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from ..file_store import page_of
from ..frontend import Frontend, FrontendError, refusals
from ..protocol.fields import Order
from ..protocol.responses import (
    FIELD_NAMES,
    DeletedResponse,
    InputItems,
    ResponsesAnswer,
    ResponsesBody,
    chat_messages,
    listed_items,
)
from ..response_store import ResponseStore, StoredResponse
from . import conversation, errors, generation, rendering, unknown_fields
from .response_message import ResponseMessage

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "model": ResponsesAnswer,
        "description": "The response, or where it streams the events from response.created on",
        "content": {"text/event-stream": {}},
    }
}


def router(frontend: Frontend) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["generation"])
    limits = frontend.settings.limits
    store = ResponseStore(
        limits.stored_responses, limits.stored_response_bytes, limits.stored_response_seconds
    )

    @routes.post(
        "/v1/responses",
        summary="Answer in a conversation, as OpenAI's Responses API does",
        responses=STREAMED | errors.documented(400, 401, 404, 408, 413, 429, 500, 503),
    )
    async def respond(body: ResponsesBody, http: Request) -> Response:
        with errors.renamed(FIELD_NAMES):
            return await unknown_fields.warn(http, body, await _answer(frontend, store, body, http))

    @routes.get(
        "/v1/responses/{response_id}",
        summary="A stored response",
        response_model=ResponsesAnswer,
        responses=errors.documented(401, 404),
    )
    async def stored(response_id: str, http: Request) -> Any:
        return rendering.answered(_stored(store, http, "response_id", response_id).answer)

    @routes.get(
        "/v1/responses/{response_id}/input_items",
        summary="The input of a stored response",
        response_model=InputItems,
        responses=errors.documented(400, 401, 404),
    )
    async def input_items(
        response_id: str,
        http: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Order = "desc",
        after: str | None = None,
    ) -> Any:
        items = _stored(store, http, "response_id", response_id).items[:: 1 if order == "asc" else -1]
        with refusals():
            return rendering.answered(page_of(items, limit, after))

    @routes.delete(
        "/v1/responses/{response_id}",
        summary="Forget a stored response",
        response_model=DeletedResponse,
        responses=errors.documented(401, 404),
    )
    async def forget(response_id: str, http: Request) -> Any:
        _stored(store, http, "response_id", response_id)
        store.delete(http.state.owner, response_id)
        return rendering.answered({"id": response_id, "object": "response", "deleted": True})

    return routes


def _stored(store: ResponseStore, http: Request, param: str, name: str, status: int = 404) -> StoredResponse:
    """The stored response that `param` of a request names; FrontendError if its owner has none of that id."""
    if (response := store.get(http.state.owner, name)) is None:
        message = f"{param} must be the id of a stored response that has not expired; got {name[:200]!r}"
        raise FrontendError(status, message, param)
    return response


async def _answer(frontend: Frontend, store: ResponseStore, body: ResponsesBody, http: Request) -> Response:
    """The response to a request, whole or as a stream."""
    model = frontend.check_model(body.model)
    owner = http.state.owner
    messages = chat_messages(body.input)
    if body.previous_response_id is not None:
        previous = _stored(store, http, "previous_response_id", body.previous_response_id, 400)
        messages = [*previous.messages, *messages]
    if not messages:
        raise FrontendError(400, "input must have an item other than reasoning; got none", "input")
    chat = body.chat(messages)
    name = f"resp_{uuid.uuid4().hex}"  # not the request's id, which clients choose and may repeat
    choices = await conversation.start(frontend, http, chat, name)
    head = {"id": name, "object": "response", "created_at": int(time.time()), "model": model}
    message = ResponseMessage(frontend, body, chat, head, choices)

    def keep(answer: dict[str, Any]) -> None:
        if body.store is not False:
            items = listed_items(body.input, name.removeprefix("resp_"))
            store.put(owner, answer, [*messages, message.for_chat()], items)

    if body.stream:
        return generation.EventStream(_events(frontend, message, keep), frontend, choices)
    deltas = await generation.unless_gone(http, generation.finished(frontend, choices, False))
    if deltas is None:
        return Response(status_code=499)
    for _ in message.push(deltas[0]):
        pass
    keep(answer := message.ended(deltas[0]))
    return rendering.answered(answer)


async def _events(frontend: Frontend, message: ResponseMessage, keep: Any) -> AsyncIterator[bytes]:
    """The events of a response, numbered; the last holds the whole response."""
    number = 0

    def numbered(event: dict[str, Any]) -> bytes:
        nonlocal number
        number += 1
        return rendering.named({"type": event["type"], "sequence_number": number - 1, **event})

    for kind in ("response.created", "response.in_progress"):
        yield numbered({"type": kind, "response": message.answer("in_progress")})
    news = generation.arriving(frontend, message.choices, False)
    try:
        with errors.renamed(FIELD_NAMES):
            async with contextlib.aclosing(news):  # type: ignore[type-var]
                async for _, delta in news:
                    for event in message.push(delta):
                        yield numbered(event)
                    if delta.finish_reason is not None:
                        keep(answer := message.ended(delta))
                        yield numbered({"type": f"response.{answer['status']}", "response": answer})
    except FrontendError as error:
        code = "server_error" if error.status >= 408 else "invalid_prompt"
        failure = {"code": code, "message": str(error)}
        yield numbered(
            {"type": "response.failed", "response": {**message.answer("failed"), "error": failure}}
        )
