"""The end of a server by a clock that tests set: signals, stages of the timeout, and what is left behind."""

import asyncio
import os
import signal
from types import SimpleNamespace

import pytest

pytest.importorskip("llguidance", reason="the extra `serve` is not installed")

from entropic_jax.serving.http import process
from entropic_jax.serving.http.frontend import Frontend
from entropic_jax.serving.http.settings import Settings
from entropic_jax.serving.request import RequestError
from tests.clocks import replace_clock

from .scripted_engine import ScriptedEngine

DRAIN = 12.0


class Clock:
    """Seconds that the test sets."""

    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    replace_clock(monkeypatch, process, "monotonic", clock)
    return clock


@pytest.fixture
def server(served, clock):
    """A server that is not started, whose engine is not ready yet."""
    engine = ScriptedEngine(served)
    engine.is_ready = False
    return process.Server(Frontend(engine, served, Settings(port=0, drain=DRAIN)))


def tick(server) -> bool:
    return asyncio.run(server.on_tick(1))


def test_the_first_signal_drains_and_the_second_stops_at_once(server, clock, monkeypatch):
    monkeypatch.setattr(Frontend, "busy", True)
    assert server.seconds_for_engine() == process.LAST_SECONDS
    server.handle_exit(signal.SIGTERM, None)
    assert server.frontend.draining and server.signalled.is_set() and server.deadline == 100 + DRAIN
    assert not server.should_exit and not server.force_exit and not tick(server)
    assert server.seconds_for_engine() > 0
    clock.seconds += 1
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit and server.force_exit and tick(server)
    assert server.deadline == 100 + DRAIN and server.seconds_for_engine() == 0


def test_requests_are_cut_off_while_there_is_time_to_end(server, clock, monkeypatch):
    abandoned = []
    monkeypatch.setattr(Frontend, "busy", True)
    monkeypatch.setattr(Frontend, "abandon", lambda frontend: abandoned.append(clock.seconds))
    server.handle_exit(signal.SIGTERM, None)
    last = process.last_seconds(DRAIN)
    assert last == 4
    clock.seconds = server.deadline - last - 0.01
    assert not tick(server) and not abandoned
    clock.seconds = server.deadline - last
    assert tick(server) and abandoned == [clock.seconds]
    clock.seconds = server.deadline - process.MARGIN * last - 1
    assert server.seconds_for_engine() == pytest.approx(1)
    clock.seconds = server.deadline
    assert server.seconds_for_engine() == 0


def test_an_idle_server_ends_at_once(server):
    assert not tick(server)
    server.handle_exit(signal.SIGTERM, None)
    assert tick(server) and server.status == 0


def test_garbage_is_frozen_once_when_the_server_is_ready(server, monkeypatch):
    calls = []
    collector = SimpleNamespace(
        collect=lambda: calls.append("collect"), freeze=lambda: calls.append("freeze")
    )
    monkeypatch.setattr(process, "gc", collector)
    tick(server)
    assert calls == []
    server.frontend.engine.is_ready = True
    tick(server)
    tick(server)
    assert calls == ["collect", "freeze"]


def test_a_unix_socket_goes_with_its_server_and_its_mask_with_the_call(served, tmp_path):
    path, engine = tmp_path / "server.sock", ScriptedEngine(served)
    engine.failed = "out of memory"
    settings = Settings(uds=str(path))
    before = os.umask(0o022)
    try:
        listener = process.bind(settings)
        with pytest.raises(RequestError, match="--uds must be a path for a new socket"):
            process.bind(Settings(uds=str(tmp_path / "missing" / "server.sock")))
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    assert path.is_socket()
    assert process.run(Frontend(engine, served, settings), listener) == process.ENGINE_FAILED
    assert not path.exists()
