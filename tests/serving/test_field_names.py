"""Refusals name the field that the client sent, and what generates nothing is refused like what does."""

import argparse

import httpx2
import pytest

from entropic_jax.parameter_tables.speculation_names import read_config
from entropic_jax.parameter_tables.table import ParameterError
from entropic_jax.serving.commands import serve_options
from entropic_jax.serving.http.protocol import foreign_fields
from entropic_jax.serving.http.protocol.chat import ChatBody
from entropic_jax.serving.http.protocol.completion import CompletionBody
from entropic_jax.serving.http.protocol.messages import MessagesBody
from entropic_jax.serving.http.protocol.responses import ResponsesBody
from entropic_jax.serving.options import generation_config, lora
from entropic_jax.serving.request import RequestError

from .live import refused

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
ANTHROPIC = "/v1/messages"
BODIES = {COMPLETIONS: CompletionBody, CHAT: ChatBody, RESPONSES: ResponsesBody, ANTHROPIC: MessagesBody}
PROMPT, INPUT = {"prompt": "x"}, {"input": "x"}
MESSAGES = {"messages": [{"role": "user", "content": "x"}]}
DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (COMPLETIONS, {**PROMPT, "guided_regex": "("}, "guided_regex", "guided_regex must"),
        (CHAT, {**MESSAGES, "chat_template": "{{ x }}"}, "chat_template", "chat_template must be null; got"),
        (COMPLETIONS, {**PROMPT, "guided_json": {"type": "nope"}}, "guided_json", "guided_json must"),
        (CHAT, {**MESSAGES, "guided_grammar": "start: ("}, "guided_grammar", "guided_grammar must"),
        (
            CHAT,
            {**MESSAGES, "structured_outputs": {"json": {"type": "nope"}}},
            "structured_outputs.json",
            "structured_outputs.json must",
        ),
        (
            COMPLETIONS,
            {**PROMPT, "guided_choice": ["a"], "guided_regex": "a"},
            "guided_regex",
            "guided_regex must be the only guided_* field; got guided_regex and guided_choice",
        ),
        (
            COMPLETIONS,
            {**PROMPT, "guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
            "guided_regex must not be combined with response_format; got both",
        ),
        (
            COMPLETIONS,
            {**PROMPT, "max_tokens": 1, "min_tokens": 9},
            "min_tokens",
            "min_tokens must be at most max_tokens, 1; got 9",
        ),
        (
            CHAT,
            {**MESSAGES, "max_tokens": 9, "max_completion_tokens": 1, "min_tokens": 5},
            "min_tokens",
            "min_tokens must be at most max_completion_tokens, 1; got 5",
        ),
        (
            RESPONSES,
            {"input": "x", "max_output_tokens": 1, "min_tokens": 9},
            "min_tokens",
            "min_tokens must be at most max_output_tokens, 1; got 9",
        ),
    ],
)
def test_the_name_is_the_clients(live, path, body, param, said):
    error = refused(httpx2.post(f"{live.url}{path}", json=body), 400)
    assert error["param"] == param
    assert error["message"].startswith(said)


BAD = {"type": "object", "properties": {"x": {"type": "string", "pattern": "("}}}
GOOD = {"type": "object"}


@pytest.mark.parametrize(
    ("path", "tool", "more", "field"),
    [
        (CHAT, lambda function: {"type": "function", "function": function}, MESSAGES, "function.parameters"),
        (RESPONSES, lambda function: {"type": "function", **function}, {"input": "x"}, "parameters"),
        (
            "/v1/messages",
            lambda function: {"name": function["name"], "input_schema": function["parameters"]},
            {**MESSAGES, "max_tokens": 3},
            "input_schema",
        ),
    ],
    ids=["chat", "responses", "messages"],
)
def test_the_tool_with_a_bad_schema_is_named(live, path, tool, more, field):
    functions = [{"name": f"f{place}", "parameters": GOOD} for place in range(12)]
    functions[11]["parameters"] = BAD
    body = {"model": live.model.names[0], "tools": list(map(tool, functions)), **more}
    answer = httpx2.post(f"{live.url}{path}", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert message.startswith(
        f"tools.11.{field} must be a JSON schema that can be compiled: regex parse error"
    )


def test_the_tool_that_must_be_called_has_its_place_among_all(live):
    functions = [{"name": f"f{place}", "parameters": BAD if place == 2 else GOOD} for place in range(3)]
    tools = [{"type": "function", "function": function} for function in functions]
    choice = {"type": "function", "function": {"name": "f2"}}
    error = refused(
        httpx2.post(f"{live.url}{CHAT}", json={**MESSAGES, "tools": tools, "tool_choice": choice}), 400
    )
    assert error["param"] == "tools.2.function.parameters"


def test_plain_text_may_be_stated_beside_a_guided_field(live):
    body = {**PROMPT, "guided_choice": ["yes"], "response_format": {"type": "text"}, "max_tokens": 3}
    assert httpx2.post(f"{live.url}{COMPLETIONS}", json=body).status_code == 200


def test_a_default_gives_way_to_the_limit_of_a_request(live, monkeypatch):
    monkeypatch.setitem(live.model.defaults, "min_tokens", 50)
    assert httpx2.post(f"{live.url}{COMPLETIONS}", json={**PROMPT, "max_tokens": 2}).status_code == 200
    stated = {**PROMPT, "max_tokens": 2, "min_tokens": 50}
    assert refused(httpx2.post(f"{live.url}{COMPLETIONS}", json=stated), 400)["param"] == "min_tokens"


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": {"type": "nope"}}, "guided_json"),
        ({"entropic": {"preset": "micro", "lowest_temperature": 2}}, "entropic.lowest_temperature"),
    ],
    ids=["grammar", "control"],
)
def test_what_generates_nothing_is_checked_too(live, path, body, fields, param):
    for max_tokens in (0, 4):
        error = refused(
            httpx2.post(f"{live.url}{path}", json={**body, **fields, "max_tokens": max_tokens}), 400
        )
        assert error["param"] == param


