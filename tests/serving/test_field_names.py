"""Refusals name the field that the client sent, and what generates nothing is refused like what does."""

import argparse

import httpx2
import pytest

from entropic_jax.parameter_tables.speculation_names import read_config
from entropic_jax.parameter_tables.table import ParameterError
from entropic_jax.serving.commands import serve_options
from entropic_jax.serving.options import generation_config, lora
from entropic_jax.serving.request import RequestError

from .live import refused

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PROMPT = {"prompt": "x"}
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
