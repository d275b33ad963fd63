"""Chat prompts: a conversation in the model's chat template, or in a plain one for models without.

The server, `LLM` and the command line share it, so that a conversation has the same prompt in all of them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from entropic_jax.models import ModelError, Tokenizer
from entropic_jax.models.chat_templates import DEFAULT, check
from entropic_jax.models.model import read_tokenizer
from entropic_jax.parameter_tables.table import check_unicode, short

from . import RequestError

# For models without a chat template. Base models know headings from prose, and read them as comments in code.
DEFAULT_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
### {{ message.role | capitalize }}
{{ message.content }}

{% endfor %}{% if add_generation_prompt %}
### Assistant
{% endif %}"""
RESERVED_VARIABLES = frozenset({"chat_template", "continue_final_message", "messages", "self"})
"""Arguments of the template call that a caller may not set."""


def check_template(template: str, name: str) -> None:
    """Raise RequestError, which names the argument `name`, for text that is no Jinja template."""
    try:
        check(template, name)
    except ModelError as error:
        raise RequestError(str(error)) from None


def named_template(model: Path, name: str) -> str | None:
    """The chat template that a model directory has by this name; None without, or if it cannot be read."""
    if not re.fullmatch(r"[\w-]+", name):
        return None
    try:
        tokenizer = read_tokenizer(model)
    except ModelError:  # loading the model says why
        return None
    if tokenizer is None:
        return None
    return tokenizer.chat_template if name == DEFAULT else tokenizer.named_templates.get(name)


def set_template(tokenizer: Tokenizer, template: str | None = None) -> None:
    """Give a tokenizer the template stated, which replaces all of its own; without any, DEFAULT_TEMPLATE."""
    if template:
        tokenizer.set_templates({DEFAULT: template})
    elif tokenizer.chat_template is None:
        tokenizer.chat_template = DEFAULT_TEMPLATE


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
        messages: see `template_message`.
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
    if not isinstance(prompted := named.get("add_generation_prompt", True), bool):
        message = (
            f"chat_template_kwargs must have true or false as add_generation_prompt; got {short(prompted)}"
        )
        raise RequestError(message, "chat_template_kwargs")
    if continue_last:
        stated["add_generation_prompt"] = False
    messages = [template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    values = {**stated, **named}
    check_tools(values.get("tools"), "chat_template_kwargs.tools" if "tools" in named else "tools")
    try:
        text = tokenizer.chat(messages, **values)
    except ModelError as error:
        raise RequestError(str(error), "messages") from None
    return _up_to(text, str(tokenizer.escape(messages[-1].get("content", "")))) if continue_last else text


def check_tools(tools: Any, name: str) -> None:
    """Raise RequestError, which names the argument `name`, unless tools are None or a list of mappings."""
    listed = isinstance(tools, Sequence) and not isinstance(tools, str | bytes | bytearray | memoryview)
    if tools is not None and not (listed and all(isinstance(tool, Mapping) for tool in tools)):
        raise RequestError(f"{name} must be a list of mappings; got {short(tools)}", name)


def template_message(message: Any, place: str) -> dict[str, Any]:
    """A message as templates expect it: its content is one text, and arguments of calls are objects.

    Args:
        message: a mapping with `role` and `content`, a text or a list of parts of text; None is an empty one,
            and an assistant's message with `tool_calls` may have none.
        place: where it stands in the argument, such as `messages[3]`, for errors.

    Raises:
        RequestError: For another message; it names the place.
    """
    calls = isinstance(message, Mapping) and message.get("role") == "assistant" and message.get("tool_calls")
    if not isinstance(message, Mapping) or "role" not in message or not ("content" in message or calls):
        raise RequestError(f"{place} must be a mapping with role and content; got {short(message)}", place)
    role, content = message["role"], message.get("content")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{place}.role must be a string; got {short(role)}", f"{place}.role")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        content = "".join(_text(part, f"{place}.content[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str | None):
        accepted = "a string or a list of parts"
        raise RequestError(f"{place}.content must be {accepted}; got {short(content)}", f"{place}.content")
    for field, text in (("role", role), ("content", content or "")):
        check_unicode(f"{place}.{field}", text)
    result = {**message, "content": content or ""}
    if (calls := message.get("tool_calls")) is not None:
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise RequestError(
                f"{place}.tool_calls must be a list; got {short(calls)}", f"{place}.tool_calls"
            )
        result["tool_calls"] = [_call(call) for call in calls]
    return result


def _text(part: Any, place: str) -> str:
    """The text of a part of a message."""
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        accepted = "{'type': 'text', 'text': …}"
        raise RequestError(f"{place} must be {accepted}; got {short(part)}", place)
    return part["text"]


def _call(call: Any) -> dict[str, Any]:
    """A call of a function with its arguments as an object; they may be the text of one in JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    stated = function.get("arguments") if isinstance(function, Mapping) else None
    arguments = stated or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(function, Mapping) or not isinstance(arguments, Mapping):
        message = f"messages must have tool_calls whose arguments are JSON objects; got {short(stated)}"
        raise RequestError(message, "messages")
    return {**call, "function": {**function, "arguments": arguments}}


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
