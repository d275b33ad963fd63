"""Allowed tokens, bad words, and constraints that cannot be kept."""

import logging

import httpx2
import numpy as np
import pytest

from entropic_jax.serving.engine.interface import EngineRequest, Grammar
from entropic_jax.serving.engine.token_rules import TokenRules, token_rules
from entropic_jax.serving.request import Request, RequestError

from .live import refused

PATH = "/v1/completions"


def allowed(rules: TokenRules) -> list[int]:
    """The tokens that may come next."""
    bits = np.unpackbits(rules.mask().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


class Even(Grammar):
    """A grammar of even tokens, which ends after token 6."""

    failure: RequestError | None = None

    def mask(self) -> np.ndarray:
        bits = np.zeros(64, np.uint8)
        bits[:40:2] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> bool:
        return token != 6


def test_allowed_tokens_are_all_that_may_come():
    rules = TokenRules(40, (3, 5, 39), ())
    assert allowed(rules) == [3, 5, 39]
    assert rules.accept(5) and allowed(rules) == [3, 5, 39]


def test_a_bad_word_is_banned_at_its_last_token_only():
    rules = TokenRules(40, (), [(7,), (1, 2, 3)])
    others = [token for token in range(40) if token != 7]
    assert allowed(rules) == others
    for token, banned in ((1, None), (2, 3), (1, None), (1, None), (2, 3), (9, None), (2, None)):
        rules.accept(token)
        assert allowed(rules) == [other for other in others if other != banned]


def test_rules_hold_beside_a_grammar():
    rules = TokenRules(40, (2, 3, 4, 6), [(4,)], Even())
    assert allowed(rules) == [2, 6]
    assert rules.accept(2) and not rules.accept(6)
    with pytest.raises(RequestError, match="allowed_token_ids must leave a token") as error:
        TokenRules(40, (3,), (), Even()).mask()
    assert error.value.param == "allowed_token_ids"


def test_words_are_banned_with_and_without_a_space(served):
    request = Request(prompt=(1,), bad_words=["return", "def add"])
    rules = token_rules(EngineRequest(id="x", request=request), served.tokenizer, served.vocabulary)
    assert rules is not None
    texts = {served.tokenizer.decode(word) for word in rules.bad_words}
    assert texts == {"return", " return", "def add", " def add"}
    assert token_rules(EngineRequest(id="x", request=Request(prompt=(1,))), served.tokenizer, 40) is None


def test_http_passes_them_on_and_refuses_what_cannot_be(live):
    body = {"prompt": "x", "max_tokens": 1}
    stated = {"allowed_token_ids": [5, 6], "bad_words": ["a"], "use_beam_search": False}
    assert httpx2.post(live.url + PATH, json={**body, **stated}).status_code == 200
    request = live.engine.engine_requests[-1].request
    assert (request.allowed_token_ids, request.bad_words) == ((5, 6), ("a",))
    for name, value in (
        ("use_beam_search", True),
        ("allowed_token_ids", [4096]),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", []),
        ("bad_words", [""]),
    ):
        assert refused(httpx2.post(live.url + PATH, json={**body, name: value}), 400)["param"] == name
    assert httpx2.post(live.url + PATH, json={**body, "allowed_token_ids": None}).status_code == 200
    assert live.engine.engine_requests[-1].request.allowed_token_ids is None


@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_look_like_known_ones_are_warned_of(live, caplog, stream):
    logging.getLogger("entropic_jax").propagate = True
    body = {"prompt": "x", "max_tokens": 1, "stream": stream, "temprature": 0.5, "guided_regx": "a"}
    with caplog.at_level(logging.WARNING, "entropic_jax.serving.requests"):
        answer = httpx2.post(live.url + PATH, json=body)
    assert answer.status_code == 200
    expected = "unknown field temprature: did you mean temperature?; unknown field guided_regx: did you mean "
    assert answer.headers["x-warning"] == f"{expected}guided_regex?"
    assert any(record.message == "unknown fields" for record in caplog.records)
    plain = {
        "prompt": "x",
        "max_tokens": 1,
        "user": "me",
        "store": False,
        "metadata": {},
        "guided_regex": "a",
    }
    assert "x-warning" not in httpx2.post(live.url + PATH, json=plain).headers


HELLO = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "body", "close"),
    [
        ("/tokenize", {"prompt": "x", "add_special_token": False}, "add_special_tokens"),
        ("/tokenize", {"messages": HELLO, "add_generation_promt": False}, "add_generation_prompt"),
        ("/detokenize", {"tokens": [1], "modle": "m"}, "model"),
        ("/v1/messages/count_tokens", {"model": "m", "messages": HELLO, "sytem": "x"}, "system"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_requests_without_an_engine_are_warned_of_as_well(live, path, body, close):
    body = {**body, "model": live.frontend.model.names[0]} if "model" in body else body
    answer = httpx2.post(live.url + path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-warning"].endswith(f"did you mean {close}?")
    (misspelt,) = [name for name in body if name in answer.headers["x-warning"].split(":")[0]]
    del body[misspelt]
    assert "x-warning" not in httpx2.post(live.url + path, json=body).headers
