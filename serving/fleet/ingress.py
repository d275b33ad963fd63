"""Ingress of a fleet: forwards requests to replicas, and repeats those whose replica died unanswered."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from ray import exceptions
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..http.routes import errors, rendering
from .forwarding import Forwarded, ReplicaLostError, parsed, prefix_hashes, refusal

logger = logging.getLogger("entropic_jax.serving.fleet")
ATTEMPTS = 4  # replicas that a request is given to, one after the other
PAUSE = 0.5  # seconds before a further attempt, in which Ray learns of a death
PROBED, PROBE = ("/ready", "/health"), 4.0  # paths that must be answered soon, in seconds
# A replica is gone, or cannot be reached. Errors of the application are others.
LOST = (
    exceptions.RayActorError,
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
    exceptions.ObjectLostError,
    ReplicaLostError,
)
# Headers of one connection, and one that Ray's proxy adds itself, with the same value.
NOT_PASSED_ON = (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"x-request-id")
NO_REPLICA = "no replica has answered; try again later"
LAST_EVENTS = {  # by the beginning of the path
    "/v1/messages": (b"event: message_stop\n", b"event: error\n"),
    "/v1/responses": tuple(b"event: response.%s\n" % end for end in (b"completed", b"failed", b"incomplete")),
    "": (b"data: [DONE]\n",),
}
LOST_MIDWAY = "the replica that wrote this response is gone; the text so far is all of it"


class Beginning(NamedTuple):
    """The status, headers and first bytes of a response, and the iterator of the rest."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    rest: Any  # a DeploymentResponseGenerator

    @property
    def streams(self) -> bool:
        """Whether the response consists of server-sent events."""
        return any(n.lower() == b"content-type" and b"event-stream" in v for n, v in self.headers)


class Ingress:
    """The deployment that clients reach.

    Args:
        replicas: a handle of the replicas; its method `respond` streams messages.
        largest: largest body of a request, in bytes.
        timeout: seconds in which a response must begin; None for no limit.
    """

    def __init__(self, replicas: Any, largest: int, timeout: float | None) -> None:
        self.respond = replicas.options(method_name="respond", stream=True)
        self.largest, self.timeout = largest, timeout

    async def __call__(self, request: Request) -> Response:
        """Forward a request to a replica, and to another one if it dies before its answer begins."""
        path, body = request.url.path, bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self.largest:
                message = f"the body must have at most {self.largest} bytes; got at least {len(body)}"
                return errors.answer(413, message, path=path)
        fields = parsed(bytes(body))
        if (reason := refusal(path, fields)) is not None:
            return errors.answer(400, reason, path=path)
        client = request.client
        forwarded = Forwarded(
            method=request.method,
            path=path,
            query=request.scope["query_string"],
            headers=tuple((bytes(name), bytes(value)) for name, value in request.scope["headers"]),
            client=None if client is None else (client.host, client.port),
            body=bytes(body),
            hashes=prefix_hashes(fields),
        )
        try:
            async with asyncio.timeout(PROBE if path in PROBED else self.timeout):
                beginning = await self._begin(forwarded)
        except TimeoutError:
            beginning = None
        if beginning is None:
            return errors.answer(503, NO_REPLICA, headers={"Retry-After": "5"}, path=path)
        if beginning.streams:
            response: Response = StreamingResponse(events(beginning, path), beginning.status)
        else:
            response = Response(beginning.body, beginning.status)
        kept = [(name, value) for name, value in beginning.headers if name.lower() not in NOT_PASSED_ON]
        sized = [pair for pair in response.raw_headers if pair[0] == b"content-length"]
        response.raw_headers = [*kept, *sized]
        return response

    async def _begin(self, forwarded: Forwarded) -> Beginning | None:
        """The response, up to where the client may see it; None if every replica asked has died."""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(PAUSE)
            try:
                return await beginning_of(self.respond.remote(forwarded))
            except LOST as error:
                logger.warning("a replica has died; trying another", extra={"error": type(error).__name__})
        return None


async def beginning_of(messages: Any) -> Beginning:
    """A response up to its first bytes if it streams events, otherwise to its end."""
    try:
        start = await anext(messages)
        beginning = Beginning(start["status"], list(start["headers"]), b"", messages)
        pieces = []
        async for message in messages:
            pieces.append(message.get("body", b""))
            if pieces[-1] and beginning.streams:
                break
    except asyncio.CancelledError:  # the client has gone, or the time is over
        messages.cancel()
        raise
    return beginning._replace(body=b"".join(pieces))


async def events(beginning: Beginning, path: str) -> AsyncIterator[bytes]:
    """The bytes of a response that streams events; if its replica dies before the last, an error ends it.

    Args:
        beginning: the beginning of the response.
        path: the path of the request, which decides the form of that event.
    """
    count, ended = beginning.body.count(b"\n\n"), ends_stream(path, beginning.body)
    yield beginning.body
    try:
        async for message in beginning.rest:
            if piece := message.get("body", b""):
                count, ended = count + piece.count(b"\n\n"), ended or ends_stream(path, piece)
                yield piece
    except LOST as error:
        if not ended:
            logger.warning("a replica has died in a stream", extra={"error": type(error).__name__})
            yield last_event(path, count)
    except (asyncio.CancelledError, GeneratorExit):  # the client has gone
        beginning.rest.cancel()
        raise


def ends_stream(path: str, piece: bytes) -> bool:
    """Whether a part of a stream holds its last event.

    Args:
        path: the path of the request.
        piece: whole events; texts in them have no line breaks, so that none looks like the beginning of one.
    """
    for prefix, marks in LAST_EVENTS.items():
        if path.startswith(prefix):
            return any(mark in piece for mark in marks)
    return False


def last_event(path: str, count: int) -> bytes:
    """The error event that ends a stream after its replica has died.

    Args:
        path: the path of the request.
        count: the number of events before it.
    """
    if path.startswith("/v1/messages"):
        return rendering.named(errors.body(503, LOST_MIDWAY, path=path))
    if path.startswith("/v1/responses"):
        fields = {"code": "server_error", "message": LOST_MIDWAY, "param": None, "sequence_number": count}
        return rendering.named({"type": "error", **fields})
    return f"data: {json.dumps(errors.body(503, LOST_MIDWAY))}\n\ndata: [DONE]\n\n".encode()
