"""`POST /v1/messages` and `/v1/messages/count_tokens`, in the form of Anthropic's Messages API."""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...engine.interface import Delta
from ...request import RequestError
from ..frontend import Frontend, FrontendError, refusals
from ..protocol.chat import ChatBody
from ..protocol.messages import (
    FIELD_NAMES,
    CountTokensBody,
    MessagesAnswer,
    MessagesBody,
    MessagesError,
    TokenCount,
)
from . import conversation, errors, generation, preparation, rendering, unknown_fields
from .blocks import Block, BlockChange, Blocks
from .generation import Choice

PATH = "/v1/messages"
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "model": MessagesAnswer,
        "description": "The message, or where it streams the events from message_start to message_stop",
        "content": {"text/event-stream": {}},
    }
}


def router(frontend: Frontend) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["generation"])
    codes = (400, 401, 404, 408, 413, 429, 500, 503)

    @routes.post(
        PATH,
        summary="Answer in a conversation, as Anthropic's API does",
        responses=STREAMED | errors.documented(*codes, model=MessagesError),
    )
    async def messages(body: MessagesBody, http: Request) -> Response:
        with errors.renamed(FIELD_NAMES):
            return await unknown_fields.warn(http, body, await _answer(frontend, body, http))

    @routes.post(
        f"{PATH}/count_tokens",
        summary="The number of tokens of a conversation",
        response_model=TokenCount,
        responses=errors.documented(400, 401, 404, 413, 429, 503, model=MessagesError),
    )
    async def count_tokens(body: CountTokensBody, http: Request) -> Any:
        with errors.renamed(FIELD_NAMES), refusals():
            frontend.check_able()
            frontend.check_model(body.model)
            pool = frontend.pools.for_text(preparation.size_of(http))
            count = await frontend.run_in(pool, _count, frontend, body.chat())
        return await unknown_fields.warn(http, body, rendering.answered({"input_tokens": count}))

    return routes


def _count(frontend: Frontend, body: ChatBody) -> int:
    """The tokens of the prompt of a conversation. RequestError for a field that `/v1/messages` refuses."""
    preparation.sampling_fields(frontend, body)
    text, most = conversation.prompt_of(frontend, body), frontend.settings.limits.tokenize
    if len(text) > most:
        raise RequestError(f"messages must have at most {most} characters; got {len(text)}", "messages")
    return len(frontend.model.encode(text, special=False, rendered=True))


async def _answer(frontend: Frontend, body: MessagesBody, http: Request) -> Response:
    """The response to a request, whole or as a stream."""
    model = frontend.check_model(body.model)
    name = preparation.identifier("msg", None)
    chat = body.chat(body.max_tokens, body.stream)
    choices = await conversation.start(frontend, http, chat, name)
    head = {"id": name, "type": "message", "role": "assistant", "model": model}
    message = _Message(frontend, chat, head, choices)
    if body.stream:
        return generation.EventStream(message.events(), frontend, choices)
    deltas = await generation.unless_gone(http, generation.finished(frontend, choices, False))
    if deltas is None:
        return Response(status_code=499)
    message.push(deltas[0])
    return rendering.answered(message.answer(deltas[0]))


class _Message:
    """A message as it is generated."""

    def __init__(
        self, frontend: Frontend, body: ChatBody, head: Mapping[str, Any], choices: list[Choice]
    ) -> None:
        self.frontend, self.body, self.head, self.choices = frontend, body, head, choices
        self.blocks = Blocks()
        self.parser = frontend.tool_calling.parser(body)
        self.trace: list[Any] = []  # tokens, if their trace is requested

    def push(self, delta: Delta) -> list[BlockChange]:
        """The changes of blocks that a delta makes; FrontendError for a message that was cut off."""
        conversation.check_ended(delta)
        if self.body.entropic is not None and self.body.entropic.trace:
            self.trace += delta.tokens
        changes = self.blocks.push(conversation.part_of(delta, self.parser))
        return changes if delta.finish_reason is None else changes + self.blocks.close()

    def answer(self, last: Delta) -> dict[str, Any]:
        """The whole message, after its last delta."""
        content = [_content(block) for block in self.blocks.blocks]
        generation.finish(self.choices, [last])
        return {
            **self.head,
            "content": content,
            **self._end(last),
            "usage": self._usage(),
            **self._measured(last),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """The events of the message, or the error that ends it."""
        news = generation.arriving(self.frontend, self.choices, False)
        begun = False
        try:
            with errors.renamed(FIELD_NAMES):
                async with contextlib.aclosing(news):  # type: ignore[type-var]
                    async for _, delta in news:
                        if not begun:
                            begun = True
                            yield rendering.named(self._start())
                        for change in self.push(delta):
                            yield rendering.named(_event(change))
                        if delta.finish_reason is not None:
                            generation.finish(self.choices, [delta])
                            yield rendering.named(self._delta(delta))
            yield rendering.named({"type": "message_stop"})
        except FrontendError as error:
            yield rendering.named(errors.body(error.status, str(error), path=PATH))

    def _start(self) -> dict[str, Any]:
        empty = {"content": [], "stop_reason": None, "stop_sequence": None}
        return {"type": "message_start", "message": {**self.head, **empty, "usage": self._usage()}}

    def _delta(self, last: Delta) -> dict[str, Any]:
        fields = {"delta": self._end(last), "usage": self._usage(), **self._measured(last)}
        return {"type": "message_delta", **fields}

    def _end(self, last: Delta) -> dict[str, Any]:
        """Why the message has ended."""
        reason, sequence = "end_turn", None
        if last.finish_reason == "length":
            reason = "max_tokens"
        elif self.blocks.has_calls and not conversation.cuts_call(last, self.parser):
            reason = "tool_use"
        elif isinstance(last.stop_reason, str):
            reason, sequence = "stop_sequence", last.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, int]:
        (choice,) = self.choices
        return {
            "input_tokens": len(choice.prompt) - choice.cached,
            "output_tokens": choice.tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": choice.cached,
        }

    def _measured(self, last: Delta) -> dict[str, Any]:
        return rendering.entropic(self.body, last._replace(tokens=tuple(self.trace)))


def _content(block: Block) -> dict[str, Any]:
    """A block of the answer."""
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "thought":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    try:
        arguments = json.loads(block.text)
    except (ValueError, RecursionError):  # max_tokens or a stop string has cut the call
        arguments = {}
    return {"type": "tool_use", "id": block.call, "name": block.name, "input": arguments}


def _event(change: BlockChange) -> dict[str, Any]:
    """The event of a change."""
    block = change.block
    if change.kind == "open":
        empty = _content(Block(block.kind, block.index, block.call, block.name))
        return {"type": "content_block_start", "index": block.index, "content_block": empty}
    if change.kind == "close":
        return {"type": "content_block_stop", "index": block.index}
    kind, field = {
        "text": ("text_delta", "text"),
        "thought": ("thinking_delta", "thinking"),
        "call": ("input_json_delta", "partial_json"),
    }[block.kind]
    return {
        "type": "content_block_delta",
        "index": block.index,
        "delta": {"type": kind, field: change.text},
    }
