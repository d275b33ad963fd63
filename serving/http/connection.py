"""HTTP connections with a limit on how many there are and on how long a request's head may take."""

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .routes.errors import body

HEAD_SECONDS = 20.0  # from the first byte of a request, or from the connection, to the end of its headers
Base: Any = AutoHTTPProtocol


class Connection(Base):
    """A connection that is closed if a request's head does not arrive in time, or if there are too many.

    A connection that is idle after an answer is left to uvicorn's own timeout.
    """

    most: int
    """Connections that may be open at once."""
    head_seconds = HEAD_SECONDS
    head_timer: asyncio.TimerHandle | None = None

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
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._between_requests():
            self._wait_for_head()
        else:
            self._stop_waiting()

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
        reason = {408: "Request Timeout", 503: "Service Unavailable"}[status]
        head = (
            f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + content)
        self.transport.close()


def limited(most: int, head_seconds: float = HEAD_SECONDS) -> type[asyncio.Protocol]:
    """The class of a server's connections, of which `most` may be open at once."""
    return type("LimitedConnection", (Connection,), {"most": most, "head_seconds": head_seconds})
