"""The message of a response as it is generated: its output items, their events, and the whole response."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ...engine.interface import Delta
from ..frontend import Frontend
from ..protocol.chat import ChatBody
from ..protocol.responses import ResponsesBody
from . import conversation, generation, rendering
from .blocks import Block, BlockChange, Blocks
from .generation import Choice

STATED = ("instructions", "max_output_tokens", "previous_response_id")  # that responses repeat as they are
PREFIXES = {"text": "msg", "thought": "rs", "call": "fc"}  # of the ids of items
GROWTH = {
    "text": ("response.output_text", "text"),
    "thought": ("response.reasoning_text", "text"),
    "call": ("response.function_call_arguments", "arguments"),
}
"""Events of a block that grows and closes, and the field that holds all of it in the end."""


class ResponseMessage:
    """The output of one response."""

    def __init__(
        self,
        frontend: Frontend,
        body: ResponsesBody,
        chat: ChatBody,
        head: Mapping[str, Any],
        choices: list[Choice],
    ) -> None:
        """A message before its first token.

        Args:
            frontend: generates it.
            body: the request.
            chat: the same as a request of chat.
            head: fields that the response begins with.
            choices: the one text that is generated.
        """
        self.frontend, self.body, self.chat, self.head, self.choices = frontend, body, chat, head, choices
        self.blocks = Blocks()
        self.parser = frontend.tool_calling.parser(chat)
        self.trace: list[Any] = []  # tokens, if their trace is requested

    def push(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """The events that a delta makes; FrontendError for a message that was cut off."""
        conversation.check_ended(delta)
        if self.chat.entropic is not None and self.chat.entropic.trace:
            self.trace += delta.tokens
        changes = self.blocks.push(conversation.part_of(delta, self.parser))
        if delta.finish_reason is not None:
            changes += self.blocks.close()
        status = self._status(delta)
        for change in changes:
            yield from self._events(change, status)

    def ended(self, last: Delta) -> dict[str, Any]:
        """The response after its last delta."""
        generation.finish(self.choices, [last])
        answer = self.answer(self._status(last))
        if answer["incomplete_details"] and last.finish_reason != "length":
            answer["incomplete_details"] = {"reason": "stop_sequence"}
        return answer | rendering.entropic(self.chat, last._replace(tokens=tuple(self.trace)))

    def _status(self, last: Delta) -> str:
        """Status of the response and of its last item after this delta."""
        stopped_short = last.finish_reason == "length" or conversation.cuts_call(last, self.parser)
        return "incomplete" if stopped_short else "completed"

    def answer(self, status: str) -> dict[str, Any]:
        """The response so far; the last item of one that is incomplete is so, too."""
        body, request = self.body, self._request()
        effort = None if body.reasoning is None else body.reasoning.effort
        blocks = self.blocks.blocks
        last = "incomplete" if status == "incomplete" else "completed"
        statuses = ["completed"] * (len(blocks) - 1) + [last]
        done = status in ("completed", "incomplete")
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self.head,
            **{name: getattr(body, name) for name in STATED},
            "status": status,
            "output": [self._item(block, s) for block, s in zip(blocks, statuses, strict=False)],
            "usage": self._usage() if done else None,
            "error": None,
            "incomplete_details": reason,
            "background": False,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": effort, "summary": None},
            "store": body.store is not False,
            "temperature": rendering.number(request.temperature),
            "text": {"format": {"type": "text"}} if body.text is None else _dumped(body.text),
            "tool_choice": _dumped(body.tool_choice) or "auto",
            "tools": [_dumped(tool) for tool in body.tools or ()],
            "top_p": rendering.number(request.top_p),
            "truncation": "disabled",
        }

    def for_chat(self) -> dict[str, Any]:
        """The message in the form of chat, for responses that follow; calls that were cut are left out."""
        texts = dict.fromkeys(PREFIXES, "")
        calls = []
        for block in self.blocks.blocks:
            texts[block.kind] += block.text
            if block.kind == "call" and _is_object(block.text):
                function = {"name": block.name, "arguments": block.text}
                calls.append({"id": block.call, "type": "function", "function": function})
        message: dict[str, Any] = {"role": "assistant", "content": texts["text"]}
        if texts["thought"]:
            message["reasoning_content"] = texts["thought"]
        return {**message, "tool_calls": calls} if calls else message

    def _request(self) -> Any:
        """The engine's request, which holds the parameters in effect."""
        (choice,) = self.choices
        assert choice.output_stream is not None
        return choice.output_stream.engine_request.request

    def _usage(self) -> dict[str, Any]:
        (choice,) = self.choices
        thoughts = "".join(block.text for block in self.blocks.blocks if block.kind == "thought")
        num_thought = len(self.frontend.model.encode(thoughts, special=False)) if thoughts else 0
        return {
            "input_tokens": len(choice.prompt),
            "input_tokens_details": {"cached_tokens": choice.cached},
            "output_tokens": choice.tokens,
            "output_tokens_details": {"reasoning_tokens": min(num_thought, choice.tokens)},
            "total_tokens": len(choice.prompt) + choice.tokens,
        }

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """The output item of a block."""
        item = {"id": self._id(block), "status": status}
        if block.kind == "call":
            call = {"call_id": block.call, "name": block.name, "arguments": block.text}
            return {"type": "function_call", **item, **call}
        parts = [] if status == "in_progress" else [_part(block)]
        if block.kind == "thought":
            return {"type": "reasoning", **item, "summary": [], "content": parts}
        return {"type": "message", **item, "role": "assistant", "content": parts}

    def _id(self, block: Block) -> str:
        return f"{PREFIXES[block.kind]}_{self.head['id'].removeprefix('resp_')}{block.index}"

    def _events(self, change: BlockChange, status: str) -> Iterator[dict[str, Any]]:
        """The events of a change; `status` is that of an item that closes."""
        block = change.block
        place: dict[str, Any] = {"item_id": self._id(block), "output_index": block.index}
        kind, field = GROWTH[block.kind]
        part_place = place if block.kind == "call" else {**place, "content_index": 0}
        logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if change.kind == "grow":
            yield {"type": f"{kind}.delta", **part_place, "delta": change.text, **logprobs}
            return
        if change.kind == "open":
            empty = Block(block.kind, block.index, block.call, block.name)
            item = {"output_index": block.index, "item": self._item(empty, "in_progress")}
            yield {"type": "response.output_item.added", **item}
            if block.kind != "call":
                yield {"type": "response.content_part.added", **part_place, "part": _part(empty)}
            return
        name = {"name": block.name} if block.kind == "call" else {}
        yield {"type": f"{kind}.done", **part_place, field: block.text, **logprobs, **name}
        if block.kind != "call":
            yield {"type": "response.content_part.done", **part_place, "part": _part(block)}
        item = {"output_index": block.index, "item": self._item(block, status)}
        yield {"type": "response.output_item.done", **item}


def _part(block: Block) -> dict[str, Any]:
    """The content of an item."""
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _dumped(value: Any) -> Any:
    """A part of the request as JSON has it."""
    if value is None or isinstance(value, str):
        return value
    return value.model_dump(mode="json", by_alias=True, exclude_unset=True)
