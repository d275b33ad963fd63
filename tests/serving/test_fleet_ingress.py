"""The ingress of a fleet over scripted replicas: what it retries, and how it ends what it cannot."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="pip install -e '.[ray]'")
pytest.importorskip("fastapi")

from ray.exceptions import ActorDiedError
from starlette.requests import Request

from entropic_jax.serving.fleet import ingress
from entropic_jax.serving.fleet import replica as replicas
from entropic_jax.serving.fleet.forwarding import Forwarded, ReplicaLostError, prefix_hashes

JSON, EVENTS = b"application/json", b"text/event-stream; charset=utf-8"


def start(content_type: bytes) -> dict[str, Any]:
    headers = [(b"content-type", content_type), (b"content-length", b"999"), (b"x-warning", b"w")]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def body(*pieces: bytes) -> list[dict[str, Any]]:
    return [{"type": "http.response.body", "body": piece} for piece in pieces]


class Messages:
    """The messages of a replica, then its death unless it is the end."""

    def __init__(
        self, messages: list[Any], dies: bool, hangs: bool = False, error: Exception | None = None
    ) -> None:
        self.left, self.dies, self.hangs, self.cancelled = list(messages), dies, hangs, False
        self.error = ActorDiedError() if error is None else error

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self.left:
            return self.left.pop(0)
        if self.hangs:
            await asyncio.sleep(60)
        if self.dies:
            raise self.error
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Answers the requests with scripts, one after the other."""

    def __init__(self, *scripts: Messages) -> None:
        self.scripts, self.requests = list(scripts), []

    def options(self, method_name: str, stream: bool) -> "Handle":
        assert (method_name, stream) == ("respond", True)
        return self

    def remote(self, forwarded):
        self.requests.append(forwarded)
        return self.scripts[len(self.requests) - 1]


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(ingress, "PAUSE", 0.0)


