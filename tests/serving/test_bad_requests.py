"""Requests with invalid bodies are refused with a message that names the field."""

import json

import httpx2
import pytest
from pydantic import TypeAdapter, ValidationError

from entropic_jax.serving.http.protocol import fields
from entropic_jax.serving.http.protocol.chat import ChatBody
from entropic_jax.serving.http.protocol.completion import CompletionBody
from entropic_jax.serving.http.protocol.embeddings import EmbeddingsBody, RerankBody
from entropic_jax.serving.http.protocol.fields import in_json
from entropic_jax.serving.http.protocol.messages import MessagesBody
from entropic_jax.serving.http.protocol.responses import ResponsesBody
from entropic_jax.serving.http.protocol.tokens import DetokenizeBody, TokenizeBody, TokenizeChatBody
from entropic_jax.serving.http.routes.unknown_fields import misspelled

from .live import refused

PATH = "/v1/completions"
ENDLESS = {"allOf": [{"type": "string", "pattern": f"a{number}.*"} for number in range(50)]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "prompt", "prompt is missing"),
        (
            {"prompt": "x", "max_tokens": -1},
            "max_tokens",
            "max_tokens must be an integer between 0 and 2147483647; got -1",
        ),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens", '"5"'),
        (
            {"prompt": "x", "temperature": True},
            "temperature",
            "temperature must be a number between 0 and 1000; got true",
        ),
        ({"prompt": "x", "n": 0}, "n", "n must be an integer between 1 and 128; got 0"),
        ({"prompt": "x", "request_id": "a\n"}, "request_id", r'; got "a\n"'),
        (
            {"prompt": "x", "suffix": "y"},
            "suffix",
            "suffix must be null for a model without fill-in-the-middle",
        ),
        (
            {"prompt": "x", "stop": ["a"] * 65},
            "stop",
            "stop must be a string of 1 to 1024 characters or a list of up to 64",
        ),
        (
            {"prompt": "x", "stop": ""},
            "stop",
            'stop must be a string of 1 to 1024 characters or a list of up to 64; got ""',
        ),
        (
            {"prompt": []},
            "prompt",
            "prompt must be a string, a list of token ids, or a list of these, none of them empty; got []",
        ),
        ({"prompt": [-1]}, "prompt", "or a list of these, none of them empty; got [-1]"),
        ({"prompt": ["x"] * 5000}, "prompt", "at most"),
        ({"prompt": [4096]}, "prompt", "prompt must hold token ids between 0 and 4095; got 4096"),
        ({"prompt": [1, "a"]}, "prompt", '; got [1, "a"]'),
        ({"prompt": [5] * 300}, "prompt", "maximum context length of 256 tokens; got 300"),
        ({"prompt": ["x"] * 600, "n": 2}, "prompt", "prompt must ask for at most 1024 texts; got 1200"),
        (
            {"prompt": "x", "logit_bias": {"a": 1}},
            "logit_bias",
            "logit_bias must be a mapping of up to 300 token ids",
        ),
        (
            {"prompt": "x", "logprobs": 21},
            "logprobs",
            "logprobs must be an integer between 0 and 20 or null; got 21",
        ),
        (
            {"prompt": "x", "entropic": {"preset": "none"}},
            "entropic.preset",
            "entropic.preset must be one of off, micro",
        ),
        (
            {"prompt": "x", "entropic": {"dropped_mass_limit": 2}},
            "entropic.dropped_mass_limit",
            "entropic.dropped_mass_limit must be a number at least 0 and below 1; got 2",
        ),
        (
            {"prompt": "x", "entropic": {"target_entropy": "high", "trace": "yes"}},
            "entropic.target_entropy",
            'entropic.target_entropy must be a number between 0 and 100 or "auto"; got "high"',
        ),
        ({"prompt": "x", "entropic": 3}, "entropic", "entropic must "),
        (
            {"prompt": "x", "entropic": {"target_entrpy": 1}},
            "entropic.target_entrpy",
            "entropic has no field target_entrpy; did you mean target_entropy?",
        ),
        (
            {"prompt": "x", "entropic": {"preset": "full", "frobnicate": 1}},
            "entropic.frobnicate",
            "entropic has no field frobnicate; its fields are preset, law, target_entropy,",
        ),
        ("text", None, "must be a JSON object"),
        (
            {
                "prompt": "x",
                "entropic": {"preset": "micro", "lowest_temperature": 2, "highest_temperature": 1},
            },
            "entropic.lowest_temperature",
            "entropic.lowest_temperature must be below highest_temperature = 1; got 2",
        ),
        (
            {"prompt": "x", "temperature": 0.7, "entropic": {"preset": "micro", "lowest_temperature": 5}},
            "entropic.lowest_temperature",
            "entropic.lowest_temperature must be at most temperature = 0.7 while highest_temperature is 0",
        ),
        (
            {"prompt": "x", "entropic": {"preset": "full", "branches": 2}},
            "entropic.branches",
            "entropic.branches needs the preset entropix; got the preset full",
        ),
        (
            {"prompt": "x", "entropic": {"preset": "off", "lowest_temperature": 0.5}},
            "entropic.lowest_temperature",
            "entropic.lowest_temperature must not be set with the preset off, which has no temperature law",
        ),
        ({"prompt": "x", "stream": "yes"}, "stream", 'stream must be true or false; got "yes"'),
        (
            {"prompt": "x", "deadline": 0},
            "deadline",
            "deadline must be a number above 0 and at most 86400; got 0",
        ),
        (
            {"prompt": "x", "structured_outputs": {"regex": "("}},
            "structured_outputs.regex",
            "structured_outputs.regex",
        ),
        (
            {"prompt": "x", "structured_outputs": {"regex": "a" * 70000}},
            "structured_outputs.regex",
            "characters as a grammar",
        ),
        (
            {"prompt": "x", "structured_outputs": {"json": ENDLESS}},
            "structured_outputs.json",
            "more than 1 s or 512 MiB to compile",
        ),
        (
            {"prompt": "x", "structured_outputs": {"foo": 1}},
            "structured_outputs",
            "structured_outputs must have one of json, regex, choice, grammar, json_object; got none",
        ),
        (
            {"prompt": "x", "structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
            "structured_outputs must have one constraint; got 2",
        ),
        (
            {
                "prompt": "x",
                "structured_outputs": {"regex": "a"},
                "response_format": {"type": "json_object"},
            },
            "response_format",
            "at most once",
        ),
        ({"prompt": "x", "guided_json": 1}, "guided_json", "guided_json must"),
        (
            {"prompt": "x", "use_beam_search": True},
            "use_beam_search",
            "use_beam_search must be false; got true",
        ),
        (
            {"prompt": "x", "use_beam_search": 0},
            "use_beam_search",
            "use_beam_search must be false; got 0",
        ),
        (
            {
                "prompt": "x",
                "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}},
            },
            "response_format.json_schema",
            "response_format.json_schema",
        ),
        (
            {"prompt": "x", "response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "response_format.json_schema is missing",
        ),
        (
            {"prompt": "x", "response_format": {"type": "xml"}},
            "response_format.type",
            "response_format.type must be one of 'text', 'json_object', 'json_schema'",
        ),
        ({"prompt": "x", "response_format": {}}, "response_format.type", "response_format.type is missing"),
        (
            {"prompt": 5},
            "prompt",
            "prompt must be a string, a list of token ids, or a list of these, none of them empty; got 5",
        ),
        ({"prompt": "x", "logit_bias": {"b": 1}}, "logit_bias", '; got {"b": 1}'),
        (
            {"prompt": "x", "stop_token_ids": [4096]},
            "stop_token_ids",
            "must hold token ids between 0 and 4095; got 4096",
        ),
        (
            {"prompt": "x", "allowed_token_ids": [7, 5000]},
            "allowed_token_ids",
            "must hold token ids between 0 and 4095; got 5000",
        ),
        (
            {"prompt": "x", "logit_bias": {"4096": 1}},
            "logit_bias",
            "must hold token ids between 0 and 4095; got 4096",
        ),
    ],
)
def test_a_wrong_body_is_refused_by_name(live, body, param, said):
    error = refused(httpx2.post(live.url + PATH, json=body, timeout=60), 400)
    assert said in error["message"]
    assert error["param"] == param
    assert error["type"] == "BadRequestError"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the body must be a JSON object"),
        (b"{", "the body must be JSON; got an error: "),
        (b"[]", "the body must be a JSON object"),
        (b'"x"', "the body must be a JSON object"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature must be a number between 0 and 1000; got NaN"),
        (b'{"prompt": "\\ud800"}', "the body must be Unicode; got a lone surrogate"),
        (
            b'{"prompt": "x", "seed": %s}' % (b"9" * 5000),
            "the body must be JSON with numbers of at most 4300",
        ),
        (b'{"prompt": %s}' % (b"[" * 10**5), "got a longer one, or deep nesting"),
        (b'{"prompt": %s%s}' % (b"[" * 900, b"]" * 900), "the body must not be nested as deeply"),
    ],
    ids=["nothing", "half", "list", "text", "NaN", "surrogate", "digits", "endless", "deep"],
)
def test_what_is_not_a_body_is_refused(live, content, said):
    headers = {"Content-Type": "application/json"}
    error = refused(httpx2.post(live.url + PATH, content=content, headers=headers), 400)
    assert said in error["message"]


