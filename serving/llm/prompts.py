"""Input normalisation for `LLM`: single prompt or batch, text or token ids."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

from entropic_jax.models import Tokenizer
from entropic_jax.models.tokenizer import MARK
from entropic_jax.parameter_tables.table import ParameterError, check_unicode, short

from ..request import RequestError, chat_template

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
BYTES = bytes | bytearray | memoryview  # sequences of integers, which are not token ids
PROMPTS = "a string, a list of token ids, a mapping with prompt or prompt_token_ids, or a list of these"
FLAGS = ("add_generation_prompt", "continue_final_message")
OF_ALL = ("chat_template_kwargs", "chat_template_kwargs.tools", "tools", *FLAGS)  # arguments for all items
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


def conversations_of(
    value: Sequence[Message] | Sequence[Sequence[Message]],
) -> dict[str, Sequence[Message]]:
    """The conversations in an argument that is one list of messages or many, by their place in it.

    Raises:
        RequestError: For a conversation without a message, or another message than
            `chat_template.template_message` takes; it names the message.

    >>> hello = {"role": "user", "content": "hello"}
    >>> list(conversations_of([hello])), list(conversations_of([[hello], [hello]]))
    (['messages'], ['messages[0]', 'messages[1]'])
    """
    items = _listed("messages", CONVERSATIONS, value)
    single = any(isinstance(item, Mapping) for item in items)
    many = {f"messages[{i}]": x for i, x in enumerate(items)}
    conversations: dict[str, Sequence[Message]] = {"messages": items} if single else many
    for place, messages in conversations.items():
        if not isinstance(messages, Sequence) or isinstance(messages, str | BYTES):
            raise RequestError(f"{place} must be a list of messages; got {short(messages)}", place)
        if not messages:
            raise RequestError(f"{place} must have at least one message; got {short(messages)}", place)
        for i, message in enumerate(messages):
            chat_template.template_message(message, f"{place}[{i}]")
    return conversations


def tokenize(prompt: Prompt, encode: Callable[[str | Sequence[int]], tuple[int, ...]]) -> TokenizedPrompt:
    """A prompt as token ids, by the engine's `encode`, which checks them. Raises RequestError."""
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            raise RequestError(f"the keys must be prompt or prompt_token_ids; got {list(prompt)}")
        ((name, prompt),) = prompt.items()
        if name == "prompt_token_ids" and isinstance(prompt, str):
            raise RequestError(f"{name} must be a list of token ids; got {short(prompt)}")
    if isinstance(prompt, str):
        check_unicode("a prompt", prompt)
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
        messages: as in `conversations_of`.
        tokenizer: the tokenizer of the model, with a template.
        variables: the caller's variables of the template.
        continue_last: end the prompt with the last message.
        **stated: other variables of the template.

    Raises:
        RequestError: For messages that the template refuses, or variables of another form.
    """
    if variables is not None and not (isinstance(variables, Mapping) and _all([*variables, ""], str)):
        message = f"chat_template_kwargs must be a mapping of names; got {short(variables)}"
        raise RequestError(message, "chat_template_kwargs")
    for name, value in zip(FLAGS, (stated.get(FLAGS[0], True), continue_last), strict=True):
        if not isinstance(value, bool):
            raise RequestError(f"{name} must be true or false; got {short(value)}", name)
    text = chat_template.render(tokenizer, messages, variables, continue_last, **stated)
    check_unicode("messages", text)
    tokens = tuple(tokenizer.encode(text, special=False, rendered=True))
    return TokenizedPrompt(text.replace(MARK, ""), tokens)


def at(place: str, check: Callable[[Any], TokenizedPrompt], item: Any) -> TokenizedPrompt:
    """The checked item; an error names its place in the argument.

    Args:
        place: the place of the item in the argument, such as `prompts[3]`.
        check: makes a prompt of an item, or raises ParameterError.
        item: the item to check.
    """
    try:
        return check(item)
    except ParameterError as error:
        if error.param in OF_ALL:
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
