"""Forms of structured outputs (schemas, expressions, choices, grammars), written as llguidance reads them."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import llguidance

from entropic_jax.parameter_tables.structured_outputs import StructuredOutputsParams

from ..request import RequestError

# Allowed between the parts of JSON unless a schema says otherwise (`x-guidance`): a line break and indent.
# Without a bound, some models write line breaks until max_tokens.
WHITESPACE = r"\n? {0,16}"


class Constraint(NamedTuple):
    """A constraint on the text, and the field that states it."""

    name: str  # the field of the request that states it, for errors
    grammar: str  # in the serialized form of llguidance
    markers: tuple[str, ...] = ()  # a text that is free stays so until it comes to one of these
    fields: tuple[str, ...] = ()  # that state the schemas in the grammar, in its order; () for that one field


def refused(name: str, message: str) -> RequestError:
    """The error for a field that holds no usable grammar; `name` is its path in the body."""
    return RequestError(f"{name} {message}", name)


def constraint_of(stated: StructuredOutputsParams, name_of: Callable[[str], str]) -> Constraint:
    """The grammar of structured outputs.

    Args:
        stated: the constraint.
        name_of: the name that a user has for a field of it, for errors.

    Raises:
        RequestError: It is no schema, or no grammar in a known form.
    """
    if stated.json is not None:
        name = name_of("json")
        return Constraint(name, from_schema(name, stated.json))
    if stated.regex is not None:
        return Constraint(name_of("regex"), from_regex(stated.regex))
    if stated.choice is not None:
        return Constraint(name_of("choice"), from_choices(stated.choice))
    if stated.grammar is not None:
        name = name_of("grammar")
        return Constraint(name, from_text(name, stated.grammar))
    name = name_of("json_object")
    return Constraint(name, any_object(name))


def from_schema(name: str, schema: Mapping[str, Any] | bool | str) -> str:
    """The grammar of JSON that satisfies a schema."""
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            schema if isinstance(schema, str) else json.dumps(schema),
            defaults={"whitespace_pattern": WHITESPACE},
        )
    except ValueError as error:
        raise refused(name, f"must be a JSON schema: {error}") from None


def any_object(name: str) -> str:
    """The grammar of a JSON object; `name` is the field that asks for one."""
    return from_schema(name, {"type": "object"})


def from_regex(regex: str) -> str:
    """The grammar of texts that match a regular expression from beginning to end."""
    return llguidance.LLMatcher.grammar_from_regex(regex)


def from_choices(choices: Sequence[str]) -> str:
    """The grammar of one of several texts."""
    return llguidance.LLMatcher.grammar_from_lark(
        "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    )


def from_text(name: str, grammar: str) -> str:
    """The grammar that is written in Lark's or GBNF's form; `name` is the field that holds it."""
    gbnf = "::=" in grammar
    try:
        lark = llguidance.gbnf_to_lark.gbnf_to_lark(grammar) if gbnf else grammar
    except Exception as error:  # the converter raises errors of many types
        raise refused(name, f"must be in Lark's or GBNF's form: {error}") from None
    return llguidance.LLMatcher.grammar_from_lark(lark)