CONVERSATION = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (CompletionBody, {"prompt": [1, "a"] * 500}),
        (CompletionBody, {"prompt": [[1, "a"]] * 500}),
        (CompletionBody, {"prompt": ["a"] * 70_000}),
        (CompletionBody, {"prompt": "a", "stop": [1] * 500}),
        (CompletionBody, {"prompt": "a", "allowed_token_ids": [-1] * 500}),
        (CompletionBody, {"prompt": "a", "logit_bias": {str(n): "x" for n in range(500)}}),
        (CompletionBody, {"prompt": "a", "entropic": {f"a{n}": 1 for n in range(500)}}),
        (CompletionBody, {"prompt": "a", "structured_outputs": {"choice": [""] * 500}}),
        (EmbeddingsBody, {"input": [[1]] * 70_000}),
        (EmbeddingsBody, {"input": [[]] * 500}),
        (RerankBody, {"query": "a", "documents": [1] * 500}),
        (DetokenizeBody, {"tokens": [-1] * 500}),
        (ChatBody, {"messages": [{"role": 5, "content": [{"type": "x"}] * 50}] * 500}),
        (ChatBody, {"messages": CONVERSATION, "tools": [{"type": "function"}] * 500}),
        (ChatBody, {"messages": CONVERSATION, "documents": [1] * 500}),
        (TokenizeBody | TokenizeChatBody, {"messages": [{}] * 500}),
        (MessagesBody, {"max_tokens": 1, "messages": [{"role": "user", "content": [{}] * 50}] * 500}),
        (MessagesBody, {"max_tokens": 1, "messages": CONVERSATION, "stop_sequences": [1] * 500}),
        (ResponsesBody, {"input": [{"role": "user", "content": [{}] * 50}] * 500}),
        (ResponsesBody, {"input": "a", "metadata": {str(n): 1 for n in range(500)}}),
        (ResponsesBody, {"input": "a", "include": [1] * 500}),
    ],
)
def test_a_body_of_many_errors_has_a_handful_reported(body, value):
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(body).validate_python(value)
    assert caught.value.error_count() <= 8


