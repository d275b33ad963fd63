"""Tool calling of a served model: what a request's tools mean for its prompt, its grammar and its parser."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from ...engine.grammar_forms import Constraint
from ...request import RequestError
from ..protocol.chat import ChatBody, Message
from ..protocol.tools import NamedTool, allowed_names, requires_call, shown_tools
from ..served_model import ServedModel
from . import formats
from .formats import END_OF_THOUGHT, THINK, CallFormat
from .parser import MessageParser


class ToolCalling:
    """Formats of calls and thoughts of one model."""

    def __init__(
        self, model: ServedModel, call_format: str | None = None, reasoning: str | None = None
    ) -> None:
        """The formats that the model's chat template for tools shows, unless others are stated.

        Args:
            model: its tokenizer and chat template.
            call_format: a name in `formats.FORMATS`; None detects it.
            reasoning: "think" or "none"; None detects it.
        """
        self.model = model
        template = model.tokenizer.template_for([]) or ""
        self.form: CallFormat = (
            formats.detect(template) if call_format is None else formats.FORMATS[call_format]
        )
        templates = {template, model.tokenizer.template_for(None) or ""}
        self.thinks = (
            any(THINK in text or END_OF_THOUGHT in text for text in templates)
            if reasoning is None
            else reasoning == "think"
        )

    @functools.cached_property
    def special(self) -> Mapping[str, int]:
        """Markers that are special tokens."""
        return formats.special_tokens(self.model.tokenizer)

    def constraint(self, body: ChatBody) -> Constraint | None:
        """The field that allows or demands calls, and the grammar it stands for; None if there are none."""
        if not body.calls_tools:
            return None
        stated = {
            f"tools.{place}.function.parameters": tool["function"]
            for place, tool in enumerate(shown_tools(body.tools))
        }
        choice = body.tool_choice
        if (names := allowed_names(choice)) is not None:
            stated = {field: function for field, function in stated.items() if function["name"] in names}
        required = requires_call(choice)
        reasoning = self.reasoning(body)
        grammar = formats.grammar(
            self.form,
            list(stated.values()),
            self.special,
            required=required,
            parallel=body.parallel_tool_calls is not False and not isinstance(choice, NamedTool),
            reasoning=reasoning,
        )
        markers = [] if required else [self.form.marker or "{"]
        if reasoning is not None:
            markers.append(END_OF_THOUGHT)
        return Constraint("tools", grammar, tuple(markers), tuple(stated))

    def reasoning(self, body: ChatBody) -> bool | None:
        """Whether a text may begin with a thought; True if the prompt begins it, None if it may not."""
        if not self.thinks or body.constrains or body.continue_final_message:
            return None
        tools = shown_tools(body.tools) if body.calls_tools else None
        tools = tools if self.template_shows(tools) else None
        message = {"role": "user", "content": "x"}
        try:
            prompt = self.model.chat(
                [message], variables=body.chat_template_kwargs, add_generation_prompt=True, tools=tools
            )
        except RequestError:  # the template wants other messages
            return False
        return prompt.rstrip().endswith(THINK)

    def parser(self, body: ChatBody) -> MessageParser | None:
        """A parser of one text; None if all of it is content."""
        reasoning = self.reasoning(body)
        if not body.calls_tools and reasoning is None:
            return None
        return MessageParser(self.form if body.calls_tools else None, reasoning, self.special)

    def template_shows(self, tools: list[dict[str, Any]] | None) -> bool:
        """Whether the chat template that is chosen with such tools knows of tools."""
        return "tools" in (self.model.tokenizer.template_for(tools) or "")

    def messages(
        self, stated: Sequence[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """The messages and the tools for the template, which may not know of tools. Raises RequestError."""
        messages = [message.for_template() for message in stated]
        if self.template_shows(tools):
            return messages, tools
        messages = [_as_text(message) for message in messages]
        if tools:
            text = formats.described(tools)
            if messages[0]["role"] == "system":
                messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
            else:
                messages.insert(0, {"role": "system", "content": text})
        return messages, None


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its calls as a part of its content."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [formats.written(call["function"]) for call in calls]
    content = "\n".join(filter(None, (message["content"], *texts)))
    return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": content}
