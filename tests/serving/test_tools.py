"""Tool calls and thoughts over a scripted engine: the parser, prompts, answers and streams."""

import json
import random
from collections.abc import Iterator, Sequence

import httpx2
import pytest

from entropic_jax.serving.http.frontend import Frontend
from entropic_jax.serving.http.settings import Settings
from entropic_jax.serving.http.tools import formats
from entropic_jax.serving.http.tools.calling import ToolCalling
from entropic_jax.serving.http.tools.formats import HERMES, JSON, LLAMA3_JSON, MISTRAL, CallFormat
from entropic_jax.serving.http.tools.parser import MessageParser
from entropic_jax.serving.request.transcript import Token

from .live import serving
from .scripted_engine import ScriptedEngine
from .test_completions import stream

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
ROME, NO_ARGUMENTS = {"city": 'R"o}me\\'}, {}


def call(form: CallFormat, name: str, arguments: dict) -> str:
    return f"{form.before}{form.head(name)}{json.dumps(arguments)}}}{form.after}"


def calls(form: CallFormat, *pairs: tuple[str, dict]) -> str:
    return form.opening + form.separator.join(call(form, *pair) for pair in pairs) + form.closing


FORMATS = list(formats.FORMATS.values())
BOTH = (("weather", ROME), ("clock", NO_ARGUMENTS))


def parsed(form: CallFormat | None, pieces: Sequence[str], reasoning: bool | None = None) -> tuple:
    """Content, thought and calls of a text that comes in pieces."""
    parser = MessageParser(form, reasoning)
    parts = [parser.push([Token(0, piece, {})]) for piece in pieces] + [parser.finish()]
    by_index: dict[int, list] = {}
    for part in (call_part for message_part in parts for call_part in message_part.calls):
        if part.call_index not in by_index:
            assert part.id and part.name
            by_index[part.call_index] = [part.name, ""]
        else:
            assert part.id is None and part.name is None
        by_index[part.call_index][1] += part.arguments
    content = "".join(part.content for part in parts)
    return content, "".join(part.reasoning for part in parts), [tuple(pair) for pair in by_index.values()]


TEXTS = [
    *((form, calls(form, *BOTH), None, "", "", BOTH) for form in FORMATS),
    *((form, calls(form, BOTH[0]), None, "", "", BOTH[:1]) for form in FORMATS),
    *((form, "Well < {no} call", None, "Well < {no} call", "", ()) for form in FORMATS),
    *(
        (form, "<think>\na {b</think>\n\n" + calls(form, BOTH[1]), False, "", "\na {b", BOTH[1:])
        for form in FORMATS
    ),
    (HERMES, "So:\n" + calls(HERMES, *BOTH), None, "So:\n", "", BOTH),
    (MISTRAL, "So: " + calls(MISTRAL, *BOTH), None, "So: ", "", BOTH),
    (HERMES, calls(HERMES, BOTH[0]) + "\nDone.", None, "\nDone.", "", BOTH[:1]),
    (
        HERMES,
        '<tool_call>\n{"arguments": {"days": 2}, "name": "weather"}\n</tool_call>',
        None,
        "",
        "",
        (("weather", {"days": 2}),),
    ),
    (LLAMA3_JSON, "<|python_tag|>" + calls(LLAMA3_JSON, BOTH[0]), None, "", "", BOTH[:1]),
    (HERMES, '<tool_call>\n{"name": "wea', None, '<tool_call>\n{"name": "wea', "", ()),
    (HERMES, calls(HERMES, BOTH[0]) + '\n<tool_call>\n{"name": "wea', None, "", "", BOTH[:1]),
    (JSON, calls(JSON, BOTH[0]) + '\n{"name": "wea', None, "", "", BOTH[:1]),
    (HERMES, "<tool_call> is a tag", None, "<tool_call> is a tag", "", ()),
    (JSON, '{"answer": 1} said', None, '{"answer": 1} said', "", ()),
    (None, "deep</think>\n\nsaid", True, "said", "deep", ()),
    (None, "deep, but cut </thi", True, "", "deep, but cut </thi", ()),
    (None, "  said <think>", False, "  said <think>", "", ()),
    (None, "<think>x</think>", None, "<think>x</think>", "", ()),
]


