"""Unmodified third-party clients against the real engine and the embedded model."""

import asyncio
import json
from typing import Literal

import pytest

from tests.marks import exhaustive

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
CODE = "def fibonacci(n):\n"
MESSAGES = [{"role": "user", "content": "import json"}]


@pytest.fixture
def client(real):
    openai = pytest.importorskip("openai", reason="the extra `clients` is not installed")
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_completions(client):
    options = {"model": "embedded", "prompt": CODE, "max_tokens": 12, "temperature": 0, "logprobs": 2}
    full = client.completions.create(**options)
    (choice,) = full.choices
    assert full.usage.completion_tokens == 12 and choice.finish_reason == "length"
    assert len(choice.logprobs.tokens) == 12
    assert "".join(choice.logprobs.tokens) == choice.text
    for logprob, top in zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True):
        assert logprob in top.values() and len(top) in (2, 3)
    pieces = list(client.completions.create(**options, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == choice.text


def test_openai_chat_and_streams(client):
    fields = {"model": "embedded", "messages": MESSAGES, "max_completion_tokens": 8, "seed": 7}
    choice = {"extra_body": {"structured_outputs": {"choice": ["import os", "import re"]}}}  # it has an end
    said = client.chat.completions.create(**fields, **choice).choices[0].message.content
    with client.chat.completions.stream(**fields, **choice) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content == said
    options = {"include_usage": True}
    *_, last = client.chat.completions.create(**fields, stream=True, stream_options=options)
    assert last.choices == [] and last.usage.completion_tokens == 8


def test_openai_async(real):
    openai = pytest.importorskip("openai", reason="the extra `clients` is not installed")

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{real.url}/v1", api_key="none") as client:
            chosen = lambda seed: client.chat.completions.create(
                model="embedded", messages=MESSAGES, max_tokens=6, seed=seed
            )
            answers = await asyncio.gather(*(chosen(seed) for seed in (1, 2, 1, 3, 1, 4)))
        return [answer.choices[0].message.content for answer in answers]

    said = asyncio.run(run())
    assert said[0] == said[2] == said[4]  # the same seed, with any neighbours


def test_openai_errors_and_models(client):
    import openai

    assert [model.id for model in client.models.list()] == ["embedded"]
    assert client.models.retrieve("embedded").id == "embedded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="embedded", prompt="x", temperature=-1)
    assert error.value.param == "temperature"


def test_openai_parses_what_a_schema_asks_for(client):
    from pydantic import BaseModel

    class Point(BaseModel):
        x: bool
        kind: Literal["cat", "dog"]

    fields = {"model": "embedded", "messages": MESSAGES, "max_tokens": 64, "seed": 1}
    (choice,) = client.chat.completions.parse(**fields, response_format=Point).choices
    assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Point)
    form = {"type": "json_schema", "json_schema": {"name": "point", "schema": Point.model_json_schema()}}
    (choice,) = client.chat.completions.create(**fields, response_format=form).choices
    assert choice.finish_reason == "stop" and Point.model_validate_json(choice.message.content)


def test_openai_responses(client):
    from pydantic import BaseModel

    class Answer(BaseModel):
        yes: bool

    fields = {"model": "embedded", "input": "import json", "extra_body": {"seed": 3}}
    said = client.responses.create(**fields, max_output_tokens=8)
    assert said.output_text and said.usage.output_tokens == 8 and said.status == "incomplete"
    with client.responses.stream(**fields, max_output_tokens=8) as stream:
        *events, last = stream
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert last.type == "response.incomplete" and "".join(deltas) == said.output_text
    assert isinstance(client.responses.parse(**fields, text_format=Answer).output_parsed, Answer)
    tool = {"type": "function", "strict": True, **PAINT["function"]}
    (call,) = client.responses.create(
        **fields, tools=[tool], tool_choice="required", parallel_tool_calls=False
    ).output
    assert valid(call.name, call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    stored = client.responses.create(**fields, max_output_tokens=8, store=True)
    again = {"model": "embedded", "previous_response_id": stored.id, "max_output_tokens": 8}
    assert client.responses.create(**again, input="import os").output_text
    assert client.responses.create(
        **{**again, "previous_response_id": None}, input=[call.model_dump(exclude_none=True), result]
    ).output_text


def test_anthropic(real):
    anthropic = pytest.importorskip("anthropic", reason="the extra `clients` is not installed")
    function = PAINT["function"]
    tool = {"name": "paint", "description": "Paints.", "input_schema": function["parameters"]}
    fields = {"model": "embedded", "max_tokens": 200, "extra_body": {"seed": 3}}
    with anthropic.Anthropic(base_url=real.url, api_key="none", max_retries=0) as client:
        said = client.messages.create(**{**fields, "max_tokens": 8}, messages=MESSAGES)
        assert said.stop_reason == "max_tokens" and said.usage.output_tokens == 8
        with client.messages.stream(**{**fields, "max_tokens": 8}, messages=MESSAGES) as stream:
            assert "".join(stream.text_stream) == said.content[0].text
        choice = {"type": "any", "disable_parallel_tool_use": True}
        answer = client.messages.create(**fields, messages=MESSAGES, tools=[tool], tool_choice=choice)
        (call,) = answer.content
        assert answer.stop_reason == "tool_use" and valid(call.name, json.dumps(call.input))
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
        added = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        with client.messages.stream(
            **fields, messages=[*MESSAGES, *added], tools=[tool], tool_choice=choice
        ) as stream:
            (call,) = stream.get_final_message().content
        assert valid(call.name, json.dumps(call.input))
        count = client.messages.count_tokens(model="embedded", messages=MESSAGES)
        assert count.input_tokens == said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize("preset", ["micro", "full", *exhaustive("full-lossy")])
def test_the_extension_through_openai(client, preset):
    extra = {"entropic": {"preset": preset, "target_entropy": 1.0, "trace": True}}
    answer = client.completions.create(
        model="embedded", prompt=CODE, max_tokens=20, seed=3, extra_body=extra, logprobs=0
    )
    summary = answer.choices[0].entropic
    assert summary["entropic_time"] >= 0 and summary["mean_entropy"] > 0 and summary["cost"] > 0
    assert len(summary["trace"]["entropy"]) == answer.usage.completion_tokens
    temperatures = [t for t in summary["trace"]["temperature"] if t is not None]
    assert len(set(temperatures)) > 3  # the law moves it
    assert answer.choices[0].logprobs.entropy == summary["trace"]["entropy"]


def test_langchain(real):
    chat = pytest.importorskip("langchain_openai", reason="the extra `clients` is not installed")
    options = {
        "base_url": f"{real.url}/v1",
        "api_key": "none",
        "model": "embedded",
        "max_tokens": 8,
        "seed": 5,
    }
    model = chat.ChatOpenAI(**options)
    said = model.invoke("import json")
    assert said.usage_metadata["output_tokens"] == 8
    assert "".join(piece.text for piece in model.stream("import json")) == said.text
    assert len(chat.OpenAI(**options).batch(["import json", "import os"])) == 2


def test_litellm(real, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks another host
    litellm = pytest.importorskip("litellm", reason="the extra `clients` is not installed")
    litellm.telemetry = False
    base = {"api_base": f"{real.url}/v1", "api_key": "none", "max_tokens": 8, "seed": 5}
    for provider in ("openai", "hosted_vllm"):
        options = {"model": f"{provider}/embedded", "messages": MESSAGES, **base}
        said = litellm.completion(**options).choices[0].message.content
        pieces = litellm.completion(**options, stream=True)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == said
    text = litellm.text_completion(model="text-completion-openai/embedded", prompt=CODE, **base)
    assert text.choices[0].text


PAINT = {
    "type": "function",
    "function": {
        "name": "paint",
        "description": "Paints a thing.",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "blue"]}, "twice": {"type": "boolean"}},
            "required": ["colour", "twice"],
            "additionalProperties": False,
        },
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SING = {"type": "function", "function": {"name": "sing", "parameters": NOTHING}}


def valid(name: str, arguments: str) -> bool:
    stated = json.loads(arguments)
    if name == "sing":
        return stated == {}
    return set(stated) == {"colour", "twice"} and stated["colour"] in ("red", "blue")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "paint"}}])
