"""Processes of one engine: their options, the messages between them, and when a process ends itself."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from entropic_jax import LLM
from entropic_jax.parameter_tables.table import ParameterError
from entropic_jax.serving.cli import main
from entropic_jax.serving.engine import coordinator_address, process_group
from entropic_jax.serving.engine.follower import check_identity, identity_of, weights_digest
from entropic_jax.serving.engine.options import EngineOptions
from entropic_jax.serving.engine.process_channel import (
    NONCE,
    SIGNATURE,
    Connection,
    Message,
    accept,
    connect,
    listen,
)
from entropic_jax.serving.engine.process_group import ProcessGroup
from entropic_jax.serving.options.model import EMBEDDED
from tests.clocks import replace_clock

ADDRESS = ("--coordinator-address", "127.0.0.1:1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--num-processes", "2"),
            "--num-processes must come with --coordinator-address and --process-id; got 2 alone",
        ),
        (
            (*ADDRESS, "--num-processes", "2", "--process-id", "2"),
            "--process-id must be below --num-processes, 2; got 2",
        ),
        (
            (*ADDRESS, "--num-processes", "2", "--process-id", "-1"),
            "--process-id must be an integer between 0 and 2147483647; got -1",
        ),
        (
            ("--coordinator-address", "here", "--num-processes", "2", "--process-id", "1"),
            "--coordinator-address must be a host and a port, as in 10.0.0.1:8476; got 'here'",
        ),
        (
            ("--coordinator-address", "nowhere.invalid:1", "--num-processes", "2", "--process-id", "1"),
            "--coordinator-address must be reachable from every process; got nowhere.invalid:1",
        ),
        (
            (*ADDRESS, "--num-processes", "2", "--process-id", "1", "--initialization-timeout", "1"),
            "got 127.0.0.1:1 (nothing listens there after 1 s)",
        ),
        (
            (*ADDRESS, "--num-processes", "2", "--process-id", "1", "--on-engine-failure", "stay"),
            "--on-engine-failure must be exit with several processes",
        ),
        (
            (*ADDRESS, "--num-processes", "2", "--process-id", "1", "--enable-sleep-mode"),
            "--enable-sleep-mode must be off with several processes; got on",
        ),
    ],
)
def test_options_that_are_refused(options, message, capsys):
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    begin = time.monotonic()
    with pytest.raises(SystemExit) as end:
        main(["serve", "--port", "0", "--preset", "off", *options])
    error = capsys.readouterr().err
    *log, line = error.splitlines()
    assert end.value.code == 2 and message in line, error
    waits = ("process 0 does not answer at", "has no address yet")
    assert all(any(wait in entry for wait in waits) for entry in log), error
    assert time.monotonic() - begin < 30


def test_a_port_that_is_taken_is_refused():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"got {address} .its port is not free: "):
            LLM(coordinator_address=address, num_processes=2, process_id=0)


def test_an_address_that_leads_elsewhere_is_refused(monkeypatch):
    connect = socket.create_connection
    with socket.create_server(("127.0.0.1", 0)) as elsewhere, socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        stranger = elsewhere.getsockname()
        monkeypatch.setattr(coordinator_address, "ATTEMPT", 0.2)
        monkeypatch.setattr(socket, "create_connection", lambda _, seconds: connect(stranger, seconds))
        message = f"got {address} .process 0 does not reach itself there: timed out"
        with pytest.raises(ParameterError, match=message):
            LLM(coordinator_address=address, num_processes=2, process_id=0)


def test_process_0_reaches_itself_though_others_call_before_it():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                socket.create_connection(address, 0.1).close()

    others = threading.Thread(target=call)
    others.start()
    for _ in range(3):
        coordinator_address.check_own(address)
    stop.set()
    others.join()


def pair() -> tuple[Connection, Connection]:
    ends = socket.socketpair()
    # A Unix socket has no delay to switch off.
    left, right = (Connection.__new__(Connection) for _ in ends)
    for connection, stream, number in ((left, ends[0], 1), (right, ends[1], 0)):
        connection._stream, connection.process_id = stream, number
        connection._sending = threading.Lock()
    return left, right


def test_messages_arrive_as_they_were_sent_until_the_end():
    left, right = pair()
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), np.float32(0.5), np.zeros((0, 4), bool)]
    left.send(Message("run", {"program": "decode 4", "leaves": [1, 5]}, arrays))
    message = right.receive()
    assert message is not None and message[:2] == ("run", {"program": "decode 4", "leaves": [1, 5]})
    for sent, received in zip(arrays, message.arrays, strict=True):
        assert sent.dtype == received.dtype and np.array_equal(sent, received)
    with pytest.raises(ValueError, match="arrays must hold numbers; got \\['object'\\]"):
        left.send(Message("run", {}, [np.array([{}], object)]))
    left.close()
    assert right.receive() is None


def test_only_the_expected_processes_are_accepted():
    listener, token = listen("127.0.0.1"), os.urandom(32)
    address, accepted = listener.getsockname()[:2], []
    thread = threading.Thread(target=lambda: accepted.extend(accept(listener, token, 3, 30)))
    thread.start()
    with pytest.raises(OSError, match="is not process 0"):
        connect(address, os.urandom(32), 1)
    for number in (0, 3):  # who knows the token, but has another number
        assert connect(address, token, number).receive() is None
    assert thread.is_alive() and not accepted
    second, first = connect(address, token, 2), connect(address, token, 1)
    thread.join(30)
    assert [connection.process_id for connection in accepted] == [1, 2]
    accepted[0].send(Message("for 1", {}))
    accepted[1].send(Message("for 2", {}))
    assert first.receive().kind == "for 1" and second.receive().kind == "for 2"


def test_a_process_0_that_does_not_know_the_token_is_refused():
    listener, token = socket.create_server(("127.0.0.1", 0)), os.urandom(32)

    def impostor() -> None:
        stream, _ = listener.accept()
        stream.sendall(bytes(NONCE))
        stream.recv(4096)
        stream.sendall(bytes(SIGNATURE))

    thread = threading.Thread(target=impostor)
    thread.start()
    with listener, pytest.raises(OSError, match="is not process 0"):
        connect(listener.getsockname(), token, 1)
    thread.join(30)


def test_every_connection_has_a_challenge_of_its_own():
    listener, token = listen("127.0.0.1"), os.urandom(32)
    address = listener.getsockname()[:2]
    thread = threading.Thread(target=lambda: accept(listener, token, 2, 60))
    thread.start()
    challenges = set()
    for _ in range(3):
        with socket.create_connection(address) as stranger:
            challenges.add(stranger.recv(NONCE, socket.MSG_WAITALL))
    connect(address, token, 1)
    thread.join(30)
    assert len(challenges) == 3


def test_a_stranger_that_is_silent_keeps_nobody_out():
    listener, token = listen("127.0.0.1"), os.urandom(32)
    address, accepted = listener.getsockname()[:2], []
    thread = threading.Thread(target=lambda: accepted.extend(accept(listener, token, 2, 60)))
    thread.start()
    strangers = [socket.create_connection(address) for _ in range(3)]
    connect(address, token, 1)  # within its own time for the handshake
    thread.join(30)
    assert [connection.process_id for connection in accepted] == [1]
    for stranger in strangers:
        stranger.close()


def test_processes_that_do_not_come_are_counted():
    with pytest.raises(TimeoutError, match="0 of 2 processes have connected"):
        accept(listen("127.0.0.1"), os.urandom(32), 3, 0.1)


IDENTITY = identity_of(Path(EMBEDDED), EngineOptions())


def test_settings_of_the_environment_are_compared():
    stated = {"ENTROPIC_KERNELS", "ENTROPIC_LAYERS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION"}
    assert stated <= IDENTITY.keys()


@pytest.mark.parametrize("name", [None, *IDENTITY])
def test_processes_that_were_started_differently_end(name):
    class Group:
        leads, num_processes, left = True, 2, None

        def receive(self) -> tuple[int, Message]:
            return 1, Message("identity", {**IDENTITY, **({} if name is None else {name: "other"})})

        def leave(self, message: str) -> None:
            self.left = message

    group = Group()
    check_identity(group, Path(EMBEDDED), EngineOptions())
    if name is None:
        assert group.left is None
    else:
        assert group.left.startswith(f"{name} must be the same in all processes; got ")
        assert group.left.endswith("in process 0 and other in process 1")


def test_weights_are_compared_by_their_files(tmp_path):
    file, digests = tmp_path / "model.safetensors", set()
    for size, first, last in ((200_000, 0, 0), (200_001, 0, 0), (200_000, 1, 0), (200_000, 0, 1)):
        file.write_bytes(bytes([first]) + bytes(size - 2) + bytes([last]))
        digests |= {weights_digest(tmp_path), weights_digest(file)}
    (tmp_path / "more.safetensors").touch()
    digests |= {weights_digest(tmp_path), weights_digest(tmp_path / "nothing")}
    assert len(digests) == 6 and weights_digest(file) in digests


class EndedError(Exception):
    """Stands for the end of the process, in the thread that ends it."""


class Recorder:
    """Takes the place of the function that ends the process, and keeps its messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.happened = threading.Event()
        self.groups: list[ProcessGroup] = []

    def group(self, process_id: int, connection: Connection) -> ProcessGroup:
        """One of two processes."""
        self.groups.append(ProcessGroup(process_id, 2, [connection]))
        return self.groups[-1]

    def leave(self, message: str, status: int = 1) -> None:
        self.messages.append(message)
        self.happened.set()
        raise EndedError

    def __call__(self) -> str:
        """The message with which the process would have ended, once there is one."""
        assert self.happened.wait(30), "the process would not have ended"
        return self.messages[0]