def ask(handle: Handle, path: str = "/v1/completions", sent: bytes = b'{"prompt": "p"}', **limits):
    """The status, headers and body of the answer to a request."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": sent, "more_body": False}

    async def answered() -> tuple[int, dict[bytes, bytes], bytes]:
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
        limits_of_all = {"largest": 1000, "timeout": 5.0} | limits
        response = await ingress.Ingress(handle, **limits_of_all)(Request(scope, receive))
        if hasattr(response, "body_iterator"):
            pieces = [piece async for piece in response.body_iterator]
            return response.status_code, dict(response.raw_headers), b"".join(pieces)
        return response.status_code, dict(response.raw_headers), response.body

    return asyncio.run(answered())


@pytest.mark.parametrize("content_type", [JSON, EVENTS])
@pytest.mark.parametrize("sent", [[], "start", "empty"])
def test_a_request_that_has_streamed_nothing_goes_to_another_replica(content_type, sent):
    begun = {"start": [start(content_type)], "empty": [start(content_type), *body(b"")]}.get(str(sent), [])
    handle = Handle(
        Messages(begun, dies=True), Messages([start(content_type), *body(b"x", b"y")], dies=False)
    )
    status, headers, text = ask(handle)
    assert (status, text, headers[b"x-warning"]) == (200, b"xy", b"w")
    assert headers.get(b"content-length") == (b"2" if content_type == JSON else None)
    assert len(handle.requests) == 2 and handle.requests[0] == handle.requests[1]
    assert handle.requests[0].hashes == prefix_hashes({"prompt": "p"})


@pytest.mark.parametrize("error", [ActorDiedError(), ReplicaLostError("the engine has failed: x")])
def test_an_answer_that_is_no_stream_is_retried_midway(error):
    dying = Messages([start(JSON), *body(b'{"half": ')], dies=True, error=error)
    assert ask(Handle(dying, Messages([start(JSON), *body(b"{}")], dies=False)))[2] == b"{}"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_that_had_begun_ends_with_an_error(path):
    handle = Handle(Messages([start(EVENTS), *body(b"data: 1\n\n")], dies=True))
    first, error, done = ask(handle, path)[2].decode().removesuffix("\n\n").split("\n\n")
    assert (first, done) == ("data: 1", "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
    assert len(handle.requests) == 1


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/completions", b"data: [DONE]\n\n"),
        ("/v1/messages", b"event: message_stop\ndata: {}\n\n"),
        ("/v1/responses", b"event: response.completed\ndata: {}\n\n"),
    ],
)
def test_a_stream_whose_last_event_has_come_is_whole(path, last):
    """The replica dies between that event and the end of its response."""
    handle = Handle(Messages([start(EVENTS), *body(b"data: 1\n\n", last)], dies=True))
    assert ask(handle, path)[2] == b"data: 1\n\n" + last


def test_streams_of_other_interfaces_end_with_their_own_errors():
    def last(path: str) -> Any:
        begun = [start(EVENTS), *body(b"event: a\ndata: {}\n\n", b"event: b\ndata: {}\n\n")]
        name, data = ask(Handle(Messages(begun, dies=True)), path)[2].decode().strip().split("\n")[-2:]
        assert name == "event: error"
        return json.loads(data.removeprefix("data: "))

    assert last("/v1/messages")["error"]["type"] == "overloaded_error"
    response = last("/v1/responses")
    assert (response["type"], response["code"], response["sequence_number"]) == ("error", "server_error", 2)


def test_503_after_every_attempt_has_failed():
    handle = Handle(*(Messages([], dies=True) for _ in range(ingress.ATTEMPTS)))
    status, headers, text = ask(handle)
    assert (status, headers[b"retry-after"]) == (503, b"5")
    assert json.loads(text)["error"]["message"] == ingress.NO_REPLICA
    assert len(handle.requests) == ingress.ATTEMPTS


def test_a_replica_that_hangs_is_given_up():
    hanging = Messages([start(JSON)], dies=False, hangs=True)
    assert ask(Handle(hanging), timeout=0.05)[0] == 503
    assert hanging.cancelled


def test_a_client_that_leaves_cancels_its_request():
    async def left() -> Messages:
        messages = Messages([start(EVENTS), *body(b"data: 1\n\n", b"data: 2\n\n")], dies=False, hangs=True)
        stream = ingress.events(await ingress.beginning_of(messages), "/v1/completions")
        assert await anext(stream) == b"data: 1\n\n"
        assert await anext(stream) == b"data: 2\n\n"
        await stream.aclose()
        return messages

    assert asyncio.run(left()).cancelled


def test_refusals_need_no_replica():
    assert ask(Handle(), "/metrics")[0] == 400
    assert ask(Handle(), sent=b'{"previous_response_id": "r"}')[0] == 400
    status, _, text = ask(Handle(), sent=b"x" * 1001)
    assert status == 413 and "at most 1000 bytes; got at least 1001" in json.loads(text)["error"]["message"]


@pytest.mark.parametrize("failure", [None, RuntimeError("process 1 of 2 has ended")])
def test_a_replica_whose_engine_has_failed_passes_nothing_on(monkeypatch, failure):
    """Its requests then go elsewhere, where an answer of the dying engine would be final."""
    pauses, sleep = [], asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: pauses.append(seconds) or sleep(0))
    sent = [start(JSON), *body(b"{}")]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in sent:
            await send(message)

    replica = replicas.Replica.__new__(replicas.Replica)
    replica.app = app
    replica.frontend = SimpleNamespace(
        engine=SimpleNamespace(failure=lambda: failure, close=lambda timeout: None),
        pools=SimpleNamespace(close=lambda: None),
    )

    async def respond() -> list[Any]:
        request = Forwarded("POST", "/v1/completions", b"", (), None, b"{}")
        return [message async for message in replica.respond(request)]

    if failure is None:
        assert asyncio.run(respond()) == sent
    else:
        with pytest.raises(ReplicaLostError, match="the engine has failed: process 1 of 2 has ended"):
            asyncio.run(respond())
        assert pauses == [replicas.NOTICED]  # Ray has the time to send requests elsewhere
