"""HTTP connections with a limit on how many there are and on how long a request's head may take."""

import asyncio
import json
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .routes.errors import body

HEAD_BYTES = 64 * 1024  # of a request's line and headers, and of what comes between the pieces of a body
HEAD_SECONDS = 20.0  # from the first byte of a request, or from the connection, to the end of its headers
Base: Any = AutoHTTPProtocol
UNBOUNDED = hasattr(Base, "on_headers_complete")  # httptools bounds no head; h11 has an option


class Connection(Base):
    """A connection that is closed if a request's head is late or too large, or if there are too many.

    A connection that is idle after an answer is left to uvicorn's own timeout.
    """

    most: int
    """Connections that may be open at once."""
    head_seconds = HEAD_SECONDS
    head_timer: asyncio.TimerHandle | None = None
    unused = 0  # bytes in a row that brought no complete head and nothing of a body

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start to wait for a request, or refuse where there are too many connections."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self._refuse(503, f"the server has {self.most} connections open, its limit; try again later")
        else:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Let the timer run as long as a head is incomplete; further bytes do not start it anew."""
        while data and not self.transport.is_closing():
            room = HEAD_BYTES + 1 - self.unused
            piece, data = data[:room], data[room:]
            self.unused += len(piece) if UNBOUNDED else 0
            super().data_received(piece)
            if self.unused > HEAD_BYTES:
                self._refuse(431, f"the request's headers must have at most {HEAD_BYTES} bytes; got more")
            elif self._between_requests():
                self._wait_for_head()
            else:
                self._stop_waiting()

    def on_headers_complete(self) -> None:
        """A head that is complete was not too large."""
        self.unused = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A body has a limit of its own."""
        self.unused = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The next head begins."""
        self.unused = 0
        super().on_message_complete()

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_head(self) -> None:
        if self.head_timer is None:
            self.head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def _stop_waiting(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def _head_is_late(self) -> None:
        self.head_timer = None
        if self._between_requests():
            self._refuse(408, f"the request's headers must arrive within {self.head_seconds:g} s")

    def _refuse(self, status: int, message: str) -> None:
        """Answer without a request, and close."""
        if self.transport.is_closing():
            return
        content = json.dumps(body(status, message)).encode()
        reason = HTTPStatus(status).phrase
        head = (
            f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + content)
        self.transport.close()


def limited(most: int, head_seconds: float = HEAD_SECONDS) -> type[asyncio.Protocol]:
    """The class of a server's connections, of which `most` may be open at once."""
    return type("LimitedConnection", (Connection,), {"most": most, "head_seconds": head_seconds})
