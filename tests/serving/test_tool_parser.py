"""The parser of messages on texts that are long, or that no JSON parser takes."""

import json
import random
import time

import pytest

from entropic_jax.serving.http.routes.blocks import Block
from entropic_jax.serving.http.routes.messages import _content
from entropic_jax.serving.http.routes.response_message import _is_object
from entropic_jax.serving.http.tools.formats import FORMATS, HERMES, JSON, LLAMA3_JSON, MISTRAL
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


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>"),
    *(" ", "\n", "text", "é", "💩", "<", "{", "}", "[", "]", ",", ";", '"', "\\"),
    *('{"name": "f", "arguments": ', '{"a": 1}', '{"name": 5}', '{"name": "h"}', '{"name": "z"} '),
    *('{"arguments": {}, "name": "k"}', '{"name": "z", "arguments": "s"}', '{"name": "z", "arguments": [1]}'),
    '{"name": "g", "parameters": {"x": "}"}}',
]


def pieces_of(text: str, ends: list[int]) -> list[str]:
    return [text[i:j] for i, j in zip([0, *ends], [*ends, len(text)], strict=True)]


def test_content_and_calls_do_not_depend_on_the_pieces():
    """Of texts that mix parts of calls; one without calls is content as it is."""
    draw, called = random.Random(0), 0
    for _ in range(1000):
        text = "".join(draw.choices(FRAGMENTS, k=draw.randint(1, 9)))
        form, reasoning = draw.choice([*FORMATS.values()]), draw.choice([None, False, True])
        expected = parsed(form, [text], reasoning)
        for ends in (
            [*range(1, len(text))],
            *(sorted(draw.sample(range(len(text) + 1), min(3, len(text)))) for _ in range(3)),
        ):
            assert parsed(form, pieces_of(text, ends), reasoning) == expected, (form.name, text, ends)
        called += bool(expected[2])
        assert reasoning is not None or expected[2] or expected[0] == text, (form.name, text)
    assert called > 50


WRITTEN, PAIR = '{"name": "f", "arguments": {}}', ("f", "{}")
MARKED = f"<tool_call>\n{WRITTEN}\n</tool_call>"


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, f"{MARKED}\n<b> is\n bold \n{MARKED}\n ", "\n<b> is\n bold \n", [PAIR] * 2),
        (HERMES, f"{MARKED}\n<tool", "\n<tool", [PAIR]),
        (HERMES, f"{MARKED}\n\n{MARKED} \n", "", [PAIR] * 2),
        (HERMES, f"{MARKED}\n<tool_call>\n{{", "", [PAIR]),  # the second is cut
        (HERMES, f"a <tool_call> begins one: {MARKED}", "a <tool_call> begins one: ", [PAIR]),
        (HERMES, "such as <tool_call>", "such as <tool_call>", []),
        (HERMES, '<tool_call>\n{"a": 1}\n</tool_call>', '<tool_call>\n{"a": 1}\n</tool_call>', []),
        (MISTRAL, f"[TOOL_CALLS][{WRITTEN}, {WRITTEN}] a  b", " a  b", [PAIR] * 2),
        (MISTRAL, f"[TOOL_CALLS][{WRITTEN}, a  b", ", a  b", [PAIR]),
        (JSON, f"{WRITTEN}\n{WRITTEN}\na  b\n c", "a  b\n c", [PAIR] * 2),
        (LLAMA3_JSON, f"<|python_tag|>{WRITTEN}; {WRITTEN} a  b", "a  b", [PAIR] * 2),
        (LLAMA3_JSON, ' <|python_tag|> {"a": 1} b', ' <|python_tag|> {"a": 1} b', []),
    ],
)
def test_text_around_calls(form, text, content, calls):
    for ends in ([], [*range(1, len(text))]):
        assert parsed(form, pieces_of(text, ends)) == (content, "", calls)
