"""Formats of tool calls: how the chat templates of model families write them, and their grammars."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from entropic_jax.models import Tokenizer

from ...engine.grammar_forms import WHITESPACE

THINK, END_OF_THOUGHT = "<think>", "</think>"


class CallFormat(NamedTuple):
    """How calls are written: opening, calls with a separator between them, closing.

    A call is `before {"name": …, "<arguments>": {…}} after`.
    """

    name: str
    arguments: str = "arguments"  # key of the arguments
    opening: str = ""  # once, before all calls
    before: str = ""
    after: str = ""
    separator: str = ""
    closing: str = ""
    marker: str = ""  # a text or special token after which a call must follow; without one, it is the first {
    optional_marker: str = ""  # may stand before the first call

    def head(self, tool: str) -> str:
        """The text of a call before its arguments."""
        return f'{{"name": {json.dumps(tool)}, "{self.arguments}": '


HERMES = CallFormat(
    "hermes", before="<tool_call>\n", after="\n</tool_call>", separator="\n", marker="<tool_call>"
)
MISTRAL = CallFormat("mistral", opening="[TOOL_CALLS][", separator=", ", closing="]", marker="[TOOL_CALLS]")
LLAMA3_JSON = CallFormat(
    "llama3_json", arguments="parameters", separator="; ", optional_marker="<|python_tag|>"
)
JSON = CallFormat("json", separator="\n")
FORMATS = {form.name: form for form in (HERMES, MISTRAL, LLAMA3_JSON, JSON)}
MOST_CALLS = 8
"""Calls of a message that is nothing but calls: a weak model may not choose to end before `max_tokens`."""
MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", THINK, END_OF_THOUGHT)


def detect(template: str) -> CallFormat:
    """The format of calls that a chat template shows the model; JSON for one without tools.

    >>> detect("{{ '<tool_call>' }}").name, detect("{{ messages }}").name
    ('hermes', 'json')
    """
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "tools" in template and ('"parameters"' in template or "python_tag" in template):
        return LLAMA3_JSON
    return JSON


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Markers that are special tokens of a tokenizer, which grammars name by id and texts leave out."""
    special = {
        token.content: number
        for number, token in tokenizer.backend.get_added_tokens_decoder().items()
        if token.special
    }
    return {marker: special[marker] for marker in MARKERS if marker in special}


class Terminals(NamedTuple):
    """Writes texts in llguidance's form of Lark."""

    special: Mapping[str, int]

    def text(self, text: str) -> str:
        """A text, whose special tokens are named by their ids."""
        for marker, number in self.special.items():
            if marker in text:
                left, _, right = text.partition(marker)
                return " ".join(filter(None, (self.text(left), f"<[{number}]>", self.text(right))))
        return json.dumps(text) if text else ""

    def up_to(self, marker: str) -> tuple[str, str]:
        """A rule body for any text up to a marker, and the attribute of the rule."""
        if marker in self.special:
            return f"FREE {self.text(marker)}", ""
        return f"FREE {json.dumps(marker)}", "[lazy]"


def grammar(
    form: CallFormat,
    tools: Sequence[Mapping[str, Any]],
    special: Mapping[str, int],
    *,
    required: bool,
    parallel: bool,
    reasoning: bool | None,
) -> str:
    """The grammar of a text that calls tools, in the serialized form of llguidance.

    Args:
        form: the format of the calls.
        tools: functions that may be called: `name` and, where there is one, the schema `parameters`.
        special: markers that are special tokens, by text.
        required: the text is calls alone; else it is free until a call begins.
        parallel: several calls may follow each other, up to `MOST_CALLS` without text between them.
        reasoning: whether a thought may come first; True if it has begun in the prompt, None without one.
    """
    write = Terminals(special)
    rules = ["FREE: /(.|\\n)*/"]
    single = " ".join(filter(None, (write.text(form.before), "call", write.text(form.after))))
    more = " ".join(filter(None, (write.text(form.separator), single)))
    calls = f"{single} ({more}){{0,{MOST_CALLS - 1}}}" if parallel else single
    if required:
        calls = " ".join(filter(None, (write.text(form.opening), calls, write.text(form.closing))))
        if form.optional_marker in special:
            calls = f"{write.text(form.optional_marker)}? {calls}"
        start = calls
    elif form.marker:
        marked, (body, attribute) = _after_marker(form, write, parallel), write.up_to(form.marker)
        start = f"({marked})* tail" if parallel and form.before else f"tail | {marked}"
        rules += ["tail: FREE", f"trigger{attribute}: {body}"]
    else:
        optional = f"{write.text(form.optional_marker)}? " if form.optional_marker in special else ""
        start = f"PLAIN | {optional}{calls}"
        rules.append("PLAIN: /([^{](.|\\n)*)?/")
    if reasoning is not None:
        start = f"{'thought' if reasoning else 'thought?'} blank ({start})"
        rules += _thought(write, begun=reasoning)
    rules += [f"call: {' | '.join(f'call_{place}' for place in range(len(tools)))}"]
    rules += [
        f"call_{place}: {json.dumps(form.head(tool['name']))} @arguments_{place} {json.dumps('}')}"
        for place, tool in enumerate(tools)
    ]
    lark = "\n".join([f"start: {start}", *rules])
    schemas = [
        {"name": f"arguments_{place}", "json_schema": schema_of(tool)} for place, tool in enumerate(tools)
    ]
    return json.dumps({"grammars": [{"name": "text", "lark_grammar": lark}, *schemas]})


def _after_marker(form: CallFormat, write: Terminals, parallel: bool) -> str:
    """The part after free text: the marker, and the call or the list of calls after it."""
    if form.before:  # every call has its own marker
        rest = form.before.removeprefix(form.marker)
        return " ".join(filter(None, ("trigger", write.text(rest), "call", write.text(form.after))))
    rest, separator = form.opening.removeprefix(form.marker), write.text(form.separator)
    calls = f"call ({separator} call){{0,{MOST_CALLS - 1}}}" if parallel else "call"
    return " ".join(filter(None, ("trigger", write.text(rest), calls, write.text(form.closing))))


def _thought(write: Terminals, begun: bool) -> Iterable[str]:
    """Rules of a thought up to its end, and of the line breaks after it."""
    body, attribute = write.up_to(END_OF_THOUGHT)
    opening = "" if begun else f"{write.text(THINK)} "
    if attribute:
        return f"thought{attribute}: {opening}{body}", "blank: /\\n*/"
    return f"thought: {opening}{body}", "blank: /\\n*/"


def schema_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments; white space is bounded unless the schema says otherwise."""
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    return {"x-guidance": {"whitespace_pattern": WHITESPACE}, "type": "object", **parameters}


def written(function: Mapping[str, Any]) -> str:
    """A call in the format JSON, from its name and its arguments as an object."""
    return f"{JSON.head(function['name'])}{json.dumps(function['arguments'], ensure_ascii=False)}}}"


def described(tools: Sequence[Mapping[str, Any]]) -> str:
    """A system message about tools, for a chat template that does not show them."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    call = JSON.head("NAME") + "{...}}"
    return f"You may call these functions:\n{listed}\nTo call one, answer with nothing but: {call}"
