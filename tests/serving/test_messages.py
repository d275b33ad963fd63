"""`/v1/messages` over a scripted engine: prompts, answers, streams, errors, and Anthropic's own client."""

import json

import httpx2
import pytest

from entropic_jax.serving.http.frontend import Frontend
from entropic_jax.serving.http.protocol.tools import shown_tools
from entropic_jax.serving.http.routes.blocks import Blocks
from entropic_jax.serving.http.settings import Settings
from entropic_jax.serving.http.tools.calling import ToolCalling
from entropic_jax.serving.http.tools.formats import HERMES
from entropic_jax.serving.http.tools.parser import CallPart, MessagePart

from .live import serving
from .scripted_engine import SCRIPT, ScriptedEngine
from .test_tools import BOTH, NO_ARGUMENTS, ROME, calls, scripted

PATH = "/v1/messages"
SERVER_SETTINGS = {"tool_call_parser": "hermes"}
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"name": "weather", "description": "The weather of a city.", "input_schema": SCHEMA},
    {"name": "clock", "input_schema": {"type": "object", "properties": {}}},
]


def post(live, path=PATH, **body) -> httpx2.Response:
    return httpx2.post(live.url + path, json={"messages": HELLO, "max_tokens": 100, "seed": 0, **body})


def message(live, **body) -> dict:
    answer = post(live, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(live, **body) -> list[dict]:
    answer = post(live, stream=True, **body)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    pairs = [event.split("\n") for event in answer.text.strip().split("\n\n")]
    trees = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {tree['type']}" for tree in trees]
    return trees


def accumulated(trees: list[dict]) -> dict:
    """The message that a client makes of events, which must come in the documented order."""
    assert trees[0]["type"] == "message_start" and trees[-1]["type"] == "message_stop"
    said, place = {**trees[0]["message"], "content": []}, None
    for tree in trees[1:-2]:
        if tree["type"] == "content_block_start":
            assert place is None and tree["index"] == len(said["content"])
            place, parts = tree["index"], []
            said["content"].append(tree["content_block"])
            continue
        assert tree["index"] == place
        block = said["content"][-1]
        if tree["type"] == "content_block_stop":
            field = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
            block[field] = json.loads("".join(parts) or "{}") if field == "input" else "".join(parts)
            place = None
            continue
        (field,) = tree["delta"].keys() - {"type"}
        parts.append(tree["delta"][field])
    assert place is None and trees[-2]["type"] == "message_delta"
    end = {name: value for name, value in trees[-2].items() if name not in ("type", "delta")}
    return {**said, **trees[-2]["delta"], **end}


def prompt(live) -> str:
    tokens = live.engine.engine_requests[-1].request.prompt
    return live.model.tokenizer.decode(tokens, skip_special=False)


def test_an_answer_whole_and_streamed(live):
    said = message(live, system="Be brief.", stop_sequences=["#"], top_k=7, temperature=0.5)
    assert said["content"] == [{"type": "text", "text": SCRIPT}]
    assert (said["type"], said["role"], said["model"]) == ("message", "assistant", "embedded")
    assert (said["stop_reason"], said["stop_sequence"]) == ("end_turn", None)
    request = live.engine.engine_requests[-1].request
    assert (request.top_k, request.temperature, request.max_tokens) == (7, 0.5, 100)
    begin = live.model.tokenizer.bos_token
    assert prompt(live) == f"{begin}### System\nBe brief.\n\n### User\nHello\n\n### Assistant\n"
    assert said["usage"] == {  # the scripted engine says that 4 tokens were cached
        "input_tokens": len(request.prompt) - 4,
        "output_tokens": len(live.engine.tokens) + 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
    }
    streamed = accumulated(events(live, system=[{"type": "text", "text": "Be brief."}]))
    assert streamed.pop("id") != said.pop("id") and streamed == said


def test_reasons_to_stop(live):
    assert message(live, max_tokens=2)["stop_reason"] == "max_tokens"
    assert message(live, max_tokens=0)["content"] == []
    said = message(live, stop_sequences=["return", "x"])
    assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", "return")
    assert said["content"][0]["text"] == SCRIPT.partition("return")[0]


def test_control_and_trace(live):
    fields = {"entropic": {"preset": "full", "trace": True}, "max_tokens": 3}
    said = message(live, **fields)
    assert len(said["entropic"]["trace"]["entropy"]) == 3 and said["entropic"]["entropic_time"] == 1.5
    assert accumulated(events(live, **fields))["entropic"] == said["entropic"]
    assert live.engine.engine_requests[-1].control.preset == "full"


def test_calls_and_thoughts_whole_and_streamed(live):
    scripted(live, HERMES, f"<think>hm</think>\n\nSo:\n{calls(HERMES, *BOTH)}")
    live.frontend.tool_calling.thinks = True
    said = message(live, tools=TOOLS)
    thought, text, *uses = said["content"]
    assert thought == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert text == {"type": "text", "text": "So:\n"}
    assert [(use["type"], use["name"], use["input"]) for use in uses] == [
        ("tool_use", "weather", ROME),
        ("tool_use", "clock", NO_ARGUMENTS),
    ]
    assert said["stop_reason"] == "tool_use" and uses[0]["id"] != uses[1]["id"]
    streamed = accumulated(events(live, tools=TOOLS))
    for block, other in zip(streamed["content"], said["content"], strict=True):
        assert {**block, "id": 0} == {**other, "id": 0}
    answer = message(live, tools=TOOLS, max_tokens=35)
    assert answer["stop_reason"] == "max_tokens" and answer["content"][-1]["input"] == {}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", None)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "tool", "name": "clock"}, ("clock", None)),
        ({"type": "none"}, ("none", None)),
    ],
)
def test_choices_of_tools_are_chat_s(live, choice, expected):
    seen = []
    scripted(live, HERMES, "So.")
    live.frontend.tool_calling.constraint = lambda body: seen.append(body)
    message(live, tools=TOOLS, tool_choice=choice)
    if choice["type"] == "none":
        assert not seen[0].calls_tools and "weather" not in prompt(live)
        return
    stated = seen[0].tool_choice
    assert (getattr(stated, "function", None).name if choice["type"] == "tool" else stated) == expected[0]
    assert seen[0].parallel_tool_calls is expected[1]
    assert shown_tools(seen[0].tools)[0]["function"]["parameters"] == SCHEMA


