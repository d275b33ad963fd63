"""Servers as processes: ours and others', started on a free port, asked whether they are ready, and ended."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from .paths import ROOT


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class ServerProcess:
    """A server under `command`, to which `--port` is added; the path `ready` answers 200 once it is."""

    def __init__(
        self, command: Sequence[str], log: Path, ready: str = "/ready", port: int | None = None
    ) -> None:
        self.command, self.log, self.ready_path = list(command), log, ready
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, limit: float = 900.0) -> float:
        """Start it and wait until it is ready; the seconds it took. RuntimeError with the end of its log."""
        begin = time.perf_counter()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.command, "--port", str(self.port)],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        while not self._answers():
            if self.process.poll() is not None or time.perf_counter() - begin > limit:
                self.kill()
                tail = self.log.read_text("utf-8", "replace")[-2000:]
                raise RuntimeError(f"{' '.join(self.command)} is not ready; the end of its log:\n{tail}")
            time.sleep(0.1)
        return time.perf_counter() - begin

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self.ready_path, timeout=5) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def resident(self) -> float:
        """Megabytes of memory that the process holds (Linux)."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS"))

    def kill(self) -> None:
        """End it at once, as kill -9 does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self, limit: float = 60.0) -> int:
        """Ask it to end; its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"the server did not end within {limit:g} s of SIGTERM") from None


def ours(model: Path, *options: str) -> list[str]:
    """The command of our own server."""
    quiet = ("--disable-log-requests", "--uvicorn-log-level", "warning")
    return [sys.executable, "-m", "entropic_jax.serving.server", "--model", str(model), *quiet, *options]


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, ready: str = "/ready") -> Iterator[ServerProcess]:
    """A server that is ready, and ended at the end."""
    server = ServerProcess(command, log, ready)
    server.start()
    try:
        yield server
    finally:
        server.kill()
