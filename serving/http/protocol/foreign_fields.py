"""Fields of other servers that constrain a text and do not exist in an API of this one: refused by name."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .fields import conflict, in_json


class Foreign(NamedTuple):
    """A field that is not honoured. Null and what stands for nothing are as if it were missing."""

    must: str  # what to do instead, to follow "must"
    harmless: tuple[Any, ...] = ()  # values that ask for nothing


def given_as(name: str, *harmless: Any) -> Foreign:
    """A field with another name here.

    Args:
        name: the field to use in its place.
        *harmless: values that ask for nothing.
    """
    return Foreign(f"be given as {name}", harmless)


NOT_BUILT = {
    "stop_regex": Foreign("be null, since only strings end a text"),
    "logits_processors": Foreign("be null, since the server runs no code of clients", ([],)),
    "thinking_token_budget": Foreign("be null, since thoughts have no limit of their own"),
    "modalities": Foreign('be null or ["text"]', (["text"], [])),
    "audio": Foreign("be null, since the server writes text only"),
}
LIMITS = (
    "max_new_tokens",
    "n_predict",
    "max_tokens_to_sample",
)  # names that other servers have for max_tokens
GRAMMARS = {
    "regex": "structured_outputs.regex",  # SGLang
    "ebnf": "structured_outputs.grammar",
    "grammar": "structured_outputs.grammar",  # llama.cpp
    "json_schema": "structured_outputs.json",
}
WHITESPACE = "x-guidance.whitespace_pattern of the JSON schema"
OF_SAMPLING = {
    **NOT_BUILT,
    **{name: given_as(place) for name, place in GRAMMARS.items()},
    **{name: given_as("max_tokens") for name in (*LIMITS, "max_output_tokens")},
    "structural_tag": given_as("tools or structured_outputs.grammar"),
    "guided_whitespace_pattern": given_as(WHITESPACE),
    "structured_outputs.whitespace_pattern": given_as(WHITESPACE),
    "structured_outputs.disable_any_whitespace": given_as(WHITESPACE, False),
    "structured_outputs.disable_additional_properties": given_as(
        "additionalProperties of the JSON schema", False
    ),
    "structured_outputs.structural_tag": given_as("tools or structured_outputs.grammar"),
    "stop_sequences": given_as("stop", []),
}
OF_COMPLETIONS = {**OF_SAMPLING, "max_completion_tokens": given_as("max_tokens")}
OF_CHAT = {
    **OF_SAMPLING,
    "functions": given_as("tools", []),
    "function_call": given_as("tool_choice"),
}


def _of_api(limit: str, form: str) -> dict[str, Foreign]:
    """The fields of others in an API whose only constraint of the text is a JSON schema.

    Args:
        limit: its name for the most tokens of a text.
        form: the field that states a schema.
    """
    by_schema = {name: given_as(form) for name in ("response_format", "guided_json", "json_schema")}
    elsewhere = Foreign("be sent to /v1/chat/completions, as structured_outputs")
    grammars = ("structured_outputs", "structural_tag", "guided_regex", "guided_choice", "guided_grammar")
    return {
        **NOT_BUILT,
        **dict.fromkeys((*GRAMMARS, *grammars), elsewhere),
        **by_schema,
        **{name: given_as(limit) for name in (*LIMITS, "max_completion_tokens")},
        "guided_whitespace_pattern": given_as(WHITESPACE),
        "functions": given_as("tools", []),
        "function_call": given_as("tool_choice"),
        "n": Foreign("be null or 1, since an answer is one text", (1,)),
    }


OF_MESSAGES = {
    **_of_api("max_tokens", "output_config.format"),
    "output_format": given_as("output_config.format"),
    "max_output_tokens": given_as("max_tokens"),
    "stop": given_as("stop_sequences", []),
}
OF_RESPONSES = {
    **_of_api("max_output_tokens", "text.format"),
    "max_tokens": given_as("max_output_tokens"),
    "stop_sequences": given_as("stop", []),
}
IGNORED = {
    "guided_decoding_backend": "llguidance compiles every grammar",
    "reasoning_effort": "chat_template_kwargs holds the variables of the template",
}
"""Fields that change no text here, and why; a warning names them."""


def refusing(table: Mapping[str, Foreign]) -> Callable[[Any], Any]:
    """A validator of a body, before its fields are, that refuses the fields of a table.

    Args:
        table: what each field must be instead, by its dotted path.
    """

    def check(body: Any) -> Any:
        if not isinstance(body, Mapping):
            return body
        for path, foreign in table.items():
            place, _, name = path.rpartition(".")
            holder = body.get(place) if place else body
            value = holder.get(name) if isinstance(holder, Mapping) else None
            if value is not None and not any(_same(value, harmless) for harmless in foreign.harmless):
                raise conflict(path, f"{path} must {foreign.must}; got {in_json(value)}")
        return body

    return check


def _same(value: Any, other: Any) -> bool:
    """Whether two values are equal as JSON, where 1 is not true."""
    return type(value) is type(other) and value == other