@pytest.mark.parametrize(("form", "text", "reasoning", "content", "thought", "pairs"), TEXTS)
def test_a_text_is_split_however_it_comes(form, text, reasoning, content, thought, pairs):
    draw = random.Random(0)
    for number in range(40):
        ends = sorted(draw.sample(range(1, len(text)), min(len(text) - 1, (0, len(text), 1, 4)[number % 4])))
        pieces = [text[i:j] for i, j in zip([0, *ends], [*ends, len(text)], strict=True)]
        said, reasoned, split = parsed(form, pieces, reasoning)
        assert (said, reasoned) == (content, thought)
        assert [(name, json.loads(arguments)) for name, arguments in split] == list(pairs)


def test_arguments_are_streamed_as_they_come():
    text = calls(HERMES, BOTH[0])
    parser = MessageParser(HERMES, None)
    parts = [part for letter in text for part in parser.push([Token(0, letter, {})]).calls]
    assert (parts[0].name, parts[0].arguments) == ("weather", "{")
    assert len(parts) == len(json.dumps(ROME))


def test_markers_that_are_special_tokens_are_seen():
    parser = MessageParser(MISTRAL, None, {"[TOOL_CALLS]": 5})
    tokens = [Token(5, "", {}), Token(9, calls(MISTRAL, BOTH[0]).removeprefix("[TOOL_CALLS]"), {})]
    (part,) = parser.push(tokens).calls
    assert part.name == "weather" and len(part.id) == 9  # as Mistral's templates demand


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>' }}", HERMES),
        ("[TOOL_CALLS]{{ tools }}", MISTRAL),
        ('{{ tools }} {"name": 1, "parameters": 2}', LLAMA3_JSON),
        ("{{ messages }}", JSON),
    ],
)
def test_the_format_follows_the_template(template, form):
    assert formats.detect(template) is form


@pytest.fixture(scope="module")
def tool_server(served) -> Iterator:
    engine = ScriptedEngine(served)
    frontend = Frontend(engine, served, Settings(port=0, tool_call_parser="hermes"))
    with serving(frontend) as live:
        live.engine, live.model = engine, served
        yield live


def scripted(live, form: CallFormat, text: str) -> None:
    """Let the engine say a text in a format, with no grammar, which a scripted engine cannot follow."""
    live.engine.tokens = live.model.tokenizer.encode(text, special=False)
    live.frontend.tool_calling = ToolCalling(live.model, form.name)
    live.frontend.tool_calling.constraint = lambda body: None


