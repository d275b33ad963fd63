"""A fleet under Ray Serve in a process of its own, for tests."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
START, REQUEST = 600.0, 120.0  # seconds
PROCESS_ID = re.compile(rb'"process_id": ?(\d+)')


class Answer(NamedTuple):
    """The outcome of a request."""

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events, up to and including "[DONE]"."""
        data = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        return [text if text == "[DONE]" else json.loads(text) for text in data]


class Fleet(NamedTuple):
    """A running fleet."""

    url: str
    process: subprocess.Popen

    def request(self, path: str, body: dict[str, Any] | None = None) -> Answer:
        """Send a request; a connection that breaks, or hangs, raises."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self.url + path, data, headers), timeout=REQUEST
            ) as response:
                return Answer(response.status, response.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read())

    def process_ids(self, count: int, seconds: float) -> set[int]:
        """The process ids of the replicas, once there are `count` of them that are alive."""
        end, running = time.monotonic() + seconds, set()
        while time.monotonic() < end:
            answer = self.request("/server_info")
            running |= set(map(int, PROCESS_ID.findall(answer.body)))
            running = {pid for pid in running if Path(f"/proc/{pid}").exists()}
            if len(running) == count:
                return running
            time.sleep(0.2)
        raise TimeoutError(f"{len(running)} replicas answer after {seconds} s; {count} must")


@contextlib.contextmanager
def clients(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that send requests. Once the block ends, also with an error, no further request is sent.

    A fleet that does not answer then costs the time of one request, not that of all.
    """
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def running_fleet(log: Path, *arguments: str) -> Iterator[Fleet]:
    """Serve the embedded model with two replicas while the block runs.

    Args:
        log: file for what the processes print.
        arguments: further ones of `entropic serve`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "entropic_jax", "serve", "--replicas", "2", "--port", str(port)]
    command += ["--max-num-seqs", "4", "--max-model-len", "1024", "--preset", "off", *arguments]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_worker_niceness": "0",  # as all other processes of the tests
    }
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=log.parent, env=environment, stdout=output, stderr=output)
        fleet = Fleet(f"http://127.0.0.1:{port}", process)
        try:
            _wait_until_ready(fleet, log)
            yield fleet
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(90)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(fleet: Fleet, log: Path) -> None:
    end = time.monotonic() + START
    while time.monotonic() < end and fleet.process.poll() is None:
        with contextlib.suppress(OSError):
            if fleet.request("/ready").status == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(log.read_text()[-4000:])