def test_token_ids_are_checked_without_a_call_for_each(monkeypatch):
    calls = []
    monkeypatch.setattr(fields, "_integral", lambda value: calls.append(value) or int(value))
    assert DetokenizeBody.model_validate({"tokens": [1] * 1000}).tokens == [1] * 1000
    assert not calls
    tokens = DetokenizeBody.model_validate({"tokens": [1.0, 2]}).tokens
    assert tokens == [1, 2] and {type(token) for token in tokens} == {int}


def test_the_value_in_a_message_is_written_as_far_as_it_is_shown():
    class Counted(list):
        items = 0

        def __iter__(self):
            for item in super().__iter__():
                self.items += 1
                yield item

    value = Counted([1] * 10_000)
    assert in_json(value) == json.dumps([1] * 99)[:57] + "..." and value.items < 100


def test_unknown_names_are_looked_at_as_far_as_they_are_reported():
    names = iter(["temprature", *(f"user_{n}" for n in range(1000))])
    assert misspelled(names, ["temperature"]) == [("temprature", "temperature")]
    assert sum(1 for _ in names) > 900


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (PATH, {"prompt": [[1]] * 70_000}, "prompt"),
        ("/v1/embeddings", {"input": [[1]] * 70_000}, "input"),
        ("/rerank", {"query": "a", "documents": ["a"] * 70_000}, "documents"),
        ("/v1/chat/completions", {"messages": CONVERSATION * 5000}, "messages"),
        ("/v1/responses", {"input": CONVERSATION * 5000}, "input"),
    ],
)
def test_a_list_that_is_too_long_is_called_that(live, path, body, param):
    error = refused(httpx2.post(live.url + path, json=body, timeout=60), 400)
    assert error["message"].startswith(f"{param} must have at most ") and error["param"] == param


