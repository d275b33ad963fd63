"""`/v1/messages`: Anthropic's Messages API, whose requests are chat requests in other words."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .chat import ChatBody
from .entropic import Entropic, EntropicResult
from .fields import (
    Answer,
    Body,
    BoundedParts,
    Count,
    Items,
    Positive,
    Priority,
    Seconds,
    conflict,
    optional_fields,
    unicode,
)
from .foreign_fields import OF_MESSAGES, refusing
from .sampling import FIELDS
from .tools import MOST_TOOLS, Name

RENAMED = ("max_tokens", "stop")  # chat's fields that this API states in its own way
PASSED = tuple(line for line in FIELDS if line.name not in RENAMED)
FIELD_NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format.schema",
    "response_format or structured_outputs": "output_config.format",
    "tools.*.function.parameters": "tools.*.input_schema",
}
"""The names of chat's fields in this API, for errors."""
SamplingFields: Any = optional_fields("MessagesSamplingFields", PASSED)


class TextBlock(Body):
    """A text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """A thought of the model, for templates that show earlier thoughts."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Body):
    """A thought that only its author can read; it is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Body):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Body):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[TextBlock] | None = None
    is_error: bool | None = Field(None, description="the model reads `Error: ` before the content")


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock, Field(discriminator="type")
]


class UserMessage(Body):
    """A user's message, with the results of tool calls."""

    role: Literal["user"]
    content: str | Items[UserBlock]

    def for_chat(self) -> list[dict[str, Any]]:
        """The messages of the roles user and tool, in order."""
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        messages: list[dict[str, Any]] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                text = _text(block.content)
                text = f"Error: {text}" if block.is_error else text
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            elif messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += block.text
            else:
                messages.append({"role": "user", "content": block.text})
        return messages


class AssistantMessage(Body):
    """An answer of the model, with its tool calls."""

    role: Literal["assistant"]
    content: str | Items[AssistantBlock]

    @property
    def calls(self) -> list[ToolUseBlock]:
        """Its calls of tools."""
        return [b for b in self.content if isinstance(b, ToolUseBlock)]

    def for_chat(self) -> list[dict[str, Any]]:
        """The message with its calls."""
        if isinstance(self.content, str):
            return [{"role": "assistant", "content": self.content}]
        message: dict[str, Any] = {"role": "assistant", "content": _text(self.content)}
        thoughts = "".join(block.thinking for block in self.content if isinstance(block, ThinkingBlock))
        if thoughts:
            message["reasoning_content"] = thoughts
        if self.calls:
            message["tool_calls"] = [
                {"id": b.id, "type": "function", "function": {"name": b.name, "arguments": b.input}}
                for b in self.calls
            ]
        return [message]


def _text(content: Any) -> str:
    """The text of a content, which is a text, blocks or nothing."""
    if isinstance(content, str):
        return content
    return "".join(block.text for block in content or () if isinstance(block, TextBlock))


class MessagesTool(Body):
    """A tool of the client. No tool of the server exists."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]

    def for_chat(self) -> dict[str, Any]:
        """The tool as a function."""
        function = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class FreeChoice(Body):
    """Calls if the model wants to (`auto`), or at least one (`any`)."""

    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class ToolChoiceOfName(Body):
    """A call of this tool."""

    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool | None = None


class NoChoice(Body):
    """No calls."""

    type: Literal["none"]


MessagesToolChoice = Annotated[FreeChoice | ToolChoiceOfName | NoChoice, Field(discriminator="type")]


class Thinking(Body):
    """Whether the model should think first, where its template has such a switch."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Positive | None = Field(None, description="ignored: max_tokens bounds thought and text")


class OutputFormat(Body):
    """JSON that satisfies a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Options of the text."""

    format: OutputFormat | None = None


class CountTokensBody(SamplingFields):
    """A conversation, with the fields of `/v1/messages`, whose prompt is to be counted."""

    model: str | None = Field(None, description="a model that /v1/models lists")
    messages: Annotated[
        Items[Annotated[UserMessage | AssistantMessage, Field(discriminator="role")]],
        Field(min_length=1, max_length=4096),
        BoundedParts,
    ]
    system: str | Annotated[Items[TextBlock], Field(max_length=4096)] | None = None
    tools: Annotated[Items[MessagesTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    stop_sequences: Items[Annotated[str, Field(min_length=1, max_length=1024)]] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables of the template")
    container: None = Field(None, description="the server has no containers")
    mcp_servers: Annotated[Items[Any], Field(max_length=0)] | None = Field(
        None, description="the server calls no tools by itself"
    )
    priority: Priority | None = None
    deadline: Seconds | None = None
    entropic: Entropic | None = None

    _unicode = model_validator(mode="before")(unicode)
    _foreign = model_validator(mode="before")(refusing(OF_MESSAGES))

    @model_validator(mode="after")
    def _calls_are_answered(self) -> Any:
        last = self.messages[-1]
        if isinstance(last, AssistantMessage) and last.calls:
            message = (
                f"messages must answer every tool_use by a tool_result; got none for {last.calls[-1].id}"
            )
            raise conflict("messages", message)
        return self

    def chat(self, max_tokens: int | None = None, stream: bool | None = None) -> ChatBody:
        """The same request of chat completions. Raises ValidationError.

        Args:
            max_tokens: most tokens of the answer.
            stream: whether the answer is streamed.
        """
        fields: dict[str, Any] = {line.name: getattr(self, line.name) for line in PASSED}
        fields |= {name: getattr(self, name) for name in ("model", "priority", "deadline", "entropic")}
        system = [{"role": "system", "content": _text(self.system)}] if self.system else []
        fields["messages"] = system + [m for message in self.messages for m in message.for_chat()]
        fields |= {"max_tokens": max_tokens, "stream": stream, "stop": self.stop_sequences or None}
        fields["continue_final_message"] = isinstance(self.messages[-1], AssistantMessage)
        thinks = {"enable_thinking": self.thinking.type != "disabled"} if self.thinking else {}
        fields["chat_template_kwargs"] = {**thinks, **(self.chat_template_kwargs or {})} or None
        if self.output_config is not None and (form := self.output_config.format) is not None:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
        fields["tools"] = [tool.for_chat() for tool in self.tools or ()] or None
        return ChatBody.model_validate(fields | self._choice())

    def _choice(self) -> dict[str, Any]:
        """The choice of tools in chat's fields."""
        choice = self.tool_choice
        if choice is None or isinstance(choice, NoChoice):
            return {"tool_choice": None if choice is None else "none"}
        parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
        if isinstance(choice, ToolChoiceOfName):
            return {"tool_choice": {"type": "function", "function": {"name": choice.name}}, **parallel}
        return {"tool_choice": "required" if choice.type == "any" else "auto", **parallel}


class MessagesBody(CountTokensBody):
    """A request to continue a conversation."""

    max_tokens: Count = Field(description="most tokens to generate")
    stream: bool | None = None


class MessagesUsage(Answer):
    """Numbers of tokens; those from the prefix cache are not among `input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class ContentBlock(Answer):
    """A part of the answer."""

    type: Literal["text", "tool_use", "thinking"]


class MessagesAnswer(Answer):
    """The message that follows."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessagesUsage
    entropic: EntropicResult | None = None


class TokenCount(Answer):
    """The tokens of a prompt."""

    input_tokens: int


class MessagesErrorDetail(Answer):
    """An error's type and message."""

    type: str
    message: str


class MessagesError(Answer):
    """The body of every answer that is not a success."""

    type: Literal["error"]
    error: MessagesErrorDetail
