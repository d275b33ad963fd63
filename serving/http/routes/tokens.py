"""`/tokenize`, `/detokenize` and `/tokenizer_info`."""

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...request import RequestError
from ..frontend import Frontend, refusals
from ..protocol.tokens import (
    DetokenizeBody,
    Detokenized,
    TokenizeBody,
    TokenizeChatBody,
    Tokenized,
    TokenizerInfo,
)
from ..protocol.tools import shown_tools
from . import unknown_fields
from .errors import documented
from .preparation import size_of
from .rendering import answered


def router(frontend: Frontend) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["tokens"])
    model, most = frontend.model, frontend.settings.limits.tokenize

    def prompt_tokens(body: TokenizeBody | TokenizeChatBody) -> list[int]:
        if isinstance(body, TokenizeBody):
            check_length("prompt", body.prompt)
            return model.encode(body.prompt, body.add_special_tokens)
        text = _conversation(frontend, body)
        check_length("messages", text)
        return model.encode(text, body.add_special_tokens, rendered=True)

    def check_length(name: str, text: Sequence[Any]) -> None:
        unit = "characters" if isinstance(text, str) else "tokens"
        if len(text) > most:
            raise RequestError(f"{name} must have at most {most} {unit}; got {len(text)}", name)

    def tokenized(body: TokenizeBody | TokenizeChatBody) -> Response:
        tokens = prompt_tokens(body)
        name = model.tokenizer.backend.id_to_token
        return answered(
            {
                "count": len(tokens),
                "max_model_len": model.context,
                "tokens": tokens,
                "token_strs": [name(token) or "" for token in tokens] if body.return_token_strs else None,
            }
        )

    def detokenized(body: DetokenizeBody) -> Response:
        check_length("tokens", body.tokens)
        tokens = model.encode(body.tokens, name="tokens")
        return answered({"prompt": model.tokenizer.decode(tokens, False)})

    async def work(http: Request, function: Callable[[Any], Response], body: Any) -> Response:
        frontend.check_able()
        frontend.check_model(body.model)
        with refusals():
            response = await frontend.run_in(frontend.pools.for_text(size_of(http)), function, body)
        return await unknown_fields.warn(http, body, response)

    @routes.post(
        "/tokenize",
        summary="Text to tokens",
        response_model=Tokenized,
        responses=documented(400, 401, 404, 413, 429, 503),
    )
    async def tokenize(body: TokenizeBody | TokenizeChatBody, http: Request) -> Any:
        return await work(http, tokenized, body)

    @routes.post(
        "/detokenize",
        summary="Tokens to text",
        response_model=Detokenized,
        responses=documented(400, 401, 404, 413, 429, 503),
    )
    async def detokenize(body: DetokenizeBody, http: Request) -> Any:
        return await work(http, detokenized, body)

    @routes.get(
        "/tokenizer_info",
        summary="What the tokenizer was made with",
        response_model=TokenizerInfo,
        responses=documented(401),
    )
    async def tokenizer_info() -> Any:
        tokenizer = model.tokenizer
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.settings}
        for name in ("bos_token", "eos_token", "pad_token"):  # some directories give them as objects
            value = settings.get(name)
            settings[name] = value.get("content") if isinstance(value, dict) else value
        return answered({**settings, "chat_template": tokenizer.chat_template})

    return routes


def _conversation(frontend: Frontend, body: TokenizeChatBody) -> str:
    """The prompt that the chat template makes of a conversation. Raises RequestError."""
    messages, tools = frontend.tool_calling.messages(body.messages, shown_tools(body.tools) or None)
    return frontend.model.chat(
        messages,
        tools=tools,
        documents=body.documents,
        continue_last=body.continue_final_message,
        variables=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
    )
