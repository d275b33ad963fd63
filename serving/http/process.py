"""Server process: its listening socket, signals and shutdown."""

import asyncio
import contextlib
import errno
import functools
import gc
import logging
import os
import signal
import socket
import ssl
import stat
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn

from ..request import RequestError
from .connection import HEAD_BYTES, limited
from .frontend import Frontend
from .routes.app import create
from .settings import Settings

logger = logging.getLogger("entropic_jax.serving.server")
# The shutdown timeout ends with three stages: requests in flight are cut off and their last bytes sent; the
# engine's thread ends; the process ends. The last takes seconds on a busy machine: each thread must run once
# more to end, and the last of them gives back gigabytes of small pages.
LAST_SECONDS, LARGEST_SHARE = 6.0, 1 / 3  # of all three at most, in seconds and as a share of the timeout
LAST_BYTES, MARGIN = 1 / 6, 2 / 3  # shares of them: for the last bytes, and for the end of the process
LAST_RESORT = 0.6  # share of them that is left when the process is ended whatever else goes on
ENGINE_FAILED = 1  # exit status
SHORTEST_LIFE = 60.0  # seconds; a server whose engine fails sooner would only fail again after a restart
KEEP_ALIVE = 75  # seconds; longer than clients do, so that the server never closes a connection in use
BACKLOG = 2048  # connections that wait to be accepted
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server(uvicorn.Server):
    """A server that drains at the first signal and stops at once at the second."""

    def __init__(self, frontend: Frontend, tracer_provider: Any = None) -> None:
        settings, app = frontend.settings, create(frontend, tracer_provider)
        self.batches = app.state.batches
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                timeout_keep_alive=KEEP_ALIVE,
                http=limited(settings.limits.connections, settings.limits.head),
                h11_max_incomplete_event_size=HEAD_BYTES,
            )
        )
        last_bytes: Any = LAST_BYTES * last_seconds(settings.drain)  # uvicorn waits for fractions, too
        self.config.timeout_graceful_shutdown = last_bytes
        self.frontend = frontend
        self.deadline: float | None = None  # after a signal: when the process must have ended
        self.status = 0
        self.signalled = threading.Event()
        self._logged = False
        self._frozen = False  # whether garbage collection leaves out what the start has made

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the server runs; unlike uvicorn, do not raise them again afterwards."""
        if threading.current_thread() is not threading.main_thread():  # which alone receives signals
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept requests, and log the address."""
        await self._listen(sockets)
        if self.batches is not None:
            self.batches.start()
        for listener in sockets or ():
            address = address_of(listener, "https" if self.config.is_ssl else "http")
            logger.info("listening", extra={"address": address, "model": self.frontend.model.names[0]})

    async def _listen(self, sockets: list[socket.socket] | None) -> None:
        """Uvicorn's start, with a limit on the time of a TLS handshake; asyncio's own is a minute."""
        if not self.config.is_ssl:
            return await super().startup(sockets)
        loop: Any = asyncio.get_running_loop()
        seconds = self.frontend.settings.limits.head
        loop.create_server = functools.partial(loop.create_server, ssl_handshake_timeout=seconds)
        try:
            await super().startup(sockets)
        finally:
            del loop.create_server

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what runs; batches go on in a later process."""
        if self.batches is not None:
            self.batches.close()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; at the second signal, stop waiting."""
        if self.deadline is not None:
            self.should_exit = self.force_exit = True
            return
        self.frontend.draining = True
        self.deadline = time.monotonic() + self.frontend.settings.drain
        self.signalled.set()

    def end_in_time(self) -> None:
        """After a signal, end the process before its deadline, whatever else goes on. For a daemon thread."""
        self.signalled.wait()
        left = (self.deadline or 0.0) - time.monotonic()
        time.sleep(max(0.0, left - LAST_RESORT * last_seconds(self.frontend.settings.drain)))
        self.log_end(forced=True)
        leave(self.status)

    def seconds_for_engine(self) -> float:
        """Seconds that the engine's thread has to end; none after a second signal."""
        settings = self.frontend.settings
        if self.deadline is None:
            return LAST_SECONDS
        left = self.deadline - time.monotonic() - MARGIN * last_seconds(settings.drain)
        return 0.0 if self.force_exit else min(LAST_SECONDS, max(0.0, left))

    def log_end(self, **extra: Any) -> None:
        """Log once that the process ends, and how long before its deadline."""
        if not self._logged:
            self._logged = True
            if self.deadline is not None:
                extra["seconds_left"] = round(self.deadline - time.monotonic(), 2)
            logger.info("stopped", extra=extra)

    async def on_tick(self, counter: int) -> bool:
        """Whether it is time to stop; called ten times a second."""
        self._freeze_garbage()
        failure = self.frontend.engine.failure()
        if failure is not None and self.frontend.settings.on_engine_failure != "stay" and not self.status:
            logger.error("the engine has failed: stopping", extra={"error": str(failure)})
            self.frontend.draining = self.should_exit = True
            self.status = ENGINE_FAILED
        if self.deadline is not None and not self.should_exit:
            if not self.frontend.engine.serves():
                self.frontend.abandon()  # they could not begin in time
            if not self.frontend.busy:
                self.should_exit = True
            elif time.monotonic() >= self.deadline - last_seconds(self.frontend.settings.drain):
                logger.warning("drain timed out", extra={"ended": self.frontend.num_in_flight})
                self.frontend.abandon()
                self.should_exit = True
        return await super().on_tick(counter)

    def _freeze_garbage(self) -> None:
        """Once the server is ready, leave out of garbage collection what has been made so far.

        Models and programs are many objects, and a full collection of them stops every thread.
        """
        if not self._frozen and self.frontend.engine.ready():
            self._frozen = True
            gc.collect()
            gc.freeze()


