"""Connections: host names, incomplete heads and bodies, connection limits, and a failed engine."""

import asyncio
import contextlib
import hashlib
import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from entropic_jax.serving.http import connection, process
from entropic_jax.serving.http.frontend import Frontend
from entropic_jax.serving.http.host_names import accepted_hosts
from entropic_jax.serving.http.process import ENGINE_FAILED
from entropic_jax.serving.http.routes import gate
from entropic_jax.serving.http.settings import Limits, Settings
from tests.clocks import replace_clock

from .live import Live, refused, serving
from .scripted_engine import ScriptedEngine


@contextlib.contextmanager
def server(served, **settings: Any) -> Iterator[Live]:
    engine = ScriptedEngine(served)
    with serving(Frontend(engine, served, Settings(port=0, **settings))) as live:
        live.engine = engine
        yield live


def opened(live: Live, text: bytes = b"") -> socket.socket:
    """A connection on which `text` was sent."""
    connection = socket.create_connection(("127.0.0.1", live.port), timeout=20)
    connection.sendall(text)
    return connection


def answered(connection: socket.socket) -> tuple[int, dict]:
    """Status and body of the response that a server sends before it closes the connection."""
    text = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, content = text.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)


def test_pieces_of_a_response_are_sent_at_once(live):
    """Else the kernel keeps a body until the client acknowledges the head, for some 40 ms."""
    with httpx2.Client(base_url=live.url) as client:
        client.get("/version")
        connections = [protocol.transport for protocol in live.server.server_state.connections]
        assert connections
        for transport in connections:
            accepted = transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "192.168.1.4", "[fe80::1]"])
def test_a_foreign_host_is_refused_on_a_loopback_address(live, host):
    error = refused(httpx2.get(f"{live.url}/v1/models", headers={"Host": host}), 403)
    assert error["message"] == f"the header Host must be a name of this machine; got {host!r}"


@pytest.mark.parametrize(
    "host",
    [
        "[::1].evil.com",
        "[]evil.com",
        "[]",
        "[::1",
        "localhost:80@evil.com",
        "localhost:evil.com",
        ":evil.com",
        ":80",
        "localhost,evil",
    ],
)
def test_a_malformed_host_is_refused(host):
    hosts = accepted_hosts("127.0.0.1", ("a.example",))
    assert hosts is not None and not hosts.accept(host)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:8000", "model.localhost"]
)
def test_names_of_this_machine_are_accepted(live, host):
    assert httpx2.get(f"{live.url}/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    ("host", "accepted"),
    [("localhost.", True), ("A.Example.:80", True), ("a.example", True), ("b.example.", False)],
)
def test_a_name_may_end_with_the_root(host, accepted):
    assert accepted_hosts("127.0.0.1", ("a.example",)).accept(host) is accepted


def test_names_that_the_operator_allows(served):
    with server(served, allowed_hosts=("models.example.org",)) as live:
        get = lambda host: httpx2.get(f"{live.url}/health", headers={"Host": host})
        assert get("Models.Example.org:443").status_code == 200 and get("localhost").status_code == 200
        assert "this machine or models.example.org; got" in refused(get("evil.example"), 403)["message"]
    assert accepted_hosts("0.0.0.0", ()) is None and accepted_hosts("127.0.0.1", ("*",)) is None
    stated = accepted_hosts("0.0.0.0", ("a.example",))
    assert stated is not None and not stated.accept("localhost") and stated.accept("a.example")