def test_json_that_is_nested_too_deep_is_one_line():
    with pytest.raises(RequestError, match="must be a JSON object"):
        generation_config.override(DEEP)
    with pytest.raises(ParameterError, match="must be a JSON object"):
        read_config(DEEP)
    for read in (
        serve_options._resources,
        serve_options._origins,
        lambda text: lora.module('{"name":' + text),
    ):
        with pytest.raises(argparse.ArgumentTypeError) as caught:
            read(DEEP)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", ["{", '{"a": 1}', "[1]", '[""]', ",", ""])
def test_origins_that_are_none_are_refused(text):
    with pytest.raises(
        argparse.ArgumentTypeError, match="must be origins separated by commas, or a JSON list"
    ):
        serve_options._origins(text)


@pytest.mark.parametrize(
    ("path", "body", "fields", "said"),
    [
        (COMPLETIONS, PROMPT, {"regex": "a+"}, 'regex must be given as structured_outputs.regex; got "a+"'),
        (CHAT, MESSAGES, {"ebnf": 'root ::= "a"'}, "ebnf must be given as structured_outputs.grammar; got"),
        (
            CHAT,
            MESSAGES,
            {"grammar": 'root ::= "a"'},
            "grammar must be given as structured_outputs.grammar; got",
        ),
        (
            COMPLETIONS,
            PROMPT,
            {"json_schema": {}},
            "json_schema must be given as structured_outputs.json; got {}",
        ),
        (
            CHAT,
            MESSAGES,
            {"structural_tag": "{}"},
            "structural_tag must be given as tools or structured_outputs",
        ),
        (
            CHAT,
            MESSAGES,
            {"guided_json": {}, "guided_whitespace_pattern": " "},
            "guided_whitespace_pattern must be given as x-guidance.whitespace_pattern of the JSON",
        ),
        (
            COMPLETIONS,
            PROMPT,
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern must be given as x-guidance.whitespace_pattern of",
        ),
        (
            CHAT,
            MESSAGES,
            {"logits_processors": ["x"]},
            "logits_processors must be null, since the server runs no",
        ),
        (
            CHAT,
            MESSAGES,
            {"thinking_token_budget": 5},
            "thinking_token_budget must be null, since thoughts have",
        ),
        (
            CHAT,
            MESSAGES,
            {"modalities": ["text", "audio"]},
            'modalities must be null or ["text"]; got ["text", "a',
        ),
        (
            CHAT,
            MESSAGES,
            {"audio": {"voice": "x"}},
            "audio must be null, since the server writes text only; got",
        ),
        (CHAT, MESSAGES, {"functions": [{"name": "f"}]}, "functions must be given as tools; got "),
        (CHAT, MESSAGES, {"function_call": "auto"}, 'function_call must be given as tool_choice; got "auto"'),
        (CHAT, MESSAGES, {"stop_sequences": ["a"]}, 'stop_sequences must be given as stop; got ["a"]'),
        (COMPLETIONS, PROMPT, {"n_predict": 5}, "n_predict must be given as max_tokens; got 5"),
        (ANTHROPIC, MESSAGES, {"stop": ["a"]}, 'stop must be given as stop_sequences; got ["a"]'),
        (ANTHROPIC, MESSAGES, {"guided_regex": "a"}, "guided_regex must be sent to /v1/chat/completions, as"),
        (RESPONSES, INPUT, {"max_tokens": 5}, "max_tokens must be given as max_output_tokens; got 5"),
        (
            RESPONSES,
            INPUT,
            {"response_format": {"type": "text"}},
            "response_format must be given as text.format",
        ),
        (RESPONSES, INPUT, {"n": 2}, "n must be null or 1, since an answer is one text; got 2"),
    ],
)
def test_constraints_of_other_servers_are_refused_by_name(live, path, body, fields, said):
    body = {"max_tokens": 2, **body} if path == ANTHROPIC else body
    answer = httpx2.post(f"{live.url}{path}", json={**body, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"].startswith(said), error
    assert error.get("param", said).split(".")[0] in said


@pytest.mark.parametrize(
    ("path", "body", "table"),
    [
        (COMPLETIONS, PROMPT, foreign_fields.OF_COMPLETIONS),
        (CHAT, MESSAGES, foreign_fields.OF_CHAT),
        (ANTHROPIC, {**MESSAGES, "max_tokens": 2}, foreign_fields.OF_MESSAGES),
        (RESPONSES, INPUT, foreign_fields.OF_RESPONSES),
    ],
)
def test_null_and_what_asks_for_nothing_are_as_if_missing(live, path, body, table):
    nulls = {name: None for name in (*table, *foreign_fields.IGNORED) if "." not in name}
    harmless = {
        name: field.harmless[0] for name, field in table.items() if field.harmless and "." not in name
    }
    for stated in (nulls, harmless):
        answer = httpx2.post(f"{live.url}{path}", json={**stated, **body})
        assert answer.status_code == 200, answer.text
        assert "x-warning" not in answer.headers
    taken = {f.alias or name for name, f in BODIES[path].model_fields.items()}
    assert not taken & set(table), "a field that is both honoured and refused"


def test_fields_that_change_no_text_are_warned_of(live):
    answer = httpx2.post(f"{live.url}{COMPLETIONS}", json={**PROMPT, "guided_decoding_backend": "xgrammar"})
    assert answer.status_code == 200
    warning = "field guided_decoding_backend is ignored: llguidance compiles every grammar"
    assert answer.headers["x-warning"] == warning
