"""The server as a process: it starts, drains on SIGTERM, and restarts after kill -9."""

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from entropic_jax.serving.http import process
from entropic_jax.serving.http.process import LAST_RESORT, Server, bind, last_seconds
from entropic_jax.serving.http.settings import Settings
from tests.shallow_model import shallow_model

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


class Process:
    """A server process and its log."""

    def __init__(
        self, *options: str, program: Path = ROOT / "serving" / "server.py", **environment: str
    ) -> None:
        command = [sys.executable, program, "--port", "0", "--warmup", "none"]
        command += ["--model", str(shallow_model()), "--max-num-seqs", "2", "--max-model-len", "512"]
        command += ["--log-format", "json", *options]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        self.lines: list[dict] = []
        self.url = ""
        for line in self.process.stderr:
            self.lines.append(json.loads(line))
            if self.lines[-1]["message"] == "listening":
                self.url = self.lines[-1]["address"]
                break
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        self.lines += [json.loads(line) for line in self.process.stderr]

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        status = self.process.wait(60)
        self.reader.join(10)
        return status


@contextlib.contextmanager
def started(*options: str, **settings: Any) -> Iterator[Process]:
    server = Process(*options, **settings)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)
        server.process.stderr.close()


def complete(url: str, **body) -> str:
    fields = {"prompt": "def add(", "temperature": 0, "max_tokens": 12, **body}
    answer = httpx2.post(f"{url}/v1/completions", json=fields, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_it_comes_back_and_drains():
    with started("--preset", "off") as first:
        text = complete(first.url)
        body = {"prompt": "x", "max_tokens": 400, "stream": True, "ignore_eos": True}
        with httpx2.stream("POST", f"{first.url}/v1/completions", json=body, timeout=300) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert first.end(signal.SIGKILL) == -signal.SIGKILL
            with pytest.raises(httpx2.HTTPError):
                list(lines)
    with started("--api-key", "secret-key", "--preset", "off") as second:
        with pytest.raises(AssertionError, match="AuthenticationError"):
            complete(second.url)
        headers = {"Authorization": "Bearer secret-key"}
        with httpx2.Client(headers=headers, timeout=300) as client:
            body = {"prompt": "def add(", "temperature": 0, "max_tokens": 12}
            assert client.post(f"{second.url}/v1/completions", json=body).json()["choices"][0]["text"] == text
            body = {**body, "max_tokens": 100, "stream": True, "ignore_eos": True}
            with client.stream("POST", f"{second.url}/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                second.process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert second.process.wait(60) == 0
        second.reader.join(10)
    assert "secret-key" not in json.dumps(second.lines)
    assert second.lines[-1]["message"] == "stopped"


@pytest.mark.parametrize("waiting", [False, True], ids=["idle", "a request waits"])
def test_sigterm_while_programs_compile_ends_in_time(tmp_path, waiting):
    options = ("--warmup", "full", "--preset", "full", "--shutdown-timeout", "12")
    with started(*options, JAX_COMPILATION_CACHE_DIR=str(tmp_path)) as server:
        assert httpx2.get(f"{server.url}/ready").status_code == 503
        with httpx2.Client() as client, concurrent.futures.ThreadPoolExecutor(1) as thread:
            ask = lambda: client.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=60)
            answer = thread.submit(ask) if waiting else None
            while waiting and not httpx2.get(f"{server.url}/entropic/state").json()["waiting"]:
                time.sleep(0.02)  # everybody who waits is counted from the beginning
            start = time.monotonic()
            assert server.end(signal.SIGTERM) == 0
            assert time.monotonic() - start < 12
            if answer is not None:
                answer.exception()  # the server has gone, or has answered 503
        assert server.lines[-1]["message"] == "stopped"
        assert server.lines[-1]["seconds_left"] > LAST_RESORT * last_seconds(12) - 0.5


def test_the_last_resort_ends_a_process_that_hangs(tmp_path):
    """A front end that cannot close its pools, as after a deadlock."""
    program = tmp_path / "hanging.py"
    program.write_text(
        "import sys, time\n"
        "from entropic_jax.serving.http.worker_pools import WorkerPools\n"
        "WorkerPools.close = lambda pools: time.sleep(100)\n"
        "from entropic_jax.serving.cli import main\n"
        "sys.exit(main(['serve', *sys.argv[1:]]))\n"
    )
    with started("--shutdown-timeout", "12", program=program) as server:
        start = time.monotonic()
        assert server.end(signal.SIGTERM) == 0
        assert time.monotonic() - start < 12
        assert server.lines[-1]["message"] == "stopped" and server.lines[-1]["forced"]
        assert server.lines[-1]["seconds_left"] > 0


def test_the_stages_of_a_shutdown_leave_seconds_for_the_end_of_the_process(monkeypatch):
    slept, ended = [], []
    clock = SimpleNamespace(monotonic=lambda: 101.0, sleep=slept.append)  # a second after the signal
    monkeypatch.setattr(process, "time", clock)
    monkeypatch.setattr(process, "leave", ended.append)
    server = object.__new__(Server)
    server.frontend = SimpleNamespace(settings=Settings(drain=30))
    server.deadline, server.status, server.force_exit, server._logged = 130.0, 0, False, False
    server.signalled = threading.Event()
    server.signalled.set()
    server.end_in_time()
    assert ended == [0] and 3.0 <= 29 - slept[0] < last_seconds(30)
    clock.monotonic = lambda: 125.5
    left = 4.5 - server.seconds_for_engine()
    assert 29 - slept[0] < left < last_seconds(30)  # the engine is given up before the last resort


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--port", "99999"), "--port must be an integer between 0 and 65535; got 99999"),
        (("--host", "203.0.113.9"), "must be an address of this machine"),
        (
            ("--model", "nowhere"),
            "--model must be a directory with config.json and safetensors files; got 'nowhere'",
        ),
        (("nowhere",), "--model must be a directory with"),
        (("--model", "README.md"), "--model must be a directory with"),
        (("--preset", "paper"), "--preset must be one of off, micro, meso, "),
        (("--preset", "macro", "--scheduling-policy", "fcfs"), "--scheduling-policy is not entropic"),
        (("--allowed-origins", "[1]"), "--allowed-origins"),
        (("--schedule", "fcfs"), "--scheduling-policy"),
        (
            ("--max-modell-len", "9"),
            "unrecognized arguments: --max-modell-len (did you mean --max-model-len?)",
        ),
        (("--max_num_seqs", "9"), "--max_num_seqs (did you mean --max-num-seqs?)"),
        (("--max-num-seqs", "5000"), "--max-num-seqs must be an integer between 1 and 4096; got 5000"),
        (("--served-model-name", ""), "--served-model-name must be a string of 1 to 200 characters; got ''"),
        (("--enforce-eager",), "--enforce-eager (did you mean --warmup none?)"),
        (("--swap-space=4",), "--swap-space=4 (preempted requests are recomputed)"),
        (("--ssl-keyfile", "k"), "--ssl-keyfile needs --ssl-certfile; got k alone"),
        (
            ("--ssl-certfile", "nowhere"),
            "must be PEM files of a certificate and its key; got nowhere (No such",
        ),
        (("--uds", "/nowhere/x"), "--uds must be a path for a new socket; got /nowhere/x"),
        (("--max-model-len", "0"), "--max-model-len"),
        (("--chat-template", "nowhere"), "--chat-template must be a readable file; got nowhere (No such"),
        (
            ("--chat-template", "{% for m in messages %}"),
            "--chat-template must be a Jinja template; got an error in line 1: Unexpected end of template",
        ),
        (("--preset", "entropix", "--target-entropy", "1"), "target-entropy must not be set with the preset"),
        (("--preset", "micro", "--law", "edt", "--target-entropy", "1"), "must not be set with the law edt"),
        (("--generation-config", "nowhere"), "--generation-config must be auto, vllm or a folder with"),
        (("--override-generation-config", "[]"), "must be a JSON object"),
        (
            ("--override-generation-config", '{"temprature": 1}'),
            "--override-generation-config has no parameter temprature; did you mean temperature?",
        ),
        (
            ("--override-generation-config", '{"top_p": 0}'),
            "--override-generation-config: top_p must be a number above 0 and at most 1; got 0",
        ),
    ],
)
def test_wrong_use_is_one_line(entropic, options, said):
    status, _, errors = entropic("serve", "--port", "0", "--warmup", "none", *options)
    assert status == 2
    assert said in errors.splitlines()[-1]


