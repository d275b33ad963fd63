"""`/v1/responses`: OpenAI's Responses API, whose requests are chat requests in other words."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from .chat import ChatBody
from .entropic import Entropic, EntropicResult
from .fields import (
    Answer,
    Body,
    BoundedParts,
    Items,
    Positive,
    Priority,
    Seconds,
    at_most,
    optional_fields,
    unicode,
)
from .foreign_fields import OF_RESPONSES, refusing
from .sampling import FIELDS, No, ObjectFormat, TextFormat
from .tools import MOST_TOOLS, Name

PASSED = tuple(line for line in FIELDS if line.name != "max_tokens")
FIELD_NAMES = {
    "prompt": "input",
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema": "text.format.schema",
    "response_format or structured_outputs": "text.format",
    "tools.*.function.parameters": "tools.*.parameters",
    "max_tokens": "max_output_tokens",
}
"""The names of chat's fields in this API, for errors."""
SamplingFields: Any = optional_fields("ResponsesSamplingFields", PASSED)


class TextContent(Body):
    """A text, of the client or of the model."""

    type: Literal["input_text", "output_text"]
    text: str


class RefusalContent(Body):
    """A refusal of the model; its text counts as said."""

    type: Literal["refusal"]
    refusal: str


Content = Annotated[TextContent | RefusalContent, Field(discriminator="type")]


class MessageItem(Body):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[Content]


class FunctionCallItem(Body):
    """A call of a function by the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(Body):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[Content]


class ThoughtContent(Body):
    """The text of a thought."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """A thought of the model, for templates that show earlier thoughts."""

    type: Literal["reasoning"]
    content: Items[ThoughtContent] | None = None


def _typed(item: Any) -> Any:
    """An item with its type, which messages may leave out."""
    return {"type": "message", **item} if isinstance(item, dict) and "role" in item else item


Item = Annotated[
    MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem,
    Field(discriminator="type"),
    BeforeValidator(_typed),
]


def chat_messages(items: str | Iterable[Any]) -> list[dict[str, Any]]:
    """The messages of chat that items stand for; calls and thoughts belong to the message next to them."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    thoughts = ""
    for item in items:
        if isinstance(item, ReasoningItem):
            thoughts += "".join(part.text for part in item.content or ())
            continue
        if isinstance(item, FunctionCallItem):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            call = {"name": item.name, "arguments": item.arguments}
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": call})
        elif isinstance(item, FunctionCallOutputItem):
            text = _text(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
        else:
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _text(item.content)})
        if thoughts and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = messages[-1].get("reasoning_content", "") + thoughts
            thoughts = ""
    return messages


ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def listed_items(items: str | Iterable[Any], name: str) -> list[dict[str, Any]]:
    """The items of an input as clients list them, each with an id.

    Args:
        items: the input of a request.
        name: a text that makes the ids unique.
    """
    if isinstance(items, str):
        items = [MessageItem(role="user", content=items)]
    listed = []
    for place, item in enumerate(items):
        fields = {"status": "completed", **item.model_dump(exclude_none=True)}
        if isinstance(item, MessageItem):
            said = item.role == "assistant"
            parts = fields["content"]
            if isinstance(parts, str):
                parts = [{"type": "output_text" if said else "input_text", "text": parts}]
            fields["content"] = [{**part, "annotations": []} if said else part for part in parts]
        elif isinstance(item, ReasoningItem):
            fields["summary"] = []
        listed.append({"id": f"{ID_PREFIXES[item.type]}_{name}in{place}", **fields})
    return listed


def _text(content: str | Sequence[Any]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextContent) else part.refusal for part in content)


