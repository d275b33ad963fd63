"""Building blocks of request and response bodies: strict types with the ranges that /openapi.json states."""

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model
from pydantic_core import PydanticCustomError

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


def _integral(value: Any) -> Any:
    """A float without a fraction as an int: JSON Schema, and some clients, make no difference."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


IntegralFloat = BeforeValidator(_integral)  # must be the last annotation, or the schema lacks the range
TokenId = Annotated[int, Field(ge=0, le=LARGEST_INT), IntegralFloat]


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
        return text | Annotated[list[text], Field(max_length=accepts.most)]
    if isinstance(accepts, TokenIds):
        least = 1 if accepts.optional else None  # without a bound, the schema states none
        return Annotated[list[TokenId], Field(min_length=least, max_length=accepts.most)]
    assert isinstance(accepts, TokenBiases)
    bias = Annotated[float, Field(ge=accepts.low, le=accepts.high)]
    token = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
    return Annotated[dict[token, bias], Field(max_length=accepts.most)]


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
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # no JSON, as a number of some thousand digits
        return short(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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