def last_seconds(timeout: float) -> float:
    """How many seconds before the end of a shutdown timeout the requests in flight are cut off."""
    return min(LAST_SECONDS, LARGEST_SHARE * timeout)


def address_of(listener: socket.socket, scheme: str) -> str:
    """The URL of a socket; for a Unix socket, its path after "unix:"."""
    name = listener.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    return f"{scheme}://{f'[{name[0]}]' if ':' in name[0] else name[0]}:{name[1]}"


def check_certificate(settings: Settings) -> None:
    """Raise RequestError where the certificate or its key cannot be used."""
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile is not None:
            raise RequestError(f"--ssl-keyfile needs --ssl-certfile; got {settings.ssl_keyfile} alone")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except OSError as error:
        files = " and ".join(filter(None, (settings.ssl_certfile, settings.ssl_keyfile)))
        raise RequestError(
            "--ssl-certfile and --ssl-keyfile must be PEM files of a certificate and its key; got "
            f"{files} ({error.strerror or error})"
        ) from None


def bind(settings: Settings) -> socket.socket:
    """The listening socket, open before a model is loaded: connections wait until the server starts.

    Raises:
        RequestError: The address is not this machine's, the port is taken, or the certificate is unusable.
    """
    check_certificate(settings)
    if settings.uds is not None:
        return _bind_path(settings.uds)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With the protocol stated, asyncio lets the kernel send each piece of a response at once (TCP_NODELAY).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(BACKLOG)  # two sockets may be bound to one port, but only one of them may listen
    except OSError as error:
        listener.close()
        raise RequestError(
            "--host and --port must be an address of this machine and a free port; got "
            f"{settings.host}:{settings.port} ({error.strerror})"
        ) from None
    listener.set_inheritable(True)
    return listener


def _bind_path(path: str) -> socket.socket:
    """A Unix socket that only this user may connect to; one left by a server that has gone is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode) and listener.connect_ex(path) == errno.ECONNREFUSED:
            os.unlink(path)
    except OSError:  # there is no such file
        pass
    listener.close()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise RequestError(f"--uds must be a path for a new socket; got {path} ({error})") from None
    finally:
        os.umask(before)
    return listener


def run(frontend: Frontend, listener: socket.socket, tracer_provider: Any = None) -> int:
    """Serve until a signal, let requests in flight end, and return the exit status.

    Args:
        frontend: answers the requests; its engine is closed at the end.
        listener: a socket that listens.
        tracer_provider: an OpenTelemetry provider that receives a span per request; None traces nothing.
    """
    server = Server(frontend, tracer_provider)
    start_time = time.monotonic()
    threading.Thread(target=server.end_in_time, name="shutdown", daemon=True).start()
    server.run(sockets=[listener])
    if frontend.settings.uds is not None:
        with contextlib.suppress(OSError):
            os.unlink(frontend.settings.uds)
    frontend.pools.close()
    ended = frontend.engine.close(timeout=server.seconds_for_engine())
    if tracer_provider is not None:
        tracer_provider.shutdown()  # sends what is left
    server.log_end(**({} if ended else {"compiling": True}))
    lived = time.monotonic() - start_time
    if server.status == ENGINE_FAILED and frontend.settings.on_engine_failure == "restart":
        if lived >= SHORTEST_LIFE:
            restart()
        logger.error("not restarted: the engine failed soon after its start", extra={"seconds": round(lived)})
    if not ended or frontend.pools.pending:
        leave(server.status)
    return server.status


def restart() -> None:
    """Replace the process by the same command, which has its process id but nothing of its memory."""
    logger.info("restarting")
    logging.shutdown()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def leave(status: int) -> None:
    """End the process although threads of it compile or tokenize, which nothing can interrupt."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