CONVERSATION = [
    *HELLO,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
            {"type": "tool_result", "tool_use_id": "t2", "content": "no clock", "is_error": True},
            {"type": "text", "text": "Thanks"},
        ],
    },
]


def test_results_of_tools_reach_the_template(live):
    scripted(live, HERMES, "So.")
    live.frontend.tool_calling = calling = ToolCalling(live.model, "json")
    calling.constraint = lambda body: None
    message(live, messages=CONVERSATION, tools=TOOLS)
    said = prompt(live)
    assert '### Assistant\nLet me see.\n{"name": "weather", "arguments": {"city": "Rome"}}\n' in said
    assert "### Tool\nsunny\n\n### Tool\nError: no clock\n\n### User\nThanks\n" in said


def test_a_begun_answer_is_continued_and_thoughts_switched(live, monkeypatch):
    message(live, messages=[*HELLO, {"role": "assistant", "content": "Hi th"}])
    assert prompt(live).endswith("### Assistant\nHi th")
    template = "{{ enable_thinking }}{% for m in messages %}{{ m.reasoning_content }}{% endfor %}"
    monkeypatch.setattr(live.model.tokenizer, "chat_template", template)
    message(live, messages=CONVERSATION, thinking={"type": "disabled"})
    assert prompt(live) == "Falsehm"


def test_a_schema_holds_the_text(live):
    form = {"type": "json_schema", "schema": {"const": {"a": True}}}
    said = message(live, output_config={"format": form})
    assert json.loads(said["content"][0]["text"]) == {"a": True}


def test_tokens_are_counted(live):
    fields = {"system": "Be brief.", "messages": CONVERSATION[:1]}
    counted = httpx2.post(f"{live.url}{PATH}/count_tokens", json=fields).json()
    message(live, **fields)
    assert counted == {"input_tokens": len(live.engine.engine_requests[-1].request.prompt)}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"logit_bias": {"4096": 1.0}}, "logit_bias must"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias must be a mapping"),
        (
            {"stop_sequences": ["a"] * 99},
            "stop_sequences must be a string of 1 to 1024 characters or a list of up to 64",
        ),
    ],
)
def test_a_count_refuses_what_a_message_refuses(live, fields, said):
    body = {"messages": CONVERSATION[:1], "max_tokens": 1, **fields}
    answers = [httpx2.post(f"{live.url}{path}", json=body) for path in (PATH, f"{PATH}/count_tokens")]
    messages = [answer.json()["error"]["message"] for answer in answers]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert all(message.startswith(said) for message in messages), messages


