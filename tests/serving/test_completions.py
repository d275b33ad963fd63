"""`/v1/completions` over a scripted engine, on a real socket."""

import json

import httpx2
import pytest

from entropic_jax.serving.engine.grammar_forms import from_schema
from entropic_jax.serving.engine.text_grammar import Grammars

from .scripted_engine import SCRIPT

ADD = "def add(a, b):\n    return a + b\n"


def joined(lists) -> list:
    return [item for part in lists for item in part]


def complete(live, **body) -> dict:
    answer = httpx2.post(f"{live.url}/v1/completions", json={"prompt": "x = ", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(live, path="/v1/completions", **body) -> list[dict]:
    events = []
    with httpx2.stream("POST", live.url + path, json={"stream": True, **body}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line:
                assert line.startswith("data: ")
                events.append(line.removeprefix("data: "))
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def test_a_text(live):
    answer = complete(live, seed=0, max_tokens=100)
    (choice,) = answer["choices"]
    assert choice["text"] == SCRIPT
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    usage = answer["usage"]
    assert usage["completion_tokens"] == len(live.engine.tokens) + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert choice["entropic"] == {
        "entropic_time": 1.5,
        "mean_entropy": 0.5,
        "kept_fraction": 1.0,
    }


def test_defaults_are_those_of_openai_and_of_the_model(live):
    complete(live)
    request = live.engine.engine_requests[-1].request
    assert request.max_tokens == 16
    assert (request.temperature, request.top_p, request.repetition_penalty) == (0.8, 0.95, 1.1)
    assert (live.engine.engine_requests[-1].logprobs, live.engine.engine_requests[-1].timeout) == (
        None,
        30.0,
    )


def test_every_field_reaches_the_job(live):
    complete(
        live,
        max_tokens=7,
        min_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        typical_p=0.9,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"17": -100},
        seed=-2,
        stop=["@", "~~"],
        stop_token_ids=[9],
        include_stop_str_in_output=True,
        ignore_eos=True,
        priority=-3,
        deadline=2.5,
        entropic={"preset": "full-lossy", "target_entropy": 1.25, "law": "exact", "low_entropy": "auto"},
    )
    engine_request = live.engine.engine_requests[-1]
    request = engine_request.request
    assert (request.max_tokens, request.min_tokens, request.temperature, request.top_k) == (7, 2, 0.0, 0)
    assert (request.top_p, request.min_p, request.typical_p, request.repetition_penalty) == (
        0.5,
        0.1,
        0.9,
        1.5,
    )
    assert (request.presence_penalty, request.frequency_penalty) == (0.5, -0.5)
    assert (request.logit_bias, request.seed) == ({17: -100.0}, 2**31 - 2)
    assert (request.stop, request.stop_token_ids) == (("@", "~~"), (9,))
    assert request.include_stop_str_in_output and request.ignore_eos
    assert (engine_request.priority, engine_request.deadline) == (-3, 2.5)
    assert engine_request.control.preset == "full-lossy"
    assert dict(engine_request.control.gains) == {
        "law": "exact",
        "target_entropy": 1.25,
        "low_entropy": "auto",
    }


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("a", 1), (["a", "b"], 2), ([5, 6, 7], 1), ([[5], [6, 7]], 2)],
    ids=["text", "texts", "tokens", "lists of tokens"],
)
def test_prompts_of_every_form(live, prompt, count):
    answer = complete(live, prompt=prompt, n=2, seed=3)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * count))
    engine_requests = live.engine.engine_requests[-2 * count :]
    assert [engine_request.request.seed for engine_request in engine_requests] == [3, 4] * count
    assert len({engine_request.id for engine_request in engine_requests}) == 2 * count
    read = sum(len(engine_request.request.prompt) for engine_request in engine_requests[::2])
    assert answer["usage"]["prompt_tokens"] == read
    if prompt == [[5], [6, 7]]:
        assert engine_requests[2].request.prompt == (6, 7)
    if prompt == "a":
        assert engine_requests[0].request.prompt[0] == 0  # the model expects BOS before a text


