"""`/v1/chat/completions` and the tokenizer endpoints over a scripted engine."""

import httpx2
import pytest

from entropic_jax.serving.request.chat_template import DEFAULT_TEMPLATE

from .live import refused
from .scripted_engine import SCRIPT
from .test_completions import joined, stream
from .test_tools import TOOLS

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
PATH = "/v1/chat/completions"


def chat(live, **body) -> dict:
    answer = httpx2.post(live.url + PATH, json={"messages": HELLO, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt(live) -> str:
    return live.model.tokenizer.decode(live.engine.engine_requests[-1].request.prompt, skip_special=False)


def test_an_answer(live):
    answer = chat(live, seed=0)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": SCRIPT}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    request = live.engine.engine_requests[-1].request
    assert request.max_tokens == live.model.context - len(request.prompt)  # all that is left
    begin = live.model.tokenizer.bos_token
    assert prompt(live) == f"{begin}### System\nBe brief.\n\n### User\nHello\n\n### Assistant\n"


def test_logprobs_of_the_prompt_as_vllm_gives_them(live):
    answer = chat(live, prompt_logprobs=2, max_tokens=1)
    tokens = live.engine.engine_requests[-1].request.prompt
    first, *others = answer["prompt_logprobs"]
    assert first is None and len(others) == len(tokens) - 1 > 1
    for token, entry in zip(tokens[1:], others, strict=True):
        assert entry[str(token)] == {
            "logprob": -1.0,
            "rank": 1,
            "decoded_token": live.model.token_text(token),
        }
        assert len(entry) == 2
    # A prompt alone, as for completions.
    answer = chat(live, prompt_logprobs=0, max_tokens=0, n=2)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["", ""]
    assert len(answer["prompt_logprobs"]) == len(tokens)
    assert "prompt_logprobs" not in chat(live, max_tokens=1)


def test_a_streamed_chat_has_no_logprobs_of_its_prompt(live):
    body = {"messages": HELLO, "stream": True, "prompt_logprobs": 1}
    error = refused(httpx2.post(live.url + PATH, json=body), 400)
    assert error["param"] == "prompt_logprobs"
    assert error["message"] == "prompt_logprobs must be null in a stream of a chat; got 1"


def test_parts_and_other_fields_of_messages(live):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    chat(live, messages=[{"role": "user", "content": parts, "name": "x"}])
    assert "### User\nHello\n" in prompt(live)


def test_the_last_message_is_continued(live):
    messages = [*HELLO, {"role": "assistant", "content": "Hi th"}]
    chat(live, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert prompt(live).endswith("### Assistant\nHi th")


def test_max_completion_tokens_takes_the_place_of_max_tokens(live):
    chat(live, max_tokens=9, max_completion_tokens=3)
    assert live.engine.engine_requests[-1].request.max_tokens == 3


def test_a_stream(live):
    events = stream(live, PATH, messages=HELLO, seed=1, n=2, max_tokens=5, logprobs=True, top_logprobs=2)
    full = chat(live, seed=1, n=2, max_tokens=5, logprobs=True, top_logprobs=2)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    for choice in full["choices"]:
        pieces = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(piece["delta"].get("content", "") for piece in pieces) == choice["message"]["content"]
        said = joined(piece["logprobs"]["content"] for piece in pieces if piece["logprobs"])
        assert said == choice["logprobs"]["content"]
        assert pieces[-1]["finish_reason"] == "length"


def test_logprobs(live):
    (choice,) = chat(live, seed=0, max_tokens=1, logprobs=True, top_logprobs=2)["choices"]
    (entry,) = choice["logprobs"]["content"]
    name = live.model.token_text(live.engine.tokens[0])
    assert (entry["token"], entry["logprob"], bytes(entry["bytes"]).decode()) == (name, -0.25, name)
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.25, -1.25]
    assert (entry["entropy"], entry["temperature"]) == (0.0, 0.75)


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": []},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"tool_choice": "required"},
        {"max_tokens": 3, "min_tokens": -4},
        {"max_tokens": 3, "min_tokens": 4},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"self": 1}},
        {"chat_template_kwargs": {"add_generation_prompt": "x"}},
        {"chat_template_kwargs": {"continue_final_message": True}},
    ],
)
def test_what_is_wrong_is_refused(live, wrong):
    answer = httpx2.post(live.url + PATH, json={"messages": HELLO, **wrong})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "BadRequestError"
    assert answer.json()["error"]["param"].partition(".")[0] in wrong


def test_there_and_back(live):
    text = "def f(x):\n    return 'é'"
    tokenized = httpx2.post(f"{live.url}/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert tokenized["tokens"] == live.model.tokenizer.encode(text)
    assert (tokenized["count"], tokenized["max_model_len"]) == (len(tokenized["tokens"]), live.model.context)
    assert len(tokenized["token_strs"]) == tokenized["count"]
    back = httpx2.post(f"{live.url}/detokenize", json={"tokens": tokenized["tokens"]}).json()
    assert back == {"prompt": live.model.tokenizer.bos_token + text}
    bare = httpx2.post(f"{live.url}/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert bare["tokens"] == tokenized["tokens"][1:]
    eos = live.model.tokenizer.eos_token
    assert httpx2.post(f"{live.url}/tokenize", json={"prompt": eos, "add_special_tokens": False}).json()[
        "tokens"
    ] == [1]


@pytest.mark.parametrize("extra", [{}, {"tools": TOOLS}, {"documents": [{"text": "Rome is in Italy."}]}])
def test_tokens_of_a_conversation(live, monkeypatch, extra):
    template = "{{ bos_token }}{{ documents | tojson }}{{ messages | tojson }}{{ tools | tojson }}"
    monkeypatch.setattr(live.model.tokenizer, "chat_template", template)
    tokenized = httpx2.post(f"{live.url}/tokenize", json={"messages": HELLO, **extra}).json()
    chat(live, **extra)
    assert tuple(tokenized["tokens"]) == live.engine.engine_requests[-1].request.prompt
    assert ("Rome" in prompt(live)) == ("documents" in extra)


def test_tokenizer_info(live):
    info = httpx2.get(f"{live.url}/tokenizer_info").json()
    assert info["eos_token"] == "<|end_of_text|>" and info["bos_token"] == "<|begin_of_text|>"
    assert info["chat_template"] == DEFAULT_TEMPLATE
