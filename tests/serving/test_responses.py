"""`/v1/responses` over a scripted engine: items, streams, stored responses, and OpenAI's own client."""

import json

import httpx2
import pytest

from entropic_jax.serving.http.response_store import ResponseStore
from entropic_jax.serving.http.tools.formats import HERMES

from .live import refused
from .scripted_engine import SCRIPT
from .test_tools import BOTH, NO_ARGUMENTS, ROME, TOOLS, calls, scripted

PATH = "/v1/responses"
SERVER_SETTINGS = {"tool_call_parser": "hermes", "api_keys": ("ours", "theirs")}
FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]


def send(live, method="POST", path=PATH, key="ours", **fields) -> httpx2.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx2.request(method, live.url + path, headers=headers, **fields)


def respond(live, **body) -> dict:
    answer = send(live, json={"input": "Hello", "seed": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(live, **body) -> list[dict]:
    answer = send(live, json={"input": "Hello", "seed": 0, "stream": True, **body})
    pairs = [event.split("\n") for event in answer.text.strip().split("\n\n")]
    trees = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {tree['type']}" for tree in trees]
    assert [tree["sequence_number"] for tree in trees] == list(range(len(trees)))
    return trees


def prompt(live) -> str:
    tokens = live.engine.engine_requests[-1].request.prompt
    return live.model.tokenizer.decode(tokens, skip_special=False).removeprefix("<|begin_of_text|>")


def plain(item: dict) -> dict:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def test_a_response(live):
    said = respond(live, instructions="Be brief.", max_output_tokens=100, metadata={"a": "b"})
    (item,) = said["output"]
    assert plain(item) == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": SCRIPT, "annotations": [], "logprobs": []}],
    }
    assert (said["object"], said["status"], said["error"]) == ("response", "completed", None)
    assert (said["metadata"], said["temperature"], said["max_output_tokens"]) == ({"a": "b"}, 0.8, 100)
    assert prompt(live) == "### System\nBe brief.\n\n### User\nHello\n\n### Assistant\n"
    request = live.engine.engine_requests[-1].request
    assert said["usage"]["input_tokens"] == len(request.prompt)
    assert said["usage"]["input_tokens_details"] == {"cached_tokens": 4}
    assert said["usage"]["total_tokens"] == len(request.prompt) + len(live.engine.tokens) + 1
    assert said["entropic"]["entropic_time"] == 1.5


def test_a_response_that_is_cut(live):
    said = respond(live, max_output_tokens=2)
    assert (said["status"], said["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert said["output"][0]["status"] == "incomplete"
    assert events(live, max_output_tokens=2)[-1]["type"] == "response.incomplete"


def test_events_add_up_to_the_response(live):
    scripted(live, HERMES, f"<think>hm</think>\n\nSo:\n{calls(HERMES, *BOTH)}")
    live.frontend.tool_calling.thinks = True
    said = respond(live, tools=FUNCTIONS)
    trees = events(live, tools=FUNCTIONS)
    kinds = [tree["type"] for tree in trees]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    last = trees[-1]["response"]
    assert [plain(item) for item in last["output"]] == [plain(item) for item in said["output"]]
    thought, text, *uses = said["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert text["content"][0]["text"] == "So:\n"
    assert [(use["name"], json.loads(use["arguments"])) for use in uses] == [
        ("weather", ROME),
        ("clock", NO_ARGUMENTS),
    ]
    assert 0 < said["usage"]["output_tokens_details"]["reasoning_tokens"] < said["usage"]["output_tokens"]
    for index, item in enumerate(last["output"]):
        of_item = [t for t in trees[2:-1] if t["output_index"] == index]
        assert of_item[0]["type"] == "response.output_item.added" and of_item[0]["item"]["id"] == item["id"]
        assert of_item[-1] == {**of_item[-1], "type": "response.output_item.done", "item": item}
        assert all(t["item_id"] == item["id"] for t in of_item[1:-1])
        grown = "".join(t["delta"] for t in of_item if t["type"].endswith(".delta"))
        assert grown == (item.get("arguments") or item["content"][0]["text"])


def test_items_become_messages(live):
    scripted(live, HERMES, "So.")
    items = [
        {"role": "developer", "content": "Be kind."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Hel"}, {"type": "input_text", "text": "lo"}],
        },
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    ]
    respond(live, input=items, instructions="Be brief.")
    assert prompt(live) == (
        "### System\nBe brief.\n\nBe kind.\n\n### User\nHello\n\n### Assistant\nLet me see.\n"
        '{"name": "weather", "arguments": {"city": "Rome"}}\n\n### Tool\nsunny\n\n### Assistant\n'
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_response_is_followed_read_and_forgotten(live, stream):
    if stream:
        first = events(live, instructions="Be brief.")[-1]["response"]
    else:
        first = respond(live, instructions="Be brief.")
    second = respond(live, input="More", previous_response_id=first["id"])
    said = SCRIPT.strip()
    assert prompt(live) == f"### User\nHello\n\n### Assistant\n{said}\n\n\n### User\nMore\n\n### Assistant\n"
    assert second["previous_response_id"] == first["id"]
    path = f"{PATH}/{first['id']}"
    assert send(live, "GET", path).json() == first
    for method in ("GET", "DELETE"):
        refused(send(live, method, path, key="theirs"), 404)
    body = {"input": "x", "previous_response_id": first["id"]}
    assert refused(send(live, json=body, key="theirs"), 400)["param"] == "previous_response_id"
    assert send(live, "PUT", path).headers["allow"] == "DELETE, GET"
    assert send(live, "DELETE", path).json() == {"id": first["id"], "object": "response", "deleted": True}
    refused(send(live, "GET", path), 404)
    assert send(live, "GET", f"{PATH}/{second['id']}").status_code == 200
    unstored = respond(live, store=False)
    refused(send(live, "GET", f"{PATH}/{unstored['id']}"), 404)


def test_the_store_is_bounded_and_responses_expire():
    current = 0.0
    store = ResponseStore(most=3, max_bytes=100, seconds=10, clock=lambda: current)
    assert store.put(b"us", {"id": "a"}, []) and not store.put(b"us", {"id": "b", "x": "y" * 100}, [])
    for number in range(10):
        store.put(None, {"id": str(number)}, [{"role": "user"}])
    assert store.get(b"us", "a") is None and store.get(None, "9") and 0 < store.size <= 100
    assert store.get(b"us", "9") is None and len(store) <= 3
    current = 10.0
    assert store.get(None, "9") is None and (store.size, len(store)) == (0, 0)


def test_a_schema_holds_the_text(live):
    form = {"type": "json_schema", "name": "a", "schema": {"const": {"a": True}}}
    said = respond(live, text={"format": form})
    assert json.loads(said["output"][0]["content"][0]["text"]) == {"a": True}
    assert said["text"] == {"format": form}


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"input": None}, "input", "input must"),
        (
            {"input": IMAGE},
            "input.0.content.0.type",
            "input.0.content.0.type must be one of 'input_text'",
        ),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input.0.type",
            "input.0.type must be one of 'message'",
        ),
        ({"input": "x " * 999}, "input", "input must have between 1 and 255 tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "tools.0.type must be 'function'"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice must be none or auto without tools"),
        ({"background": True}, "background", "background must"),
        ({"conversation": "conv_1"}, "conversation", 'conversation must be null; got "conv_1"'),
        ({"truncation": "auto"}, "truncation", "truncation must be 'disabled'"),
        ({"top_logprobs": 3}, "top_logprobs", "top_logprobs must be at most 0"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 3}}}},
            "text.format.schema",
            "text.format.schema must",
        ),
        (
            {"tools": FUNCTIONS, "text": {"format": {"type": "json_object"}}},
            "tool_choice",
            "with text.format; got",
        ),
        (
            {"previous_response_id": "resp_x"},
            "previous_response_id",
            "a stored response that has not expired",
        ),
        (
            {"max_output_tokens": 0},
            "max_output_tokens",
            "max_output_tokens must be at least 1",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(live, body, param, said):
    error = refused(send(live, json={"input": "Hello", **body}), 400)
    assert error["param"] == param and said in error["message"], error


def test_a_stream_ends_with_the_failure(live, monkeypatch):
    monkeypatch.setattr(live.frontend, "settings", live.frontend.settings._replace(request_timeout=0.05))
    live.engine.pace = 0.03
    last = events(live)[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the timeout has passed"}
    refused(send(live, "GET", f"{PATH}/{last['response']['id']}"), 404)


@pytest.mark.slow  # for the time that its import takes
@pytest.mark.filterwarnings("ignore")
def test_openai(live):
    """Its own client: responses, streams, parsing, tools, stored responses, errors."""
    openai = pytest.importorskip("openai", reason="the extra `clients` is not installed")
    from pydantic import BaseModel

    class Answer(BaseModel):
        yes: bool

    fields = {"model": "embedded", "input": "Hello", "extra_body": {"seed": 0}}
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="ours", max_retries=0) as client:
        said = client.responses.create(**fields)
        assert said.output_text == SCRIPT and said.status == "completed"
        with client.responses.stream(**fields) as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()
        assert "".join(deltas) == final.output_text == SCRIPT
        assert isinstance(client.responses.parse(**fields, text_format=Answer).output_parsed, Answer)
        more = client.responses.create(**fields, previous_response_id=said.id)
        assert client.responses.retrieve(more.id).output_text == SCRIPT
        client.responses.delete(more.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(more.id)
        with pytest.raises(openai.BadRequestError, match=r"input\.0\.role must") as error:
            client.responses.create(model="embedded", input=[{"role": "tool", "content": "x"}])
        assert error.value.param == "input.0.role"
        scripted(live, HERMES, calls(HERMES, *BOTH))
        with client.responses.stream(**fields, tools=FUNCTIONS) as stream:
            final = stream.get_final_response()
        assert [(call.name, json.loads(call.arguments)) for call in final.output] == list(BOTH)


def test_the_input_of_a_stored_response_is_listed(live):
    call = {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}"}
    items = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "So."},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "noon"},
        {"role": "user", "content": [{"type": "input_text", "text": "Go on"}]},
    ]
    name = respond(live, input=items)["id"]

    def listed(key="ours", **query):
        return send(live, "GET", f"{PATH}/{name}/input_items", key, params=query)

    page = listed(order="asc").json()
    assert [item["type"] for item in page["data"]] == [item.get("type", "message") for item in items]
    assert (page["object"], page["has_more"]) == ("list", False)
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
    assert plain(page["data"][1])["content"] == [{"type": "output_text", "text": "So.", "annotations": []}]
    assert page["data"][2].items() >= call.items()
    assert listed().json()["data"] == page["data"][::-1]  # the newest first, as OpenAI has it
    rest = listed(order="asc", after=page["first_id"], limit=2).json()
    assert rest["data"] == page["data"][1:3] and rest["has_more"]
    assert refused(listed(after="x"), 400)["param"] == "after"
    assert refused(listed(limit=0), 400)["param"] == "limit"
    refused(listed("theirs"), 404)
    follower = respond(live, input="more", previous_response_id=name)["id"]
    (item,) = send(live, "GET", f"{PATH}/{follower}/input_items").json()["data"]
    assert item["content"] == [{"type": "input_text", "text": "more"}] and item["role"] == "user"


def test_the_client_lists_the_input(live):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="ours") as client:
        name = client.responses.create(model="default", input="Hello").id
        (item,) = client.responses.input_items.list(name)
        assert item.content[0].text == "Hello"


def test_a_choice_among_some_tools(live):
    scripted(live, HERMES, calls(HERMES, BOTH[1]))
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    said = respond(live, tools=FUNCTIONS, tool_choice=choice)
    assert said["tool_choice"] == choice and said["output"][0]["name"] == "clock"
    unknown = {**choice, "tools": [{"type": "function", "name": "other"}]}
    answer = send(live, json={"input": "Hello", "tools": FUNCTIONS, "tool_choice": unknown})
    message = "tool_choice must name one of tools (weather, clock); got other"
    assert refused(answer, 400)["message"] == message


def test_a_wrong_entry_of_metadata_is_named(live):
    error = refused(send(live, json={"input": "Hello", "metadata": {"a": 1}}), 400)
    assert (error["message"], error["param"]) == ("metadata.a must be a string; got 1", "metadata.a")