def chat(live, **body) -> dict:
    answer = httpx2.post(live.url + PATH, json={"messages": HELLO, "seed": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_an_answer_with_calls_whole_and_streamed(tool_server, form):
    scripted(tool_server, form, calls(form, *BOTH))
    (choice,) = chat(tool_server, tools=TOOLS)["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] is None
    pairs = [
        (c["type"], c["function"]["name"], json.loads(c["function"]["arguments"]))
        for c in message["tool_calls"]
    ]
    assert pairs == [("function", *pair) for pair in BOTH]
    assert len({c["id"] for c in message["tool_calls"]}) == 2
    events = stream(tool_server, PATH, messages=HELLO, seed=0, tools=TOOLS)
    deltas = [event["choices"][0]["delta"] for event in events]
    texts = ["", ""]
    for streamed_call in (c for delta in deltas for c in delta.get("tool_calls", ())):
        texts[streamed_call["index"]] += streamed_call["function"]["arguments"]
    assert texts == [json.dumps(ROME), json.dumps(NO_ARGUMENTS)]
    assert "".join(delta.get("content") or "" for delta in deltas) == ""
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_text_that_is_cut_ends_by_length(tool_server):
    scripted(tool_server, HERMES, calls(HERMES, *BOTH))
    (choice,) = chat(tool_server, tools=TOOLS, max_tokens=20)["choices"]
    assert choice["finish_reason"] == "length"


def test_a_call_that_a_stop_string_cuts_is_not_finished(tool_server):
    scripted(tool_server, HERMES, calls(HERMES, *BOTH))
    (choice,) = chat(tool_server, tools=TOOLS, stop=["}"])["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "}")
    (call,) = choice["message"]["tool_calls"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["function"]["arguments"])
    (choice,) = chat(tool_server, tools=TOOLS, stop=["</tool_call>"])["choices"]  # after the first call
    assert choice["finish_reason"] == "tool_calls" and len(choice["message"]["tool_calls"]) == 1


def test_no_tool_choice_leaves_the_text_alone(tool_server):
    text = calls(HERMES, *BOTH)
    scripted(tool_server, HERMES, text)
    for body in ({"tools": TOOLS, "tool_choice": "none"}, {}, {"tools": []}):
        (choice,) = chat(tool_server, **body)["choices"]
        assert choice["message"]["content"] == text and choice["finish_reason"] == "stop"
        assert "weather" not in prompt(tool_server)


def test_thoughts(tool_server):
    scripted(tool_server, HERMES, "<think>hm</think>\n\nSo.")
    tool_server.frontend.tool_calling = ToolCalling(tool_server.model, "hermes", "think")
    (choice,) = chat(tool_server)["choices"]
    assert choice["message"] == {"role": "assistant", "content": "So.", "reasoning_content": "hm"}
    deltas = [e["choices"][0]["delta"] for e in stream(tool_server, PATH, messages=HELLO, seed=0)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "So."
    tool_server.frontend.tool_calling = ToolCalling(
        tool_server.model, "hermes"
    )  # whose template has no <think>
    (choice,) = chat(tool_server)["choices"]
    assert choice["message"]["content"].startswith("<think>")


def prompt(live) -> str:
    tokens = live.engine.engine_requests[-1].request.prompt
    return live.model.tokenizer.decode(tokens, skip_special=False)


CONVERSATION = [
    *HELLO,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]


def test_a_template_without_tools_describes_them_in_a_system_message(tool_server):
    scripted(tool_server, JSON, "So.")
    chat(tool_server, tools=TOOLS, messages=CONVERSATION)
    said = prompt(tool_server)
    assert said.index("### System") < said.index('"name": "weather"') < said.index("### User")
    assert '### Assistant\n{"name": "weather", "arguments": {"city": "Rome"}}\n' in said
    assert "### Tool\nsunny\n" in said
    chat(tool_server, tools=TOOLS, messages=[{"role": "system", "content": "Be brief."}, *HELLO])
    assert prompt(tool_server).count("### System\nBe brief.\n\nYou may call") == 1


def test_a_template_with_tools_gets_them_and_arguments_as_objects(tool_server, monkeypatch):
    template = (
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<tool_call>{{ c.function.arguments.city }}{% endfor %}{{ '\\n' }}{% endfor %}"
    )
    scripted(tool_server, HERMES, "So.")
    monkeypatch.setattr(tool_server.model.tokenizer, "chat_template", template)
    tool_server.frontend.tool_calling = calling = ToolCalling(tool_server.model)
    calling.constraint = lambda body: None
    assert calling.form is HERMES
    chat(tool_server, tools=TOOLS, messages=CONVERSATION)
    assert prompt(tool_server) == "[weather][clock]user:Hello\nassistant:<tool_call>Rome\ntool:sunny\n"


def allowed(mode: str, *names: str) -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


BROKEN = [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"tool_choice": "required"}, "tool_choice", "without tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "tool_choice must"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
            "must name one of tools (weather, clock); got other",
        ),
        (
            {"tools": TOOLS, "tool_choice": "any"},
            "tool_choice",
            """tool_choice must be an object or 'none', 'auto' or 'required'; got "any\"""",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "mcp"}},
            "tool_choice.type",
            """tool_choice.type must be one of 'function', 'allowed_tools'; got "mcp\"""",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function"}},
            "tool_choice.function",
            "tool_choice.function is missing",
        ),
        (
            {"tools": TOOLS, "tool_choice": allowed("auto", "clock", "other")},
            "tool_choice",
            "tool_choice must name one of tools (weather, clock); got other",
        ),
        ({"tool_choice": allowed("auto", "clock")}, "tool_choice", "without tools"),
        ({"tools": [CLOCK, CLOCK]}, "tools", "different names; got clock twice"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type", "tools.0.type must"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools.0.function.name",
            "tools.0.function.name must",
        ),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tool_choice", "must be none with"),
        ({"tools": TOOLS, "parallel_tool_calls": 3}, "parallel_tool_calls", "parallel_tool_calls must"),
        ({"messages": BROKEN}, "messages", "arguments are JSON objects; got '{'"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}]},
            "tools.0.function.parameters",
            "tools.0.function.parameters must be a JSON schema that can be compiled: ",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(live, body, param, said):
    answer = httpx2.post(live.url + PATH, json={"messages": HELLO, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and said in error["message"], error