class ResponsesTool(Body):
    """A function of the client. No tool of the server exists."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of an object")
    strict: bool | None = Field(None, description="ignored: arguments always satisfy the schema")

    def for_chat(self) -> dict[str, Any]:
        """The tool in the form of chat."""
        return {"type": "function", "function": self.model_dump(exclude_none=True, exclude={"type"})}


class ChosenFunction(Body):
    """A function; as the choice, the one that must be called."""

    type: Literal["function"]
    name: Name

    def for_chat(self) -> dict[str, Any]:
        """The function in the form of chat."""
        return {"type": "function", "function": {"name": self.name}}


class AllowedFunctions(Body):
    """The functions that may be called, of those that the prompt shows."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Field(min_length=1, max_length=MOST_TOOLS)]

    def for_chat(self) -> dict[str, Any]:
        """The choice in the form of chat."""
        tools = [tool.for_chat() for tool in self.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": tools}}


ResponsesToolChoice = (
    Annotated[ChosenFunction | AllowedFunctions, Field(discriminator="type")]
    | Literal["none", "auto", "required"]
)


class SchemaTextFormat(Body):
    """JSON that satisfies a schema."""

    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    """Options of the text."""

    format: Annotated[TextFormat | ObjectFormat | SchemaTextFormat, Field(discriminator="type")] | None = None


class Reasoning(Body):
    """How much to think, where the chat template has such a switch."""

    effort: str | None = Field(None, max_length=64)


class ResponsesBody(SamplingFields):
    """A request for a response."""

    model: str | None = Field(None, description="a model that /v1/models lists")
    input: str | Annotated[Items[Item], Field(min_length=1, max_length=4096), BoundedParts]
    instructions: str | None = Field(None, description="system message of this response alone")
    previous_response_id: str | None = Field(None, description="a stored response that this one follows")
    store: bool | None = Field(None, description="keep the response for a while; true unless stated")
    max_output_tokens: Positive | None = Field(None, description="most tokens to generate")
    tools: Annotated[Items[ResponsesTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16), at_most(16)] | None = None
    stream: bool | None = None
    include: Items[Literal["reasoning.encrypted_content"]] | None = Field(
        None, description="ignored: thoughts are returned as plain text"
    )
    truncation: Literal["disabled"] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = Field(
        None, description="responses hold no logprobs"
    )
    background: No | None = Field(None, description="no response is generated in the background")
    conversation: None = Field(None, description="use previous_response_id")
    prompt: None = Field(None, description="the server stores no prompts")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables of the template")
    priority: Priority | None = None
    deadline: Seconds | None = None
    entropic: Entropic | None = None

    _unicode = model_validator(mode="before")(unicode)
    _foreign = model_validator(mode="before")(refusing(OF_RESPONSES))

    def chat(self, messages: Sequence[dict[str, Any]]) -> ChatBody:
        """The same request of chat completions. Raises ValidationError.

        Args:
            messages: the messages of the conversation, without the instructions.
        """
        fields: dict[str, Any] = {line.name: getattr(self, line.name) for line in PASSED}
        same = ("model", "stream", "priority", "deadline", "entropic", "parallel_tool_calls")
        fields |= {name: getattr(self, name) for name in same}
        system = [self.instructions] if self.instructions else []
        rest = list(messages)
        while rest and rest[0]["role"] == "system":  # many templates accept one system message
            system.append(rest.pop(0)["content"])
        opening = [{"role": "system", "content": "\n\n".join(system)}] if system else []
        fields |= {"messages": opening + rest, "max_tokens": self.max_output_tokens}
        effort = None if self.reasoning is None else self.reasoning.effort
        thinks = {"enable_thinking": effort != "none", "reasoning_effort": effort} if effort else {}
        fields["chat_template_kwargs"] = {**thinks, **(self.chat_template_kwargs or {})} or None
        form = None if self.text is None else self.text.format
        if isinstance(form, SchemaTextFormat):
            schema = {"name": form.name, "schema": form.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif form is not None:
            fields["response_format"] = {"type": form.type}
        fields["tools"] = [tool.for_chat() for tool in self.tools or ()] or None
        choice: Any = self.tool_choice
        if choice is not None and not isinstance(choice, str):
            choice = choice.for_chat()
        return ChatBody.model_validate({**fields, "tool_choice": choice})


class ResponsesUsage(Answer):
    """Numbers of tokens."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class OutputItem(Answer):
    """A message, a call or a thought of the model."""

    type: Literal["message", "function_call", "reasoning"]
    id: str


class ResponsesAnswer(Answer):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    model: str
    output: list[OutputItem]
    usage: ResponsesUsage | None = None
    previous_response_id: str | None = None
    entropic: EntropicResult | None = None


class InputItems(Answer):
    """A page of the input of a response."""

    class InputItem(Answer):
        """A message, a call, its result or a thought."""

        type: Literal["message", "function_call", "function_call_output", "reasoning"]
        id: str

    object: Literal["list"]
    data: list[InputItem]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool


class DeletedResponse(Answer):
    """A response that is no longer stored."""

    id: str
    object: Literal["response"]
    deleted: bool
