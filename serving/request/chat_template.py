"""Chat prompts: a conversation in the model's chat template, or in a plain one for models without.

The server, `LLM` and the command line share it, so that a conversation has the same prompt in all of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from entropic_jax.models import ModelError, Tokenizer
from entropic_jax.models.chat_templates import check

from . import RequestError

# For models without a chat template. Base models know headings from prose, and read them as comments in code.
DEFAULT_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
### {{ message.role | capitalize }}
{{ message.content }}

{% endfor %}{% if add_generation_prompt %}
### Assistant
{% endif %}"""
RESERVED_VARIABLES = frozenset({"chat_template", "messages", "self"})
"""Arguments of the template call that a caller may not set."""


def check_template(template: str, name: str) -> None:
    """Raise RequestError, which names the argument `name`, for text that is no Jinja template."""
    try:
        check(template, name)
    except ModelError as error:
        raise RequestError(str(error)) from None


def set_template(tokenizer: Tokenizer, template: str | None = None) -> None:
    """Give a tokenizer the template stated, else keep its own; without either, DEFAULT_TEMPLATE."""
    tokenizer.chat_template = template or tokenizer.chat_template or DEFAULT_TEMPLATE


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any] | None = None,
    continue_last: bool = False,
    **stated: Any,
) -> str:
    """The prompt that the tokenizer's chat template makes of messages.

    Encode it with `special=False` and `rendered=True`.

    Args:
        tokenizer: with a template.
        messages: objects with `role` and `content`.
        variables: the caller's variables for the template.
        continue_last: end the prompt with the last message, for the model to continue it.
        **stated: variables that the caller's override.

    Raises:
        RequestError: The template refuses the messages, or a variable is reserved.
    """
    named = dict(variables or {})
    if reserved := sorted(RESERVED_VARIABLES & named.keys()):
        raise RequestError(
            f"chat_template_kwargs must not have the key {reserved[0]}", "chat_template_kwargs"
        )
    if continue_last:
        stated["add_generation_prompt"] = False
    try:
        text = tokenizer.chat(messages, **{**stated, **named})
    except ModelError as error:
        raise RequestError(str(error), "messages") from None
    return _up_to(text, str(tokenizer.escape(messages[-1].get("content", "")))) if continue_last else text


def _up_to(text: str, content: str) -> str:
    """The text up to the end of the last message's content."""
    content = content.rstrip()
    place = text.rfind(content)
    if place < 0:
        raise RequestError(
            "continue_final_message must be false for a chat template that changes the content of the last "
            "message; got true",
            "continue_final_message",
        )
    return text[: place + len(content)] if content else text.rstrip()
