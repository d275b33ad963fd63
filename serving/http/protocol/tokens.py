"""`/tokenize`, `/detokenize`, `/tokenizer_info`: text to tokens and back, as vLLM names them."""

from typing import Any

from pydantic import model_validator

from .chat import Documents, Messages
from .fields import Answer, Body, conflict, token_ids, unicode
from .tools import Tools

Tokens: Any = token_ids()


def either(body: Any) -> Any:
    """The body as it is. Raises a conflict where it has a prompt and messages."""
    if isinstance(body, dict) and body.get("prompt") is not None and body.get("messages") is not None:
        raise conflict("messages", "messages must not be combined with prompt; got both")
    return body


class TokenizeBody(Body):
    """A text to cut into tokens."""

    _unicode = model_validator(mode="before")(unicode)
    _either = model_validator(mode="before")(either)

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatBody(Body):
    """A conversation to cut into tokens, after the model's template."""

    _unicode = model_validator(mode="before")(unicode)
    _either = model_validator(mode="before")(either)

    model: str | None = None
    messages: Messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    return_token_strs: bool | None = False
    chat_template: None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    documents: Documents | None = None


class Tokenized(Answer):
    """The tokens, and how many of them the model takes at most."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(Body):
    """Tokens to turn into text."""

    model: str | None = None
    tokens: Tokens


class Detokenized(Answer):
    """Their text, special tokens included."""

    prompt: str


class TokenizerInfo(Answer):
    """The model's tokenizer_config.json, the chat template included."""

    tokenizer_class: str
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
