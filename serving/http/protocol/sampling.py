"""Request fields that completions and chat share: sampling, stop conditions, structured output."""

import secrets
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from entropic_jax.parameter_tables.sampling_params import DEVICE, ENGINE, HOST, PARAMETERS, normal_seed
from entropic_jax.parameter_tables.structured_outputs import StructuredOutputsParams

from ..log import REQUEST_ID
from .entropic import Entropic
from .fields import (
    Body,
    Count,
    Items,
    Positive,
    Priority,
    Seconds,
    StreamOptions,
    annotation,
    conflict,
    optional_fields,
    unicode,
)

FIELDS = tuple(line for line in PARAMETERS.values() if line.scope in (DEVICE, HOST, ENGINE))
Alternatives = annotation(PARAMETERS["logprobs"].accepts)
Sequences: Any = annotation(PARAMETERS["n"].accepts)
SamplingFields: Any = optional_fields("SamplingFields", FIELDS)


def _boolean(value: Any) -> Any:
    """The value, unless it only equals a boolean, as 0 does."""
    if not isinstance(value, bool):
        raise ValueError("must be false")
    return value


No = Annotated[Literal[False], BeforeValidator(_boolean)]


class NamedSchema(Body):
    """A JSON schema with a name."""

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
    """JSON that satisfies a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """vLLM's constraints, of which one may be set."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema")
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[Items[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="a grammar in Lark's or GBNF's form"
    )
    json_object: bool | None = None

    @property
    def params(self) -> StructuredOutputsParams:
        """The constraint, of which there is one."""
        return StructuredOutputsParams(**{name.rstrip("_"): value for name, value in self})


GUIDED = ("json", "regex", "choice", "grammar")


class SamplingBody(SamplingFields):
    """The fields of completions and chat alike. A field that is missing or null has the model's default."""

    model: str | None = Field(None, description="a model that /v1/models lists")
    n: Sequences | None = Field(None, description=PARAMETERS["n"].help)
    max_tokens: Count | None = Field(
        None, description=f"{PARAMETERS['max_tokens'].help}; 0 computes the prompt alone (tokens)"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    truncate_prompt_tokens: Positive | None = Field(
        None, description="keep only this many tokens at the end of the prompt"
    )
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: Priority | None = Field(None, description="smaller numbers are scheduled first")
    deadline: Seconds | None = Field(
        None, description="seconds after which the answer is late; urgency rises until then"
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="only requests with the same one share cached prefixes"
    )
    use_beam_search: No | None = Field(None, description="no beam search is built")
    user: str | None = None
    request_id: str | None = Field(None, pattern=f"^{REQUEST_ID}$")
    entropic: Entropic | None = None
    _guided: bool = PrivateAttr(False)  # `structured_outputs` was sent as a `guided_*` field

    _unicode = model_validator(mode="before")(unicode)

    @model_validator(mode="wrap")
    @classmethod
    def _older(cls, body: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Rewrite vLLM's older `guided_json` and the like as `structured_outputs`."""
        if not isinstance(body, dict):
            return handler(body)
        guided = {name: body[f"guided_{name}"] for name in GUIDED if body.get(f"guided_{name}") is not None}
        if not guided:
            return handler(body)
        name, form = f"guided_{next(iter(guided))}", body.get("response_format")
        if body.get("structured_outputs") is not None:
            message = "structured_outputs must not be combined with guided_* fields; got both"
            raise conflict("structured_outputs", message)
        if len(guided) > 1:
            fields = " and ".join(f"guided_{other}" for other in guided)
            raise conflict(name, f"{name} must be the only guided_* field; got {fields}")
        if form is not None and form != {"type": "text"}:
            raise conflict(name, f"{name} must not be combined with response_format; got both")
        result = handler({**body, "structured_outputs": guided})
        result._guided = True
        return result

    @model_validator(mode="after")
    def _agree(self) -> Self:
        formats = [self.response_format is not None and self.response_format.type != "text"]
        if self.structured_outputs is not None:
            constraints = self.structured_outputs
            formats += [v is not None and v is not False for _, v in constraints]
            if not any(formats[1:]):
                message = (
                    f"structured_outputs must have one of {', '.join((*GUIDED, 'json_object'))}; got none"
                )
                raise conflict("structured_outputs", message)
        if sum(formats[1:]) > 1:
            message = f"structured_outputs must have one constraint; got {sum(formats[1:])}"
            raise conflict("structured_outputs", message)
        if sum(formats) > 1:
            message = (
                "response_format and structured_outputs must constrain the text at most once; "
                f"got {sum(formats)} constraints"
            )
            raise conflict("response_format", message)
        return self

    @property
    def constrains(self) -> bool:
        """Whether a grammar may constrain the text."""
        return self.response_format is not None or self.structured_outputs is not None

    def name_of(self, constraint: str) -> str:
        """The field in which the client has sent a constraint of `structured_outputs`."""
        return f"guided_{constraint}" if self._guided else f"structured_outputs.{constraint}"

    @property
    def choices(self) -> int:
        """Number of texts for each prompt."""
        return self.n or 1

    def first_seed(self) -> int:
        """The seed of the first text; drawn anew if the request has none."""
        seed = normal_seed(self.seed)
        return secrets.randbelow(2**31) if seed is None else seed

    def sampling(self, defaults: dict[str, Any]) -> dict[str, Any]:
        """Fields of `Request`, apart from `prompt`, `max_tokens` and `seed`: these, else `defaults`."""
        fields = dict(defaults)
        for line in FIELDS:
            value = getattr(self, line.name)
            if value is not None and line.name not in ("max_tokens", "seed"):
                fields[line.name] = line.accepts.check(line.name, value)
        return fields