def test_the_parts_of_a_conversation_are_bounded(live):
    parts = [{"type": "text", "text": "x"}] * 9000
    results = [{"type": "tool_result", "tool_use_id": "a", "content": parts}] * 2
    calls = [{"function": {"name": "f"}}] * 20_000
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}] * 2}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": calls}]}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": results}]}),
    ):
        answer = httpx2.post(live.url + path, json=body, timeout=60)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400
        assert message.startswith("messages must have at most 16384 parts and calls in all its messages; got")


def test_unknown_fields_are_left_alone(live):
    body = {"prompt": "x", "max_tokens": 1, "frobnicate": {"a": 1}, "user": "me", "store": False}
    assert httpx2.post(live.url + PATH, json=body).status_code == 200


@pytest.mark.parametrize("value", [0, 5, "yes"])
def test_a_flag_with_the_name_of_a_number_is_called_a_flag(live, value):
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": value}
    error = refused(httpx2.post(f"{live.url}/v1/chat/completions", json=body), 400)
    assert error["param"] == "logprobs" and "must be true or false" in error["message"]
    assert error["message"].endswith(f"got {json.dumps(value)}")


def test_a_field_called_query_is_named(live):
    for body in ({}, {"query": 1, "documents": ["b"]}):
        error = refused(httpx2.post(f"{live.url}/rerank", json=body), 400)
        assert error["param"] == "query" and error["message"].startswith("query ")


def test_texts_to_tokenize_are_a_prompt_or_messages(live):
    messages = [{"role": "user", "content": "x"}]
    error = refused(httpx2.post(f"{live.url}/tokenize", json={"prompt": "a", "messages": messages}), 400)
    assert error["message"] == "messages must not be combined with prompt; got both"
    assert error["param"] == "messages"


def test_a_trace_may_be_null(live):
    body = {"prompt": "x", "max_tokens": 1, "entropic": {"trace": None}}
    assert httpx2.post(live.url + PATH, json=body).status_code == 200


def test_json_has_no_infinite_bias(live):
    body = '{"prompt": "x", "logit_bias": {"1": -Infinity}}'
    error = refused(
        httpx2.post(live.url + PATH, content=body, headers={"Content-Type": "application/json"}), 400
    )
    assert "to numbers between -100 and 100; got" in error["message"] and error["param"] == "logit_bias"