def test_openai_calls_tools(client, choice):
    """The grammar holds any model to a valid call, even one that knows no tools."""
    fields = {"model": "embedded", "max_completion_tokens": 200, "seed": 3, "parallel_tool_calls": False}
    fields |= {"tools": [PAINT] if isinstance(choice, dict) else [PAINT, SING], "tool_choice": choice}
    messages = [{"role": "user", "content": "Paint the door."}]
    (answer,) = client.chat.completions.create(messages=messages, **fields).choices
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and valid(call.function.name, call.function.arguments)
    if isinstance(choice, dict):
        assert call.function.name == "paint"
    with client.chat.completions.stream(messages=messages, **fields) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        (final,) = stream.get_final_completion().choices
    assert (done[0].name, done[0].arguments) == (call.function.name, call.function.arguments)
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    replies = [answer.message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    second = client.chat.completions.create(messages=[*messages, *replies], **fields).choices[0].message
    assert valid(second.tool_calls[0].function.name, second.tool_calls[0].function.arguments)


def test_langchain_calls_tools(real):
    chat = pytest.importorskip("langchain_openai", reason="the extra `clients` is not installed")
    model = chat.ChatOpenAI(
        base_url=f"{real.url}/v1", api_key="none", model="embedded", max_tokens=200, seed=5
    )
    said = model.bind_tools([PAINT], tool_choice="required").invoke("Paint the door.")
    assert said.tool_calls[0]["name"] == "paint" and not said.invalid_tool_calls
    for method in ("function_calling", "json_schema"):
        held = model.with_structured_output(PAINT["function"], method=method)
        assert held.invoke("Paint the door.")["colour"] in ("red", "blue"), method
