"""A minimal HTTP/1.1 client for the load generator, with little work per chunk.

The client often shares its cores with the server that it measures. It reads asyncio streams directly, keeps
connections open between requests, follows no redirects, and supports `Content-Length`, chunked bodies and
bodies that end with the connection.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from ..request import RequestError

LINE = 1 << 22  # most bytes of one line; a chunk with the log-probabilities of a long prompt is that long


class BrokenOffError(ConnectionError):
    """The server closed the connection early, or its response is not HTTP."""


class Response:
    """Status and headers (names in lower case) of a response whose body has not been read.

    Args:
        pool: takes the connection back.
        streams: reader and writer of the connection.
        status: HTTP status.
        headers: by name in lower case.
    """

    def __init__(self, pool: "Pool", streams: Any, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers
        self._pool, self._streams = pool, streams
        self.ended = False

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, piece by piece as it arrives."""
        reader, _ = self._streams
        try:
            if "chunked" in self.headers.get("transfer-encoding", "").lower():
                while size := int((await reader.readline()).split(b";")[0], 16):
                    piece = await reader.readexactly(size + 2)
                    yield piece[:-2]
                while (await reader.readline()).strip():
                    pass  # trailers
                self.ended = True
            elif "content-length" in self.headers:
                left = int(self.headers["content-length"])
                while left and (piece := await reader.read(min(left, 1 << 16))):
                    left -= len(piece)
                    yield piece
                if left:
                    raise BrokenOffError(f"the body ended {left} bytes early")
                self.ended = True
            else:
                while piece := await reader.read(1 << 16):
                    yield piece
        except (asyncio.IncompleteReadError, ValueError) as error:
            raise BrokenOffError(f"the body broke off: {error}") from None

    async def lines(self) -> AsyncIterator[bytes]:
        """The lines of the body, as they are completed."""
        rest = b""
        async for piece in self.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line
        if rest:
            yield rest

    async def read(self) -> bytes:
        """All of the body."""
        return b"".join([piece async for piece in self.pieces()])

    def close(self) -> None:
        """Keep the connection for another request if the body has been read to its end; else close it."""
        reusable = self.ended and self.headers.get("connection", "").lower() != "close"
        self._pool.put_back(self._streams, reusable)


class Pool:
    """Connections to one server. `url` may end in a path; `/v1` may be left out."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError(f"--url must be http://host:port or https://host; got {url}")
        secure = parts.scheme == "https"
        self.host, self.port = parts.hostname, parts.port or (443 if secure else 80)
        self.ssl = ssl.create_default_context() if secure else None
        self.base = parts.path.rstrip("/").removesuffix("/v1")
        shown = f"[{self.host}]" if ":" in self.host else self.host
        self.head = f"Host: {shown}:{self.port}\r\nAccept: */*\r\n"
        if api_key is not None:
            if not api_key.isascii() or not api_key.isprintable():
                raise RequestError("--api-key must be printable ASCII, which a header can hold")
            self.head += f"Authorization: Bearer {api_key}\r\n"
        self.idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self, method: str, path: str, body: Any = None) -> Response:
        """Send a request, with `body` as JSON, and wait for the headers. Raises OSError if that fails.

        Args:
            method: such as GET.
            path: below the base address.
            body: sent as JSON; None sends none.
        """
        payload = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        head = f"{method} {self.base}{path} HTTP/1.1\r\n{self.head}"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
        message = f"{head}\r\n".encode() + payload
        while self.idle:  # one that the server has closed meanwhile says nothing back
            streams = self.idle.pop()
            try:
                if (response := await self._exchange(streams, message)) is not None:
                    return response
            except ConnectionError:
                pass
        streams = await asyncio.open_connection(self.host, self.port, ssl=self.ssl, limit=LINE)
        response = await self._exchange(streams, message)
        if response is None:
            raise BrokenOffError("the server closed the connection without an answer")
        return response

    async def _exchange(self, streams: Any, message: bytes) -> Response | None:
        reader, writer = streams
        try:
            writer.write(message)
            await writer.drain()
            line = await reader.readline()
            while line.split(b" ")[1:2] == [b"100"]:  # Continue
                while (await reader.readline()).strip():
                    pass
                line = await reader.readline()
            if not line:
                writer.close()
                return None
            status = int(line.split(b" ")[1])
            headers = {}
            while line := (await reader.readline()).strip():
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.strip().lower()] = value.strip()
        except (ValueError, IndexError) as error:
            writer.close()
            raise BrokenOffError(f"the answer is not HTTP: {error}") from None
        except BaseException:
            writer.close()
            raise
        return Response(self, streams, status, headers)

    def put_back(self, streams: Any, reusable: bool) -> None:
        """Return a connection to the pool."""
        if reusable:
            self.idle.append(streams)
        else:
            streams[1].close()

    def close(self) -> None:
        """Close the idle connections."""
        while self.idle:
            self.idle.pop()[1].close()