def test_a_head_that_does_not_arrive_is_ended(served):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    with server(served, limits=Limits(head=0.3)) as live:
        half = [opened(live, head) for _ in range(20)] + [opened(live)]
        start = time.monotonic()
        for connection in half:
            assert answered(connection)[0] == 408
        assert time.monotonic() - start < 10
        with opened(live, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as kept:
            assert b"200 OK" in kept.recv(65536)
            time.sleep(0.5)  # an idle connection stays open
            kept.sendall(b"GET /health HTTP/1.1\r\n")
            assert answered(kept)[0] == 408  # but a second head must arrive, too


def test_a_head_that_drips_is_ended(served):
    with (
        server(served, limits=Limits(head=0.4)) as live,
        opened(live, b"GET /health HTTP/1.1\r\n") as connection,
    ):
        with contextlib.suppress(OSError):
            for number in range(40):
                connection.sendall(b"X-%d: y\r\n" % number)
                time.sleep(0.05)
                if not live.server.server_state.connections:
                    break
        assert number < 30


HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "text",
    [
        HEAD + b"X: " + b"a" * 70_000,
        HEAD + b"X: a\r\n" * 12_000,
        HEAD + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 70_000,
        CHUNKED + b"2\r\n{}\r\n0\r\n" + b"X: a\r\n" * 24_000,
        CHUNKED + b"2;a=" + b"a" * 140_000,
    ],
    ids=["one", "many", "complete", "path", "trailers", "extension"],
)
def test_a_head_that_is_too_large_is_refused(live, text):
    with opened(live) as connection:
        with contextlib.suppress(OSError):  # the server closes before it has read everything
            connection.sendall(text)
        status, tree = answered(connection)
    assert status == 431
    assert tree["error"]["message"] == "the request's headers must have at most 65536 bytes; got more"


def test_large_heads_and_bodies_within_their_limits_are_read(live):
    body = json.dumps({"prompt": "x", "max_tokens": 1, "user": "a" * 300_000}).encode()
    with httpx2.Client(base_url=live.url) as client:
        for _ in range(3):
            headers = {"Content-Type": "application/json", "X": "a" * 60_000}
            assert client.post("/v1/completions", content=body, headers=headers).status_code == 200
            chunks = iter([body[:100_000], body[100_000:]])
            assert client.post("/v1/completions", content=chunks, headers=headers).status_code == 200
        assert client.get("/nothing", headers=headers).status_code == 404
        answer = client.post("/nothing", content=body, headers=headers)  # its body is not read
        assert answer.status_code == 404


def test_a_body_that_does_not_arrive_is_ended(live, monkeypatch):
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.3)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with opened(live, head + b'Content-Length: 100\r\n\r\n{"prompt":') as connection:
        status, tree = answered(connection)
    assert status == 408 and "the body must arrive within 0.3 s" in tree["error"]["message"]
    live.engine.pace = 0.2  # a request whose body is complete may take longer
    answer = httpx2.post(f"{live.url}/v1/completions", json={"prompt": "x", "max_tokens": 3})
    assert answer.status_code == 200


@pytest.mark.parametrize(("piece", "ends"), [(b"x", True), (b"x" * gate.BODY_RATE, False)])
def test_a_body_that_drips_is_ended(monkeypatch, piece, ends):
    """A piece a second: one byte is too slow, as many as the rate demands are not."""
    current, most = 0.0, 100
    replace_clock(monkeypatch, gate, "monotonic", lambda: current)
    limits = dict(api_keys=(), max_bytes=most * len(piece), log_requests=False)

    async def drip():
        nonlocal current
        current += 1
        for _ in range(3):  # where a limit that is over takes effect
            await asyncio.sleep(0)
        return {"type": "http.request", "body": piece, "more_body": True}

    async def main():
        receive = gate.Gate(None, **limits)._limited(drip)
        for _ in range(most):
            await receive()

    if not ends:
        asyncio.run(main())
        return
    with pytest.raises(
        gate.HTTPException, match="the body must arrive within 30 s and 16384 bytes"
    ) as caught:
        asyncio.run(main())
    assert caught.value.status_code == 408 and gate.BODY_SECONDS <= current <= gate.BODY_SECONDS + 2


@pytest.mark.parametrize(
    ("bearer", "other", "status"),
    [
        *(("one", "", 200), ("", "two", 200), ("wrong", "two", 200), ("one", "wrong", 200)),
        *(("wrong", "", 401), ("", "wrong", 401), ("wrong", "wrong", 401), ("", "", 401)),
    ],
)
def test_one_valid_key_of_two_is_enough(bearer, other, status):
    headers = {"authorization": f"Bearer {bearer}", "x-api-key": other}
    keeper = gate.Gate(None, ("one", "two"), 10, False)
    valid = {hashlib.sha256(key.encode()).digest() for key in ("one", "two")}
    assert (keeper._key(headers) in valid) == (status == 200)
    refusal = keeper._refusal("GET", "/v1/models", headers)
    assert (200 if refusal is None else refusal[0]) == status


