"""Building blocks of request and response bodies: strict types with the ranges that /openapi.json states."""

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model
from pydantic_core import PydanticCustomError, PydanticKnownError

from entropic_jax.parameter_tables.table import (
    LARGEST_INT,
    Choice,
    Flag,
    Number,
    Parameter,
    Strings,
    TokenBiases,
    TokenIds,
    short,
)

ENCODER = json.JSONEncoder(ensure_ascii=False)


def _integral(value: Any) -> Any:
    """A float without a fraction as an int: JSON Schema, and some clients, make no difference."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


IntegralFloat = BeforeValidator(_integral)  # must be the last annotation, or the schema lacks the range
TokenId = Annotated[int, Field(ge=0, le=LARGEST_INT)]
Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list of a body, of which the first wrong item is reported: an error for each might be millions."""


def token_ids(least: int | None = None, most: int | None = None) -> Any:
    """The type of a list of token ids, which a body may have millions of.

    Args:
        least: the smallest length of a list, if there is one.
        most: the largest length of a list, if there is one.
    """

    def integral(value: Any) -> Any:
        """Like `_integral`, which would be a call for every item, also where none is a float."""
        if isinstance(value, list) and float in set(map(type, value)):
            return [_integral(item) for item in value]
        return value

    length = Field(min_length=least, max_length=most)
    return Annotated[Items[TokenId], length, BeforeValidator(integral)]


MOST_PARTS = 16384


def _bounded_parts(messages: Any) -> Any:
    """The messages as they are. Raises ValueError where the lists in them have too many objects.

    Each becomes an object of Python, which takes much longer than to read it, and other requests wait.
    """
    count, level = 0, messages if isinstance(messages, list) else []
    while level:
        values = itertools.chain.from_iterable(item.values() for item in level if isinstance(item, dict))
        lists = [value for value in values if isinstance(value, list)]
        level = [item for item in itertools.chain.from_iterable(lists) if isinstance(item, dict)]
        count += len(level)
        if count > MOST_PARTS:
            raise ValueError(f"must have at most {MOST_PARTS} parts and calls in all its messages")
    return messages


BoundedParts = BeforeValidator(_bounded_parts)  # like `IntegralFloat`, the last annotation


def at_most(most: int) -> BeforeValidator:
    """A check of an object's length before that of its items. Like `IntegralFloat`, the last annotation."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            context = {"field_type": "Dictionary", "max_length": most, "actual_length": len(value)}
            raise PydanticKnownError("too_long", context)
        return value

    return BeforeValidator(check)


def annotation(accepts: Any) -> Any:
    """The Pydantic type of the values that a parameter of a table accepts."""
    if isinstance(accepts, Number):
        low = {"gt" if accepts.above_low else "ge": accepts.low}
        high = {"lt" if accepts.below_high else "le": accepts.high}
        bounds = Field(**low, **high)  # type: ignore[no-matching-overload]
        value = Annotated[int, bounds, IntegralFloat] if accepts.kind is int else Annotated[float, bounds]
        return value | Literal["auto"] if accepts.auto else value
    if isinstance(accepts, Flag):
        return bool
    if isinstance(accepts, Choice):
        literal: Any = Literal
        return literal[accepts.names]
    if isinstance(accepts, Strings):
        text = Annotated[str, Field(min_length=1, max_length=accepts.length)]
        return text | Annotated[Items[text], Field(max_length=accepts.most)]
    if isinstance(accepts, TokenIds):
        least = 1 if accepts.optional else None  # without a bound, the schema states none
        return token_ids(least, accepts.most)
    assert isinstance(accepts, TokenBiases)
    bias = Annotated[float, Field(ge=accepts.low, le=accepts.high)]
    token = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
    return Annotated[dict[token, bias], Field(max_length=accepts.most), at_most(accepts.most)]


COUNT = Number(int, 0, LARGEST_INT)
NUMBERS = {
    "max_tokens": COUNT,  # of HTTP, which accepts 0 as well
    "max_completion_tokens": COUNT,
    "truncate_prompt_tokens": Number(int, 1, LARGEST_INT),
    "best_of": Number(int, 1, 128),
    "priority": Number(int, -(2**31), LARGEST_INT),
    "deadline": Number(float, 0, 86400, above_low=True),
}
"""Fields that only the HTTP API has, by name; errors state them as they do the fields of a table."""
Count, Positive, Choices, Priority, Seconds = (
    annotation(NUMBERS[name])
    for name in ("max_tokens", "truncate_prompt_tokens", "best_of", "priority", "deadline")
)


Order = Literal["asc", "desc"]  # of a list, by time


def optional_fields(name: str, lines: Iterable[Parameter]) -> Any:
    """A body with an optional field for each of some lines of a table; null is as if it were missing."""
    fields: dict[str, Any] = {}
    for line in lines:
        text = f"{line.help} ({line.unit})" if line.unit else line.help
        fields[line.name] = (annotation(line.accepts) | None, Field(None, description=text))
    return create_model(name, __base__=Body, **fields)


class Body(BaseModel):
    """A body from a client: types are not coerced; unknown fields are ignored."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=()
    )


def unicode(body: Any) -> Any:
    """The body as it is. Raises ValueError where a text in it holds a lone surrogate, or it is too deep."""
    try:
        pydantic_core.to_json(body)
    except pydantic_core.PydanticSerializationError as error:
        if "surrogates" in str(error):
            raise ValueError("the body must be Unicode; got a lone surrogate") from None
        raise ValueError("the body must not be nested as deeply; got hundreds of levels") from None
    return body


def in_json(value: Any) -> str:
    """A value of a body as the client wrote it, cut to 60 characters.

    >>> in_json([True, None, "é"])
    '[true, null, "é"]'
    """
    text = ""
    try:
        for piece in ENCODER.iterencode(value):  # lazily: a body may be millions of values
            text += piece
            if len(text) > 60:
                return f"{text[:57]}..."
    except (TypeError, ValueError, RecursionError):  # no JSON, as a number of some thousand digits
        return short(value)
    return text


def conflict(param: str, message: str) -> PydanticCustomError:
    """The error of a validator that compares several fields; `param` is the one to blame."""
    return PydanticCustomError("conflict", "{message}", {"message": message, "param": param})


class Answer(BaseModel):
    """A response body; its subclasses describe in /openapi.json what the routes write."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow", protected_namespaces=())


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Usage(Answer):
    """Numbers of tokens."""

    class Details(Answer):
        """How many tokens of the prompt the prefix cache supplied."""

        cached_tokens: int

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Details | None = None


def usage(prompt: int, completion: int, cached: int) -> Mapping[str, Any]:
    """The `usage` object of an answer.

    Args:
        prompt: tokens of the prompt.
        completion: tokens generated.
        cached: tokens of the prompt that the prefix cache supplied, at most `prompt`.
    """
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
