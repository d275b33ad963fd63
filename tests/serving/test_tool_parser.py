"""The parser of messages on texts that are long, or that no JSON parser takes."""

import json
import time

import pytest

from entropic_jax.serving.http.routes.blocks import Block
from entropic_jax.serving.http.routes.messages import _content
from entropic_jax.serving.http.routes.response_message import _is_object
from entropic_jax.serving.http.tools.formats import HERMES, JSON
from entropic_jax.serving.http.tools.parser import MessageParser
from entropic_jax.serving.request import RequestError
from entropic_jax.serving.request.chat_template import template_message
from entropic_jax.serving.request.transcript import Token

from .test_tools import parsed

LENGTH, PIECE = 40_000, 4  # characters
DEEP = "[" * 20_000

UNENDED = [
    '{"name": "' + LENGTH * "a",
    '{"name": "' + LENGTH * "\\a",
    '{"a": {}, "b": "' + LENGTH * "x",
    '{"a": {}, "b": [' + LENGTH * "1,",
    '{"name": "\n", "arguments": ' + LENGTH * "{}",
]


@pytest.mark.parametrize("text", UNENDED)
def test_the_work_for_a_token_does_not_grow_with_the_text(text):
    text = text[:LENGTH]
    parser, start = MessageParser(JSON, None), time.process_time()
    parts = [parser.push([Token(0, text[i : i + PIECE], {})]) for i in range(0, LENGTH, PIECE)]
    parts.append(parser.finish())
    assert time.process_time() - start < 2  # it took five where it began at the front again
    assert "".join(part.content for part in parts) == text


@pytest.mark.parametrize(
    "text",
    [
        '{"a": ' + DEEP,
        '{"a": ' + DEEP + "]" * len(DEEP) + "}",
        '{"name": "f", "arguments": ' + DEEP + "]" * len(DEEP) + "}",
        '{"name": "two\nlines", "arguments": {}}',
        '{"name": "\\q", "arguments": {}}',
        '{"name" "f"} and more',
    ],
)
def test_what_no_parser_of_json_takes_is_content(text):
    for length in (len(text), 1000):
        pieces = [text[i : i + length] for i in range(0, len(text), length)]
        assert parsed(JSON, pieces) == (text, "", [])
        assert parsed(HERMES, ["<tool_call>", *pieces]) == ("<tool_call>" + text, "", [])


def test_a_call_with_a_very_long_name_is_read_once_it_has_ended():
    name, arguments = "f" * 10_000, {"x": "}"}
    text = f'{{"name": "{name}", "arguments": {json.dumps(arguments)}}}'
    pieces = [text[i : i + 7] for i in range(0, len(text), 7)]
    assert parsed(JSON, pieces) == ("", "", [(name, json.dumps(arguments))])


def test_arguments_that_are_nested_deeply_are_no_object():
    text = '{"a": ' + DEEP + "]" * len(DEEP) + "}"
    assert _content(Block("call", 0, "id", "f", text))["input"] == {}
    assert not _is_object(text)
    call = {"function": {"name": "f", "arguments": text}}
    with pytest.raises(RequestError, match="arguments are JSON objects"):
        template_message({"role": "assistant", "content": "", "tool_calls": [call]}, "messages[0]")
