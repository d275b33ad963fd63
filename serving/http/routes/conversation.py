"""Conversations as every API has them: from a chat body to engine requests, and from deltas to a message."""

from collections.abc import Sequence

from starlette.requests import Request as HttpRequest

from ...engine.interface import Delta, EngineRequest
from ...request import RequestError
from ..frontend import RETRY, Frontend, FrontendError
from ..protocol.chat import ChatBody
from ..protocol.tools import shown_tools
from ..tools.parser import MessageParser, MessagePart
from . import preparation
from .generation import Choice


async def start(frontend: Frontend, http: HttpRequest, body: ChatBody, name: str) -> list[Choice]:
    """Submit a conversation to the engine.

    Args:
        frontend: its model writes the prompt, its engine the message.
        http: the request.
        body: the conversation, as chat completions state it.
        name: id of the answer.

    Raises:
        FrontendError: The body is refused, or the server cannot take it.
    """
    return await preparation.start(frontend, http, body, lambda: _prepare(frontend, body, name))


def limit_of(body: ChatBody) -> int | None:
    """The limit on the tokens of the answer, by either of its names."""
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def prompt_of(frontend: Frontend, body: ChatBody) -> str:
    """The prompt that the chat template makes of a conversation. Raises RequestError."""
    shown = shown_tools(body.tools) if body.calls_tools else None
    messages, tools = frontend.tool_calling.messages(body.messages, shown)
    return frontend.model.chat(
        messages,
        continue_last=bool(body.continue_final_message),
        variables=body.chat_template_kwargs,
        tools=tools,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt is not False,
    )


def _prepare(
    frontend: Frontend, body: ChatBody, name: str
) -> tuple[list[EngineRequest], list[tuple[Sequence[int], EngineRequest | None]]]:
    """The engine requests of a body, and the prompt and the request of every text.

    There is no request if no token is to be generated.
    """
    count, most = body.choices, limit_of(body)
    if count > frontend.settings.limits.sequences:
        raise RequestError(f"n must be at most {frontend.settings.limits.sequences}; got {count}", "n")
    text = prompt_of(frontend, body)
    if body.truncate_prompt_tokens is None:
        frontend.model.check_length(text)
    tokens = tuple(frontend.model.encode(text, special=False, rendered=True))
    tokens = tokens[-(body.truncate_prompt_tokens or 0) :]
    most = frontend.model.context if most is None else most
    requests = preparation.requests_of(frontend, body, tokens, count, most)
    num_logprobs = (body.top_logprobs or 0) if body.wants_logprobs else None
    engine_requests = preparation.engine_requests_of(
        frontend, body, requests, name, num_logprobs, body.prompt_logprobs
    )
    if most == 0 and body.prompt_logprobs is None:
        return [], [(tokens, None)] * count
    return engine_requests, [(tokens, engine_request) for engine_request in engine_requests]


def part_of(delta: Delta, parser: MessageParser | None) -> MessagePart:
    """The part of the message that a delta adds; the last one adds the text that the parser has held back."""
    if parser is None:
        return MessagePart("".join(token.text for token in delta.tokens))
    part = parser.push(delta.tokens)
    if delta.finish_reason is None:
        return part
    rest = parser.finish()
    return MessagePart(part.content + rest.content, part.reasoning + rest.reasoning, part.calls + rest.calls)


def cuts_call(last: Delta, parser: MessageParser | None) -> bool:
    """Whether a text ends within the arguments of a call, at a stop string, a stop token or `max_tokens`."""
    return last.finish_reason is not None and parser is not None and parser.in_call


def check_ended(delta: Delta) -> None:
    """FrontendError for a message that was cut off by the end of the server, or by its sleep."""
    if delta.finish_reason == "abort":
        raise FrontendError(
            503, "the message was cut off: the server is shutting down or going to sleep", retry_after=RETRY
        )
