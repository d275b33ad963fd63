"""ASGI middleware before every route: request ids, host names, keys, rates, body size and time, log."""

import asyncio
import hashlib
import hmac
import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Sequence

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from entropic_jax.parameter_tables.table import short

from .. import log
from ..host_names import HostNames
from ..internal_request import INTERNAL
from ..rate_limit import RateLimiter
from .errors import answer

logger = logging.getLogger("entropic_jax.serving.requests")
OPEN = {"/", "/health", "/ready", "/metrics", "/version", "/openapi.json", "/favicon.ico"}  # need no key
QUIET = {"/health", "/ready", "/metrics", "/entropic/state"}  # polled, hence not logged


BODY_SECONDS, BODY_RATE = 30.0, 16384  # that a body may take, and what it must bring a second from then on


class Gate:
    """Middleware that admits requests or refuses them."""

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Sequence[str],
        max_bytes: int,
        log_requests: bool,
        hosts: HostNames | None = None,
        limiter: RateLimiter | None = None,
        on_limited: Callable[[], None] = lambda: None,
    ) -> None:
        """Middleware before an application.

        Args:
            app: Receives the requests that are admitted.
            api_keys: A request must present one of these; if empty, it needs none.
            max_bytes: Largest body of a request, in bytes.
            log_requests: Log a line per request, except for the paths in `QUIET`.
            hosts: The hosts that the header Host may name; None is any.
            limiter: The limiter of POST requests, for each API key, or for each address without keys; None is
                no limit.
            on_limited: Called for each request above the limit.
        """
        self.app, self.max_bytes, self.log_requests, self.hosts = app, max_bytes, log_requests, hosts
        self.limiter, self.on_limited = limiter, on_limited
        self.digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http" or INTERNAL in scope:
            return await self.app(scope, receive, send)
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        request_id = headers.get("x-request-id", "")
        identity = request_id if re.fullmatch(log.REQUEST_ID, request_id) else uuid.uuid4().hex
        token = log.request_id.set(identity)
        start, status = time.perf_counter(), 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", identity.encode())]
            await send(message)

        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        try:
            refusal = self._refusal(scope["method"], path, headers) or self._above_limit(scope, path, headers)
            if refusal is not None:
                await answer(*refusal, path=path)(scope, receive, tagged)
            else:
                scope.setdefault("state", {})["owner"] = self._key(headers)
                await self.app(scope, self._limited(receive), tagged)
        finally:
            if self.log_requests and path not in QUIET:
                seconds = round(time.perf_counter() - start, 4)
                extra = {"method": scope["method"], "path": path, "status": status, "seconds": seconds}
                logger.info("request", extra=extra)
            log.request_id.reset(token)

    def _refusal(self, method: str, path: str, headers: dict[str, str]) -> tuple | None:
        if self.hosts is not None and not self.hosts.accept(host := headers.get("host", "")):
            return 403, f"the header Host must be {self.hosts}; got {short(host)}", None
        is_open = path in OPEN or path.startswith("/dashboard/") or method == "OPTIONS"
        if self.digests and not is_open and self._key(headers) is None:
            message = (
                "the header must be Authorization: Bearer KEY, or X-API-Key: KEY, with a valid key; "
                "it is missing or wrong"
            )
            return 401, message, None, {"WWW-Authenticate": "Bearer"}
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.max_bytes:
            return 413, self._too_large(length), None, {"Connection": "close"}
        return None

    def _above_limit(self, scope: Scope, path: str, headers: dict[str, str]) -> tuple | None:
        """The answer to a request above the rate limit; None for one within it."""
        if self.limiter is None or scope["method"] != "POST" or path in OPEN:
            return None
        client = self._key(headers) if self.digests else (scope.get("client") or ("",))[0]
        if not (seconds := self.limiter.admit(client)):
            return None
        self.on_limited()
        whose = "an API key" if self.digests else "an address"
        wait = math.ceil(seconds)
        message = f"requests of {whose} must be at most {self.limiter.limit}; try again in {wait} s"
        return 429, message, None, {"Retry-After": str(wait), "Connection": "close"}

    def _key(self, headers: dict[str, str]) -> bytes | None:
        """The digest of the valid key that a request presents; None without one."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        presented = [bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        valid = None
        for key in filter(None, map(str.strip, presented)):
            digest = hashlib.sha256(key.encode()).digest()
            # All keys are compared, in constant time, so that the time taken says nothing of a key.
            matches = [hmac.compare_digest(digest, known) for known in self.digests]
            if any(matches):
                valid = digest
        return valid

    def _too_large(self, size: object) -> str:
        return f"the body must have at most {self.max_bytes} bytes; got {size}"

    def _limited(self, receive: Receive) -> Receive:
        """`receive` with a limit on the size of the body, and on the time that it takes to arrive."""
        size, complete, start = 0, False, time.monotonic()

        async def counted() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()  # which waits for the client to leave
            allowed = BODY_SECONDS + size / BODY_RATE
            try:
                async with asyncio.timeout(start + allowed - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                text = f"the body must arrive within {BODY_SECONDS:g} s and {BODY_RATE} bytes a second after"
                raise HTTPException(408, f"{text}; got {size} bytes", {"Connection": "close"}) from None
            size += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if size > self.max_bytes:
                raise HTTPException(413, self._too_large(f"at least {size}"))
            return message

        return counted
