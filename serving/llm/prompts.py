"""Input normalisation for `LLM`: single prompt or batch, text or token ids."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

from entropic_jax.models import Tokenizer
from entropic_jax.models.tokenizer import MARK
from entropic_jax.parameter_tables.table import short

from ..request import RequestError, chat_template

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
BYTES = bytes | bytearray | memoryview  # sequences of integers, which are not token ids
PROMPTS = "a string, a list of token ids, a mapping with prompt or prompt_token_ids, or a list of these"
CONVERSATIONS = "a list of mappings with role and content, or a list of such lists"


class TokenizedPrompt(NamedTuple):
    """A prompt as the engine takes it, and its text where there was one."""

    text: str | None
    token_ids: tuple[int, ...]


def prompts_of(value: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts in an argument that is one or many; an empty sequence holds none.

    >>> prompts_of("a"), prompts_of([1, 2]), prompts_of(["a", [1, 2]])
    (['a'], [[1, 2]], ['a', [1, 2]])
    """
    if isinstance(value, str | Mapping) or _all(value, Integral):
        return [value]  # type: ignore[list-item]
    return _listed("prompts", PROMPTS, value)


def conversations_of(value: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """The conversations in an argument that is one list of messages or many."""
    if _all(value, Mapping):
        return [value]  # type: ignore[list-item]
    return _listed("messages", CONVERSATIONS, value)


def tokenize(prompt: Prompt, encode: Callable[[str | Sequence[int]], tuple[int, ...]]) -> TokenizedPrompt:
    """A prompt as token ids, by the engine's `encode`, which checks them. Raises RequestError."""
    if isinstance(prompt, Mapping):
        keys = {"prompt", "prompt_token_ids"} & prompt.keys()
        if len(keys) != 1:
            raise RequestError(f"the keys must be prompt or prompt_token_ids; got {sorted(prompt)}")
        prompt = prompt[keys.pop()]
    if isinstance(prompt, str):
        return TokenizedPrompt(prompt, encode(prompt))
    return TokenizedPrompt(None, encode(_token_ids(prompt)))


def tokenize_conversation(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    variables: Mapping[str, Any] | None = None,
    continue_last: bool = False,
    **stated: Any,
) -> TokenizedPrompt:
    """A conversation in the model's chat template.

    Args:
        messages: With `role` and `content` each.
        tokenizer: The tokenizer of the model, with a template.
        variables: The caller's variables of the template.
        continue_last: End the prompt with the last message.
        **stated: Other variables of the template.

    Raises:
        RequestError: For messages of another form, or that the template refuses.
    """
    if not _all(messages, Mapping) or not all({"role", "content"} <= message.keys() for message in messages):
        raise RequestError(f"it must be a list of mappings with role and content; got {short(messages)}")
    if not isinstance(variables, Mapping | None):
        message = f"chat_template_kwargs must be a mapping; got {short(variables)}"
        raise RequestError(message, "chat_template_kwargs")
    if (tools := stated.get("tools")) is not None and not _all(tools, Mapping):
        raise RequestError(f"tools must be a list of mappings; got {short(tools)}", "tools")
    for content in (message["content"] for message in messages):
        if not isinstance(content, str | Sequence | None):
            raise RequestError(f"content must be a string or a list of parts; got {short(content)}")
    text = chat_template.render(tokenizer, messages, variables, continue_last, **stated)
    tokens = tuple(tokenizer.encode(text, special=False, rendered=True))
    return TokenizedPrompt(text.replace(MARK, ""), tokens)


def at(place: str, check: Callable[[Any], TokenizedPrompt], item: Any) -> TokenizedPrompt:
    """The checked item; an error names its place in the argument.

    Args:
        place: The place of the item in the argument, such as `prompts[3]`.
        check: Makes a prompt of an item, or raises RequestError.
        item: The item to check.
    """
    try:
        return check(item)
    except RequestError as error:
        if error.param in ("chat_template_kwargs", "tools"):  # of all items
            raise
        raise RequestError(f"{place}: {error}", place) from None


def _token_ids(value: Any) -> list[int]:
    """Token ids as Python's integers; NumPy's are accepted."""
    ids = list(value) if isinstance(value, Iterable) and not isinstance(value, BYTES) else [None]
    if all(isinstance(x, Integral) and not isinstance(x, bool) and int(x) >= 0 for x in ids):
        return [int(x) for x in ids]
    raise RequestError(f"a prompt must be a string or a list of token ids; got {short(value)}")


def _all(value: Any, kind: Any) -> bool:
    """Whether the value is a sequence of such items, and not empty."""
    if not isinstance(value, Sequence) or isinstance(value, BYTES):
        return False
    return len(value) > 0 and all(isinstance(x, kind) for x in value)


def _listed(name: str, accepted: str, value: Any) -> list[Any]:
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping | BYTES):
        return list(value)
    raise RequestError(f"{name} must be {accepted}; got {short(value)}", name)
