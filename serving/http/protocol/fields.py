"""What the bodies are made of: strict types with the ranges that /openapi.json then states."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

TOKENS = 2**31 - 1  # most of anything that is counted in tokens


def _whole(value: Any) -> Any:
    """A float without a fraction is an integer in JSON Schema, and to some clients."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = BeforeValidator(_whole)  # the last of the annotations, or the range is not in the document
Count = Annotated[int, Field(ge=0, le=TOKENS), Whole]
Positive = Annotated[int, Field(ge=1, le=TOKENS), Whole]
Choices = Annotated[int, Field(ge=1, le=128), Whole]
Alternatives = Annotated[int, Field(ge=0, le=20), Whole]
TokenId = Annotated[int, Field(ge=0, le=TOKENS), Whole]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), Whole]
Priority = Annotated[int, Field(ge=-(2**31), le=2**31 - 1), Whole]
Seconds = Annotated[float, Field(gt=0, le=86400)]
Share = Annotated[float, Field(ge=0, le=1)]
ShareAboveZero = Annotated[float, Field(gt=0, le=1)]
Temperature = Annotated[float, Field(ge=0, le=1000)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Repetition = Annotated[float, Field(gt=0, le=1000)]
TopK = Annotated[int, Field(ge=-1, le=TOKENS), Whole]  # -1 and 0 are off
Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = Annotated[list[StopString], Field(max_length=64)]


class Body(BaseModel):
    """A body from a client: types are not bent into shape, and fields that nobody knows are left alone."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=()
    )


def unicode(body: Any) -> Any:
    """The body as it is, unless a text in it holds half of a surrogate pair, which no encoding knows."""
    try:
        pydantic_core.to_json(body)
    except pydantic_core.PydanticSerializationError:
        raise ValueError("the body holds half of a surrogate pair; accepted is Unicode") from None
    return body


class Answer(BaseModel):
    """A body from here; its classes describe in /openapi.json what the routes write."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow", protected_namespaces=())


class StreamOptions(Body):
    """What a stream carries besides its text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Usage(Answer):
    """Tokens read and written."""

    class Details(Answer):
        """Where the tokens of a prompt came from."""

        cached_tokens: int

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Details | None = None


def usage(prompt: int, completion: int, cached: int) -> Mapping[str, Any]:
    """The object that every answer ends with."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