def test_connections_beyond_the_limit_are_refused(served):
    with server(served, limits=Limits(connections=3)) as live:
        first = [opened(live) for _ in range(3)]
        with opened(live) as late:
            status, tree = answered(late)
        assert status == 503 and "3 connections open" in tree["error"]["message"]
        first.pop().close()
        time.sleep(0.2)
        assert httpx2.get(f"{live.url}/health").status_code == 200
        for connection in first:
            connection.close()


def test_the_head_limit_is_that_of_the_settings():
    limited = connection.limited(7, 1.5)
    assert (limited.most, limited.head_seconds) == (7, 1.5)


@pytest.mark.parametrize(("shortest_life", "restarts"), [(0.0, True), (60.0, False)])
def test_a_failed_engine_restarts_the_server(served, monkeypatch, shortest_life, restarts):
    settings, commands = Settings(port=0, on_engine_failure="restart"), []
    monkeypatch.setattr(process, "SHORTEST_LIFE", shortest_life)
    monkeypatch.setattr(process.os, "execv", lambda *command: commands.append(command))
    engine = ScriptedEngine(served)
    failure = threading.Timer(0.5, lambda: setattr(engine, "failed", "out of memory"))
    failure.start()
    listener = process.bind(settings)
    address = listener.getsockname()
    assert process.run(Frontend(engine, served, settings), listener) == ENGINE_FAILED
    again = [(sys.executable, [sys.executable, *sys.orig_argv[1:]])]
    assert commands == (again if restarts else [])
    with socket.create_server(address):  # the port is free for the next
        pass


def test_a_failed_engine_ends_the_server_or_not(served):
    with server(served) as live:
        live.engine.failed = "out of memory"
        live.thread.join(10)
        assert not live.thread.is_alive() and live.server.status == ENGINE_FAILED
    with server(served, on_engine_failure="stay") as live:
        live.engine.failed = "out of memory"
        time.sleep(0.5)
        refused(httpx2.get(f"{live.url}/health"), 503)
        assert live.server.status == 0


def test_a_unix_socket(served, tmp_path):
    path = tmp_path / "server.sock"
    with server(served, uds=str(path)):
        with httpx2.Client(
            transport=httpx2.HTTPTransport(uds=str(path)), base_url="http://localhost"
        ) as client:
            assert client.get("/health").status_code == 200
        assert path.stat().st_mode & 0o777 == 0o600  # only this user may connect
        with pytest.raises(process.RequestError, match="--uds must be a path for a new socket"):
            process.bind(Settings(uds=str(path)))  # somebody listens
    assert path.is_socket()
    process.bind(Settings(uds=str(path))).close()  # nobody listens any more


def test_a_unix_socket_replaces_no_file(tmp_path):
    path = tmp_path / "precious"
    path.write_text("x")
    with pytest.raises(process.RequestError, match="--uds must be"):
        process.bind(Settings(uds=str(path)))
    assert path.read_text() == "x"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_https(served, tmp_path):
    certificate, key = str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    with server(served, ssl_certfile=certificate, ssl_keyfile=key) as live:
        assert process.address_of(live.listener, "https") == f"https://127.0.0.1:{live.port}"
        trust = ssl.create_default_context(cafile=certificate)
        assert httpx2.get(f"https://127.0.0.1:{live.port}/health", verify=trust).status_code == 200
        with pytest.raises(httpx2.HTTPError):
            httpx2.get(f"{live.url}/health")
    impatient = Limits(head=0.3)
    with (
        server(served, ssl_certfile=certificate, ssl_keyfile=key, limits=impatient) as live,
        opened(live) as silent,
    ):
        assert silent.recv(100) == b""  # no handshake
    with pytest.raises(process.RequestError, match="--ssl-certfile and --ssl-keyfile must be PEM files"):
        process.bind(Settings(ssl_certfile=key))
