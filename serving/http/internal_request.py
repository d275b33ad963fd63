"""Internal requests: a body through the application as from a client, without the gate before it."""

import asyncio
import json
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

from . import log

INTERNAL = "entropic_jax.internal"  # key of a scope that no client can set


class InternalAnswer(NamedTuple):
    """The answer of the application."""

    status: int
    headers: Mapping[str, str]
    body: Any
    request_id: str


async def post(
    app: ASGIApp, path: str, body: Mapping[str, Any], owner: bytes | None, gone: asyncio.Event
) -> InternalAnswer:
    """The answer to a POST request.

    Args:
        app: the application, whose gate lets internal requests pass.
        path: the path that the request is for.
        body: the body, as JSON can hold it.
        owner: the digest of the API key that the request is made for.
        gone: set when the answer is no longer wanted, as if the client had disconnected.
    """
    content, sent, chunks = json.dumps(body).encode(), False, []
    head: dict[str, Any] = {}
    identity = uuid.uuid4().hex

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": content, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            head.update(message)
        else:
            chunks.append(message.get("body", b""))

    token = log.request_id.set(identity)
    try:
        await app(_scope(path, len(content), owner), receive, send)
    finally:
        log.request_id.reset(token)
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in head["headers"]}
    text = b"".join(chunks)
    return InternalAnswer(head["status"], headers, json.loads(text) if text else None, identity)


def _scope(path: str, size: int, owner: bytes | None) -> dict[str, Any]:
    headers = {b"content-type": b"application/json", b"content-length": str(size).encode()}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": list(headers.items()),
        "client": None,
        "server": None,
        "state": {"owner": owner},
        INTERNAL: True,
    }
