"""Tools that a model may call, the choice among them, and the calls in messages."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from .fields import Answer, Body, Items, conflict

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
MOST_TOOLS = 256


class Function(Body):
    """A function that the model may call."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of an object")
    strict: bool | None = Field(None, description="ignored: arguments always satisfy the schema")


class Tool(Body):
    """A tool. Only functions are supported."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The name of a function."""

    name: Name


class NamedTool(Body):
    """A tool; as the choice, the one that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedTool], Field(min_length=1, max_length=MOST_TOOLS)]


class AllowedChoice(Body):
    """The tools that may be called, of those that the prompt shows."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Tools = Annotated[Items[Tool], Field(max_length=MOST_TOOLS)]


def shown_tools(tools: list[Tool] | None) -> list[dict[str, Any]]:
    """The tools as the client stated them."""
    return [tool.model_dump(exclude_unset=True) for tool in tools or ()]


# The objects come first, so that an error about one names its type.
ToolChoice = (
    Annotated[NamedTool | AllowedChoice, Field(discriminator="type")] | Literal["none", "auto", "required"]
)


def allowed_names(choice: ToolChoice | None) -> list[str] | None:
    """The names of the tools that a choice allows; None if it allows all."""
    if isinstance(choice, NamedTool):
        return [choice.function.name]
    if isinstance(choice, AllowedChoice):
        return [tool.function.name for tool in choice.allowed_tools.tools]
    return None


def requires_call(choice: ToolChoice | None) -> bool:
    """Whether a choice leaves no text without a call."""
    if isinstance(choice, AllowedChoice):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedTool)


def check_choice(tools: Sequence[Tool] | None, choice: ToolChoice | None, constrained: bool) -> None:
    """Raise a conflict where tools, the choice and another constraint of the text do not fit together.

    Args:
        tools: the tools that the model may call.
        choice: among them.
        constrained: whether response_format or structured_outputs constrain the text.
    """
    names = [tool.function.name for tool in tools or ()]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise conflict("tools", f"tools must have different names; got {twice} twice")
    if not names:
        if choice not in (None, "none", "auto"):
            raise conflict("tool_choice", "tool_choice must be none or auto without tools; got a forced call")
        return
    if strange := next((name for name in allowed_names(choice) or () if name not in names), None):
        message = f"tool_choice must name one of tools ({', '.join(names)}); got {strange}"
        raise conflict("tool_choice", message)
    if constrained and choice != "none":
        message = "tool_choice must be none with response_format or structured_outputs; got a choice of tools"
        raise conflict("tool_choice", message)


class StatedFunction(Body):
    """The function of a call in a message, with its arguments as an object or as JSON text."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")

    name: str
    arguments: dict[str, Any] | str | None = None


class StatedCall(Body):
    """A call in a message."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")

    function: StatedFunction


class CalledFunction(Answer):
    """A function and its arguments, a JSON text; in a stream, the next part of them."""

    name: str | None = None
    arguments: str


class ToolCall(Answer):
    """A call of a function."""

    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None
    function: CalledFunction
