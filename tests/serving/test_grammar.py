"""Grammars that no text satisfies, or that fail midway, never yield a finished answer."""

import json
from types import SimpleNamespace

import httpx2
import llguidance
import pytest
from tokenizers import AddedToken

from entropic_jax import models
from entropic_jax.serving.engine.text_grammar import TextGrammar, known_tokens
from entropic_jax.serving.request import RequestError

from .live import refused

PATH = "/v1/completions"
NO_TEXT = "no token may come next"
HOPELESS = {
    "a schema that is itself": {"json": {"$ref": "#"}},
    "a rule that is itself": {"grammar": "start: start"},
    "an empty intersection": {"grammar": "start: A\nA: /a+/ & /b+/"},
}
ENDLESS = {
    "a property that is itself": {
        "json": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/b"}},
            "required": ["a"],
            "$defs": {"b": {"$ref": "#/$defs/b"}},
        }
    },
    "an object within each": {
        "json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    },
    "an item within each": {"json": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}},
    "as text": {"json": '{"type": "array", "items": {"$ref": "#"}, "minItems": 1}'},
}
BROKEN_LATER = {
    "an empty intersection": {"grammar": 'start: "ab" A\nA: /a+/ & /b+/'},
    "too many ways to go on": {"grammar": 'start: "a" start'},
}


def body(constraint: dict, **more) -> dict:
    return {"prompt": "x", "max_tokens": 40, "structured_outputs": constraint, **more}


@pytest.mark.parametrize("constraint", HOPELESS.values(), ids=HOPELESS)
def test_a_grammar_of_no_text_is_refused_before_it_starts(live, constraint):
    requests = len(live.engine.engine_requests)
    for stream in (False, True):
        error = refused(httpx2.post(live.url + PATH, json=body(constraint, stream=stream), timeout=60), 400)
        assert NO_TEXT in error["message"] and error["param"].startswith("structured_outputs.")
    assert len(live.engine.engine_requests) == requests


@pytest.mark.parametrize("constraint", ENDLESS.values(), ids=ENDLESS)
def test_a_schema_without_a_finite_value_is_refused_before_it_starts(live, constraint):
    requests = len(live.engine.engine_requests)
    for stream in (False, True):
        error = refused(httpx2.post(live.url + PATH, json=body(constraint, stream=stream), timeout=60), 400)
        assert error["message"].endswith("can satisfy: its schema admits no finite value")
        assert error["param"] == "structured_outputs.json"
    assert len(live.engine.engine_requests) == requests


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_tool_without_finite_arguments_is_refused(live, choice):
    schema = ENDLESS["an object within each"]["json"]
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    tools[1]["function"]["parameters"] = schema
    request = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": choice}
    error = refused(httpx2.post(f"{live.url}/v1/chat/completions", json=request, timeout=60), 400)
    assert error["param"] == "tools.1.function.parameters" and "admits no finite value" in error["message"]


@pytest.mark.parametrize("constraint", BROKEN_LATER.values(), ids=BROKEN_LATER)
def test_a_grammar_that_breaks_on_the_way_is_the_error_of_the_request(live, constraint):
    error = refused(httpx2.post(live.url + PATH, json=body(constraint), timeout=60), 400)
    assert "must be a grammar that a text can satisfy: " in error["message"]
    assert error["param"].startswith("structured_outputs.")
    text = httpx2.post(live.url + PATH, json=body(constraint, stream=True), timeout=60).text
    *pieces, last, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert done == "[DONE]" and json.loads(last)["error"]["code"] == 400
    assert all(json.loads(piece)["choices"][0]["finish_reason"] is None for piece in pieces)


def test_a_grammar_that_can_be_satisfied_is_finished(live):
    answer = httpx2.post(live.url + PATH, json=body({"grammar": 'start: "abc"'}), timeout=60).json()
    assert answer["choices"][0]["text"] == "abc" and answer["choices"][0]["finish_reason"] == "stop"


def test_tokens_that_the_model_has_no_ids_for_are_left_out():
    tokenizer = models.load(progress=False).tokenizer
    vocabulary, plain = tokenizer.vocabulary, tokenizer.backend.to_str()
    assert known_tokens(plain, vocabulary) == plain
    tokenizer.backend.add_tokens([AddedToken("[PAD]", special=True)])
    with pytest.raises(ValueError, match="vocab size too small"):
        llguidance.LLTokenizer(tokenizer.backend.to_str(), n_vocab=vocabulary)
    known = known_tokens(tokenizer.backend.to_str(), vocabulary)
    assert llguidance.LLTokenizer(known, n_vocab=vocabulary).vocab_size == vocabulary


def test_a_matcher_that_fails_as_it_takes_a_token_is_an_error():
    """And never the end of the text, although it has stopped."""
    matcher = SimpleNamespace(
        consume_token=lambda token: True,
        is_error=lambda: True,
        get_error=lambda: "too many items\nin row 3",
        is_stopped=lambda: True,
    )
    grammar = TextGrammar(matcher, 8, "structured_outputs.grammar")
    with pytest.raises(RequestError, match=r"that a text can satisfy: too many items$") as caught:
        grammar.accept(5)
    assert grammar.failure is caught.value and caught.value.param == "structured_outputs.grammar"


def test_the_error_of_a_token_that_may_not_come_is_that_of_the_matcher(served):
    tokenizer = llguidance.LLTokenizer(served.tokenizer.backend.to_str())
    matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from("lark", 'start: "abc"'), log_level=0)
    grammar = TextGrammar(matcher, tokenizer.vocab_size, "structured_outputs.grammar")
    (token,) = served.tokenizer.encode("z", special=False)
    with pytest.raises(RequestError, match="doesn't satisfy the grammar"):
        grammar.accept(token)