def test_a_stream_says_what_the_whole_says(live):
    full = complete(live, seed=4, n=2, max_tokens=12, logprobs=2)
    events = stream(live, prompt="x = ", seed=4, n=2, max_tokens=12, logprobs=2)
    for choice in full["choices"]:
        pieces = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [piece["finish_reason"] for piece in pieces][-1] == choice["finish_reason"] == "length"
        for name, values in choice["logprobs"].items():
            assert joined(piece["logprobs"][name] for piece in pieces) == values
        assert pieces[-1]["entropic"] == choice["entropic"]
    assert all("usage" not in event for event in events)
    assert len({event["id"] for event in events}) == 1


def test_usage_in_streams(live):
    events = stream(live, prompt=[5, 6], max_tokens=3, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert {**events[-1]["usage"], "prompt_tokens_details": None} == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": None,
    }
    assert all(event["usage"] is None for event in events[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream(live, prompt=[5, 6], max_tokens=3, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-2:] == [3, 3]


def test_logprobs(live):
    (choice,) = complete(live, seed=0, max_tokens=3, logprobs=2)["choices"]
    said = choice["logprobs"]
    names = [live.model.token_text(token) for token in live.engine.tokens[:3]]
    assert said["tokens"] == names
    assert said["token_logprobs"] == [-0.25] * 3
    assert said["text_offset"] == [0, len(names[0]), len(names[0] + names[1])]
    assert all(top[name] == -0.25 for top, name in zip(said["top_logprobs"], names, strict=True))
    assert said["entropy"] == [0.0, 0.5, 1.0] and said["temperature"] == [0.75] * 3
    assert live.engine.engine_requests[-1].logprobs == 2
    (choice,) = complete(live, max_tokens=1, logprobs=0, return_tokens_as_token_ids=True, seed=0)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{live.engine.tokens[0]}"]
    assert list(choice["logprobs"]["top_logprobs"][0].values()) == [-0.25]


@pytest.mark.parametrize("streamed", [False, True])
def test_echo_with_logprobs_of_the_prompt(live, streamed):
    prompt = live.model.tokenizer.encode("x = 1", special=False)
    body = {
        "prompt": [prompt, prompt],
        "echo": True,
        "logprobs": 1,
        "max_tokens": 1,
        "temperature": 0,
        "seed": 0,
    }
    if streamed:
        events = [e["choices"][0] for e in stream(live, **body) if e["choices"][0]["index"] == 1]
        text = "".join(event["text"] for event in events)
        said = {name: joined(e["logprobs"][name] for e in events) for name in events[0]["logprobs"]}
    else:
        choices = complete(live, **body)["choices"]
        assert len(choices) == 2
        text, said = choices[1]["text"], choices[1]["logprobs"]
    assert text == "x = 1" + live.model.token_text(live.engine.tokens[0])
    assert len(said["tokens"]) == len(prompt) + 1
    assert said["token_logprobs"][0] is None and said["top_logprobs"][0] is None
    assert said["token_logprobs"][1:] == [-1.0] * (len(prompt) - 1) + [-0.25]
    assert said["text_offset"][-1] == len("x = 1")
    assert [text[at:][:1] for at in said["text_offset"]] == [name[0] for name in said["tokens"]]


def test_echo_alone_needs_no_model(live):
    engine_requests = len(live.engine.engine_requests)
    (choice,) = complete(live, prompt="x = 1", echo=True, max_tokens=0)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("x = 1", "length")
    assert len(live.engine.engine_requests) == engine_requests
    answer = complete(live, prompt="x = 1", echo=True, max_tokens=0, logprobs=1)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("x = 1", "length")
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0


def test_names_that_clash_keep_the_likeliest(live):
    from entropic_jax.serving.engine.interface import Alternative
    from entropic_jax.serving.http.routes.logprobs import listed

    top = (Alternative(1, -0.1), Alternative(2, -3.0))
    assert listed(2, -3.0, top, 2, lambda token: "\ufffd") == {"\ufffd": -0.1}


def test_prompt_logprobs_as_vllm_gives_them(live):
    (choice,) = complete(live, prompt=[5, 6], prompt_logprobs=1, max_tokens=1)["choices"]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second == {"6": {"logprob": -1.0, "rank": 1, "decoded_token": live.model.token_text(6)}}


def test_best_of_gives_the_likeliest(live):
    answer = complete(live, n=1, best_of=3, seed=0, max_tokens=2)
    assert [choice["index"] for choice in answer["choices"]] == [0]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 6
    assert complete(live, n=1, best_of=1)["choices"]
    events = stream(live, prompt="x = ", n=1, best_of=3, seed=0, max_tokens=2)
    assert [e["choices"][0]["text"] for e in events] == [answer["choices"][0]["text"]]


def test_an_empty_prompt_is_the_beginning_of_a_text(live):
    complete(live, prompt="", add_special_tokens=False, max_tokens=1)
    assert live.engine.engine_requests[-1].request.prompt == (0,)


@pytest.mark.parametrize("chat", [False, True])
def test_a_text_that_cannot_fit_is_refused_before_it_is_cut(live, monkeypatch, chat):
    monkeypatch.setattr(type(live.model.tokenizer), "encode", None)
    most = live.model.context * max(map(len, live.model.tokenizer.backend.get_vocab()))
    text = "a" * (most + 1)
    path, body = "/v1/completions", {"prompt": text}
    if chat:
        path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}
    answer = httpx2.post(live.url + path, json=body)
    assert answer.status_code == 400
    assert f"at most {most} characters; no token" in answer.json()["error"]["message"]


def test_stop_strings_and_their_reason(live):
    (choice,) = complete(live, seed=0, max_tokens=100, stop=["(a", "zz"])["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("def add", "stop", "(a")


def test_token_ids(live):
    (choice,) = complete(live, prompt=[5, 6], return_token_ids=True, max_tokens=2, seed=0)["choices"]
    assert choice["token_ids"] == live.engine.tokens[:2]
    assert choice["prompt_token_ids"] == [5, 6]


def test_traces(live):
    body = {"prompt": "x", "max_tokens": 3, "seed": 0, "entropic": {"trace": True}}
    (choice,) = complete(live, **body)["choices"]
    trace = choice["entropic"]["trace"]
    assert trace["token_ids"] == live.engine.tokens[:3]
    assert "".join(trace["text"]) == choice["text"]
    assert trace["entropy"] == [0.0, 0.5, 1.0] and trace["kept_fraction"] == [1.0] * 3
    assert trace["dropped_mass_limit"] == [None] * 3  # what the engine does not measure
    events = stream(live, **body)
    traces = [
        event["choices"][0]["entropic"]["trace"] for event in events if event["choices"][0].get("entropic")
    ]
    assert joined(piece["entropy"] for piece in traces) == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("constraint", "test"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, lambda text: text.isdigit() and len(text) == 3),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
        ({"structured_outputs": {"grammar": 'start: "ab" "c"'}}, lambda text: text == "abc"),
        ({"structured_outputs": {"grammar": 'root ::= "ab" "c"'}}, lambda text: text == "abc"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"enum": [{"a": 1}]}},
                }
            },
            lambda text: json.loads(text) == {"a": 1},
        ),
        ({"structured_outputs": {"json": {"const": [1, "b"]}}}, lambda text: json.loads(text) == [1, "b"]),
        ({"guided_json": {"const": [1, "b"]}}, lambda text: json.loads(text) == [1, "b"]),
        ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
    ],
    ids=["regex", "choice", "lark", "gbnf", "response_format", "json", "guided_json", "guided_choice"],
)
def test_a_text_is_what_it_must_be(live, constraint, test):
    (choice,) = complete(live, max_tokens=200, **constraint)["choices"]
    assert choice["finish_reason"] == "stop"
    assert test(choice["text"]), choice["text"]


@pytest.mark.parametrize(
    ("text", "allowed"),
    [('{"a": 1}', True), ('{\n    "a": 1\n}', True), ("{\n\n", False), ("{" + 20 * " ", False)],
)
def test_white_space_in_json_has_an_end(live, text, allowed):
    follower = Grammars(live.model, 10_000).compile("schema", from_schema("schema", {"type": "object"}))
    tokens = live.model.tokenizer.encode(text, special=False)
    assert (follower.matcher.try_consume_tokens(tokens) == len(tokens)) == allowed