def test_a_port_in_use_is_said_before_a_model_is_loaded(entropic, monkeypatch):
    monkeypatch.setattr("entropic_jax.models.load", lambda *_: pytest.fail("a model was loaded"))
    with bind(Settings(port=0)) as other:
        port = other.getsockname()[1]
        status, _, errors = entropic("serve", "--port", str(port), "--warmup", "none")
    assert status == 2
    assert f"a free port; got 127.0.0.1:{port} (Address already in use)" in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--lowest-temperature", "2", "--highest-temperature", "1"),
            "--lowest-temperature must be below --highest-temperature = 1; got 2",
        ),
        (("--preset", "macro", "--scheduling-policy", "fcfs"), "--scheduling-policy is not entropic"),
    ],
)
def test_wrong_control_is_said_before_a_model_is_loaded(entropic, monkeypatch, options, said):
    monkeypatch.setattr("entropic_jax.models.load", lambda *_: pytest.fail("a model was loaded"))
    status, _, errors = entropic("serve", "--port", "0", *options)
    assert status == 2 and said in errors.splitlines()[-1]


@pytest.mark.parametrize(
    "options",
    [("--chat-template", "{{"), ("--override-generation-config", "{"), ("--generation-config", "no")],
)
def test_wrong_text_options_are_said_before_a_model_is_loaded(entropic, monkeypatch, options):
    monkeypatch.setattr("entropic_jax.models.load", lambda *_: pytest.fail("a model was loaded"))
    status, _, errors = entropic("serve", "--port", "0", *options)
    assert status == 2 and options[0] in errors.splitlines()[-1]