@pytest.fixture
def ended(monkeypatch) -> Iterator[Recorder]:
    recorder = Recorder()
    monkeypatch.setattr(process_group, "end_process", recorder.leave)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    monkeypatch.setattr(process_group.atexit, "register", lambda function: None)
    yield recorder
    for group in recorder.groups:
        group._closing = True


def test_the_end_of_a_process_ends_this_one(ended):
    left, right = pair()
    ended.group(0, left)
    right.close()
    assert ended() == "process 1 of 2 has ended; without it, this process ends"


def test_silence_counts_as_death(ended, monkeypatch):
    monkeypatch.setattr(process_group, "BEAT", 0.01)
    left, right = pair()
    ended.group(0, left)
    assert ended() == "process 1 of 2 gave no sign of life for 8 s; without it, this process ends"
    assert right.receive().kind == "alive"


def test_signs_of_life_keep_processes_alive(ended, monkeypatch):
    monkeypatch.setattr(process_group, "BEAT", 0.02)
    monkeypatch.setattr(process_group, "SILENT_BEATS", 100)
    for process_id, connection in enumerate(pair()):
        ended.group(process_id, connection)
    assert not ended.happened.wait(4)  # for twice the beats of silence


@pytest.mark.parametrize(
    ("before", "seconds"),
    [({}, 300), ({"decode": 0.0}, 8), ({"prefill": 0.0}, 300), ({"decode": 0.2}, 20), ({"decode": 4.0}, 300)],
)
def test_a_launch_that_does_not_end_ends_the_process(ended, monkeypatch, before, seconds):
    monkeypatch.setattr(process_group, "BEAT", 0.005)
    monkeypatch.setattr(process_group, "SILENT_BEATS", 10**9)
    replace_clock(monkeypatch, process_group, "monotonic", lambda: clock[0])
    left, right = pair()
    group, clock = ended.group(0, left), [0.0]
    release, finished = threading.Event(), threading.Event()

    class Finishing:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def block_until_ready(self) -> None:
            clock[0] += self.seconds
            finished.set()

    class Stuck:
        def block_until_ready(self) -> None:
            release.wait(60)

    for program, took in before.items():
        group.watch(program, Finishing(took))
        assert finished.wait(30)
    group.watch("decode", Stuck())
    assert ended() == f"a launch has not ended within {seconds} s: stuck in a collective"
    release.set()
    right.close()


def test_a_process_that_stops_in_order_ends_nothing(ended, monkeypatch):
    monkeypatch.setattr(process_group, "BEAT", 0.01)
    left, right = pair()
    group = ended.group(1, left)
    right.send(Message(process_group.STOP, {}))
    assert group.receive() == (1, Message("stop", {}, []))
    right.close()
    time.sleep(0.6)  # for more beats than those of silence
    assert ended.messages == []
