"""The fields that completions and chat share: how to sample, when to stop, and what a text must be."""

import secrets
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from .entropic import Entropic
from .fields import (
    Bias,
    Body,
    Choices,
    Count,
    Penalty,
    Positive,
    Priority,
    Repetition,
    Seconds,
    Seed,
    Share,
    ShareAboveZero,
    Stops,
    StopString,
    StreamOptions,
    Temperature,
    TokenId,
    TopK,
    unicode,
)


class NamedSchema(Body):
    """A named JSON schema."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Body):
    """A JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Body):
    """JSON after a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """vLLM's constraints, one at a time."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema")
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = Field(None, description="in Lark's or GBNF's form")
    json_object: bool | None = None


GUIDED = ("json", "regex", "choice", "grammar")


class SamplingBody(Body):
    """What completions and chat have in common. A field that is missing or null has the model's default."""

    model: str | None = Field(None, description="one of those that /v1/models lists")
    n: Choices | None = Field(None, description="texts for each prompt")
    temperature: Temperature | None = Field(None, description="0 is greedy")
    top_p: ShareAboveZero | None = None
    top_k: TopK | None = Field(None, description="-1 and 0 are off")
    min_p: Share | None = None
    typical_p: ShareAboveZero | None = None
    top_n_sigma: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        None, description="keeps tokens within so many standard deviations of the largest logit; 0 is off"
    )
    repetition_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Bias] | None = Field(
        None, max_length=300, description="from token ids to what is added to their logits"
    )
    seed: Seed | None = None
    stop: StopString | Stops | None = Field(None, description="the text ends before the first of these")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=16)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    max_tokens: Count | None = Field(None, description="0 computes the prompt alone")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    truncate_prompt_tokens: Positive | None = Field(
        None, description="keep this many tokens of the prompt's end"
    )
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: Priority | None = Field(None, description="a smaller number goes first")
    deadline: Seconds | None = Field(None, description="seconds in which it should be done; urgency rises")
    user: str | None = None
    request_id: str | None = Field(None, max_length=128)
    entropic: Entropic | None = None

    _unicode = model_validator(mode="before")(unicode)

    @model_validator(mode="before")
    @classmethod
    def _older(cls, body: Any) -> Any:
        """What vLLM called `guided_json` and the like is taken as `structured_outputs`, never left alone."""
        if not isinstance(body, dict):
            return body
        given = {name: body[f"guided_{name}"] for name in GUIDED if body.get(f"guided_{name}") is not None}
        if given and body.get("structured_outputs") is not None:
            raise ValueError("structured_outputs stands beside guided_* fields; accepted is one of the two")
        return {**body, "structured_outputs": given} if given else body

    @model_validator(mode="after")
    def _agree(self) -> Self:
        formats = [self.response_format is not None and self.response_format.type != "text"]
        if self.structured_outputs is not None:
            given = self.structured_outputs
            formats += [v is not None and v is not False for _, v in given]
        if sum(formats) > 1:
            raise ValueError(
                "response_format and structured_outputs constrain the text more than once; accepted is one"
            )
        return self

    @property
    def choices(self) -> int:
        """How many texts are asked for."""
        return self.n or 1

    def first_seed(self) -> int:
        """The seed of the first text; drawn anew where the request has none."""
        return secrets.randbelow(2**31) if self.seed is None else self.seed % 2**31

    def sampling(self, defaults: dict[str, Any]) -> dict[str, Any]:
        """The fields of `request.Request`, with `defaults` for those that are not given."""
        names = (
            "temperature",
            "top_p",
            "min_p",
            "typical_p",
            "top_n_sigma",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "ignore_eos",
            "min_tokens",
            "top_k",
        )
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        fields = {**defaults, **given}
        if "top_k" in fields:
            fields["top_k"] = max(fields["top_k"], 0)
        fields["logit_bias"] = {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        fields["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        fields["stop_token_ids"] = tuple(self.stop_token_ids or ())
        fields["include_stop"] = bool(self.include_stop_str_in_output)
        return fields
