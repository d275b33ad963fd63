"""`/tokenize`, `/detokenize` and `/tokenizer_info`."""

import asyncio
from typing import Any

from fastapi import APIRouter

from ..frontend import Frontend, refusals
from ..protocol.tokens import (
    DetokenizeBody,
    Detokenized,
    TokenizeBody,
    TokenizeChatBody,
    Tokenized,
    TokenizerInfo,
)
from .errors import documented
from .generation import answered


def router(frontend: Frontend) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["tokens"])
    model = frontend.model

    def prompt_tokens(body: TokenizeBody | TokenizeChatBody) -> list[int]:
        if isinstance(body, TokenizeBody):
            return model.encode(body.prompt, body.add_special_tokens)
        text = model.chat(
            [message.for_template() for message in body.messages],
            continue_last=body.continue_final_message,
            variables=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
        )
        return model.encode(text, body.add_special_tokens)

    @routes.post(
        "/tokenize",
        summary="Text to tokens",
        response_model=Tokenized,
        responses=documented(400, 401, 404, 413),
    )
    async def tokenize(body: TokenizeBody | TokenizeChatBody) -> Any:
        frontend.check_model(body.model)
        with refusals():
            tokens = await asyncio.to_thread(prompt_tokens, body)
        strings = [model.tokenizer.backend.id_to_token(token) or "" for token in tokens]
        return answered(
            {
                "count": len(tokens),
                "max_model_len": model.context,
                "tokens": tokens,
                "token_strs": strings if body.return_token_strs else None,
            }
        )

    @routes.post(
        "/detokenize",
        summary="Tokens to text",
        response_model=Detokenized,
        responses=documented(400, 401, 404, 413),
    )
    async def detokenize(body: DetokenizeBody) -> Any:
        frontend.check_model(body.model)
        with refusals():
            tokens = model.encode(body.tokens, name="tokens")
        text = await asyncio.to_thread(model.tokenizer.decode, tokens, False)
        return answered({"prompt": text})

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