IMAGE = [{"role": "user", "content": [{"type": "image", "source": {}}]}]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"max_tokens": None}, "max_tokens must be an integer between 0 and 2147483647; got null"),
        (
            {"messages": IMAGE},
            "messages.0.content.0.type must be one of 'text', 'tool_result'; got \"image\"",
        ),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role must be one of 'user', 'ass"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text is miss",
        ),
        (
            {"messages": CONVERSATION[:2]},
            "messages must answer every tool_use by a tool_result; got none for t1",
        ),
        (
            {"stop_sequences": ["a"] * 65},
            "stop_sequences must be a string of 1 to 1024 characters or a list of up to 64",
        ),
        ({"messages": [{"role": "user", "content": "x " * 999}]}, "messages must have between 1 and 255 tok"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type must "),
        (
            {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}},
            "tool_choice must name one of tools",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice must be none or auto without tools"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers must have at most 0 items"),
        ({"container": "x"}, 'container must be null; got "x"'),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": 3}}}},
            "output_config.format.schema must",
        ),
        ({"temperature": -1}, "temperature must be a number between 0 and 1000; got -1"),
        ({"entropic": {"presett": "full"}}, "entropic has no field presett; did you mean preset?"),
    ],
)
def test_what_is_wrong_is_refused_in_the_api_s_words(live, body, said):
    answer = post(live, **body)
    assert answer.status_code == 400
    error = answer.json()
    assert error["type"] == "error" and error["error"].keys() == {"type", "message"}
    assert error["error"]["type"] == "invalid_request_error" and said in error["error"]["message"], error


def test_other_errors_have_the_same_form(live):
    for fields, status, kind in (
        ({"json": {"model": "gpt", "messages": HELLO, "max_tokens": 1}}, 404, "not_found_error"),
        ({"content": b"{", "headers": {"Content-Type": "application/json"}}, 400, "invalid_request_error"),
        ({"json": {}, "headers": {"Host": "evil.example"}}, 403, "permission_error"),
    ):
        answer = httpx2.post(live.url + PATH, **fields)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    live.engine.room = 0
    assert post(live).json()["error"]["type"] == "rate_limit_error"
    live.engine.room = 10**6
    live.frontend.draining = True
    assert post(live).json()["error"]["type"] == "overloaded_error"


def test_a_stream_ends_with_an_error_event(live, monkeypatch):
    monkeypatch.setattr(live.frontend, "settings", live.frontend.settings._replace(request_timeout=0.05))
    live.engine.pace = 0.03
    *_, last = events(live, max_tokens=50)
    assert last == {"type": "error", "error": {"type": "timeout_error", "message": "the timeout has passed"}}


def test_the_rest_of_a_call_comes_before_text():
    blocks = Blocks()
    blocks.push(MessagePart(calls=(CallPart(0, "c", "f", '{"a"'),)))
    blocks.push(MessagePart(content="So.", calls=(CallPart(0, None, None, ": 1}"),)))
    assert [(block.kind, block.text) for block in blocks.blocks] == [("call", '{"a": 1}'), ("text", "So.")]


@pytest.mark.slow  # for the time that its import takes
@pytest.mark.filterwarnings("ignore")
def test_anthropic(served):
    """Its own client with a key: messages, streams, tools, counting, errors."""
    anthropic = pytest.importorskip("anthropic", reason="the extra `clients` is not installed")
    engine = ScriptedEngine(served)
    frontend = Frontend(engine, served, Settings(port=0, api_keys=("sesame",), tool_call_parser="hermes"))
    fields = {"model": "embedded", "max_tokens": 100, "messages": HELLO, "extra_body": {"seed": 0}}
    with serving(frontend) as live:
        live.engine, live.model = engine, served
        with pytest.raises(anthropic.AuthenticationError):
            anthropic.Anthropic(base_url=live.url, api_key="wrong").messages.create(**fields)
        with anthropic.Anthropic(base_url=live.url, api_key="sesame", max_retries=0) as client:
            cards = list(client.models.list())
            assert [(card.type, card.display_name) for card in cards] == [("model", n) for n in served.names]
            assert all(card.created_at for card in cards)
            said = client.messages.create(**fields)
            assert said.content[0].text == SCRIPT and said.stop_reason == "end_turn"
            with client.messages.stream(**fields) as stream:
                assert "".join(stream.text_stream) == SCRIPT
                assert stream.get_final_message().usage == said.usage
            count = client.messages.count_tokens(model="embedded", messages=HELLO)
            assert count.input_tokens == said.usage.input_tokens + said.usage.cache_read_input_tokens
            scripted(live, HERMES, calls(HERMES, *BOTH))
            with client.messages.stream(**fields, tools=TOOLS) as stream:
                final = stream.get_final_message()
            assert [(use.name, use.input) for use in final.content] == [
                ("weather", ROME),
                ("clock", NO_ARGUMENTS),
            ]
            assert final.stop_reason == "tool_use"
            with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.role must be one of"):
                client.messages.create(**{**fields, "messages": [{"role": "tool", "content": "x"}]})
