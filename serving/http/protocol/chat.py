"""`/v1/chat/completions`: a conversation, and the message that follows."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from ...request.chat_template import template_message
from .entropic import EntropicResult
from .fields import Answer, Body, BoundedParts, Count, Items, Usage, conflict
from .foreign_fields import OF_CHAT, refusing
from .sampling import Alternatives, SamplingBody
from .tools import StatedCall, ToolCall, ToolChoice, Tools, check_choice


class TextPart(Body):
    """A part of a message. Only text is supported."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message; what else it holds is there for the template to read."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Items[TextPart] | None = None
    tool_calls: Items[StatedCall] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message with its content as one text. Raises RequestError for calls without an object."""
        return template_message({"content": None, **self.model_dump(exclude_none=True)}, "messages")


Messages = Annotated[Items[Message], Field(min_length=1, max_length=4096), BoundedParts]
Documents = Annotated[Items[dict[str, Any]], Field(max_length=1024)]


class ChatBody(SamplingBody):
    """A request to continue a conversation."""

    messages: Messages
    max_completion_tokens: Count | None = Field(None, description="takes the place of max_tokens")
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    prompt_logprobs: Alternatives | None = Field(None, description="of a whole answer only, not of a stream")
    tools: Tools | None = Field(None, description="functions that the model may call")
    tool_choice: ToolChoice | None = Field(None, description="auto with tools, unless stated")
    parallel_tool_calls: bool | None = Field(None, description="whether a message may have several calls")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        None, description="go on with the last message; add_generation_prompt does not count then"
    )
    chat_template: None = Field(None, description="`serve --chat-template` states it")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables of the template")
    documents: Documents | None = Field(None, description="texts to refer to, for the template")

    _foreign = model_validator(mode="before")(refusing(OF_CHAT))

    @model_validator(mode="after")
    def _choice_of_tools(self) -> Self:
        check_choice(self.tools, self.tool_choice, self.constrains and not self._free_text)
        return self

    @model_validator(mode="after")
    def _whole_answer(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            message = f"prompt_logprobs must be null in a stream of a chat; got {self.prompt_logprobs}"
            raise conflict("prompt_logprobs", message)
        return self

    @property
    def _free_text(self) -> bool:
        form = self.response_format
        return self.structured_outputs is None and form is not None and form.type == "text"

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def wants_logprobs(self) -> bool:
        """Whether logprobs are requested, if only through `top_logprobs`."""
        return bool(self.top_logprobs) if self.logprobs is None else self.logprobs


class TokenLogprob(Answer):
    """A token with its logarithmic probability, natural, before temperature and truncation."""

    token: str
    logprob: float | None
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    """The same of a token that was emitted, with the likeliest ones in its place."""

    top_logprobs: list[TokenLogprob]
    entropy: float | None = None
    temperature: float | None = None


class ChatLogprobs(Answer):
    """One entry for each token."""

    content: list[ContentLogprob] | None


class AnswerMessage(Answer):
    """The message of the model, or the next piece of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Answer):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "error", "abort"] | None
    stop_reason: str | int | None = None
    entropic: EntropicResult | None = None


class ChatCompletion(Answer):
    """The answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class ChatChunkChoice(Answer):
    """The next piece of an answer."""

    index: int
    delta: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls", "error", "abort"] | None = None


class ChatChunk(Answer):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
