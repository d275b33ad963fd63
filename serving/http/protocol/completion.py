"""`/v1/completions`: a prompt, or several, and their continuations."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ..settings import MOST_TEXTS
from .entropic import EntropicResult
from .fields import Answer, Choices, Items, Usage, token_ids
from .foreign_fields import OF_COMPLETIONS, refusing
from .sampling import Alternatives, SamplingBody

Tokens: Any = token_ids(least=1)
Texts = Annotated[Items[str], Field(min_length=1, max_length=MOST_TEXTS)]
TokenLists = Annotated[Items[Tokens], Field(min_length=1, max_length=MOST_TEXTS)]


class CompletionBody(SamplingBody):
    """A request to continue text or tokens."""

    prompt: str | Tokens | Texts | TokenLists
    best_of: Choices | None = Field(None, description="write this many, at least `n`, and give the likeliest")
    echo: bool | None = Field(None, description="begin the text with the prompt")
    logprobs: Alternatives | None = Field(None, description="the likeliest tokens to list at each")
    prompt_logprobs: Alternatives | None = None
    add_special_tokens: bool | None = Field(None, description="what the model expects around a text (BOS)")
    suffix: str | None = Field(None, description="text after the gap; for models that fill gaps")

    _foreign = model_validator(mode="before")(refusing(OF_COMPLETIONS))

    @property
    def candidates(self) -> int:
        """How many texts to write for each prompt."""
        return max(self.best_of or 0, self.choices)

    def prompts(self) -> list[str | list[int]]:
        """Every prompt by itself."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if isinstance(prompt[0], int) else list(prompt)  # type: ignore[list-item]


class CompletionLogprobs(Answer):
    """Four lists as long as the tokens of the text, those of an echoed prompt included."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float | None] | None]


class CompletionChoice(Answer):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "error", "abort"] | None
    stop_reason: str | int | None = None
    entropic: EntropicResult | None = None


class Completion(Answer):
    """The answer, or one event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
