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


SAFE = {"GET", "HEAD", "OPTIONS"}  # methods that change nothing
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
        origins: Sequence[str] = (),
    ) -> None:
        """Middleware before an application.

        Args:
            app: receives the requests that are admitted.
            api_keys: a request must present one of these; if empty, it needs none.
            max_bytes: largest body of a request, in bytes.
            log_requests: log a line per request, except for the paths in `QUIET`.
            hosts: the hosts that the header Host may name; None is any.
            limiter: the limiter of POST requests, for each API key, or for each address without keys; None is
                no limit.
            on_limited: called for each request above the limit.
            origins: other sites whose pages may send requests; "*" is any.
        """
        self.app, self.max_bytes, self.log_requests, self.hosts = app, max_bytes, log_requests, hosts
        self.limiter, self.on_limited, self.origins = limiter, on_limited, origins
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
        origin = headers.get("origin")
        if origin is not None and method not in SAFE and not self._own_or_allowed(origin, headers):
            return (
                403,
                f"the header Origin must be this server's or one that it allows; got {short(origin)}",
                None,
            )
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

    def _own_or_allowed(self, origin: str, headers: dict[str, str]) -> bool:
        """Whether the page that sends a request may: browsers send some requests without asking the server.

        Where keys are needed, a page of another site has none.
        """
        if self.digests or "*" in self.origins or origin in self.origins:
            return True
        if site := headers.get("sec-fetch-site"):  # which proxies do not change
            return site != "cross-site"
        hosts = [headers.get(name, "").lower() for name in ("host", "x-forwarded-host")]
        return origin.partition("://")[2].lower() in filter(None, hosts)

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
