"""Engine processes: every engine of a comparison runs in a process of its own, driven over a pipe."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..paths import ROOT
from .drafting_engines import EVERY_ENGINE
from .weights import conversion_of, library_of


class EngineError(Exception):
    """An engine failed or exceeded its time limit; the message says how."""


class EngineProcess:
    """One engine in a process of its own; its output is kept in a log file."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path, limit: float) -> None:
        self.limit, self.log = limit, log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        try:
            self.version: str = self._answer()["version"]
        except EngineError:
            self.close()
            raise

    def call(self, method: str, *arguments: int | str) -> dict[str, Any]:
        """Call a method of the engine; returns its `seconds` and `tokens`. Raises EngineError."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"method": method, "arguments": arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise EngineError("its process has ended") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], self.limit)
        if not ready:
            raise EngineError(f"took more than {self.limit:g} s")
        line = self.process.stdout.readline()
        if not line:
            output = [text for text in self.log.read_text(errors="replace").splitlines() if text.strip()]
            raise EngineError(
                f"its process ended with status {self.process.wait()}: {''.join(output[-1:])[:200]}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


class EnginePool:
    """The engines of a run: each is started when it is first called, and again after a failure."""

    def __init__(self, directory: Path, threads: int, limit: float, interpreters: dict[str, str]) -> None:
        """Prepare to start engines; none is started yet.

        Args:
            directory: holds `huggingface/`, the original weights, and their conversions.
            threads: cores and threads of every engine.
            limit: the most seconds of one call.
            interpreters: the Python of each library; this one where none is named.
        """
        self.directory, self.threads, self.limit = directory, str(threads), limit
        self.interpreters = interpreters
        self.running: dict[str, EngineProcess] = {}
        self.versions: dict[str, str] = {}
        names = (f"{library}_NUM_THREADS" for library in ("OMP", "MKL", "OPENBLAS"))
        self.environment = {**os.environ, **dict.fromkeys(names, self.threads), "HF_HUB_OFFLINE": "1"}

    def command(self, engine: str) -> list[str]:
        """How to start the process of an engine."""
        interpreter = self.interpreters.get(library_of(engine), sys.executable)
        module, threads = ["-m", "benchmarks.harness.baselines.worker"], ["--threads", self.threads]
        return [interpreter, *module, engine, str(self.directory), *threads]

    def prepare(self, engine: str) -> None:
        """Convert the weights for an engine, if that has not been done; raises EngineError."""
        name = conversion_of(library_of(engine), EVERY_ENGINE[engine][1])
        if (self.directory / name).exists():
            return
        command = [*self.command(engine), "--prepare"]
        result = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True)
        if result.returncode:
            raise EngineError(f"its conversion failed: {result.stderr.strip().splitlines()[-1][:200]}")

    def call(self, engine: str, method: str, *arguments: int | str) -> dict[str, Any]:
        """Call a method of an engine. A failure ends its process, and the next call starts a new one."""
        try:
            if engine not in self.running:
                self.prepare(engine)
                log = self.directory / f"{engine}.log"
                self.running[engine] = EngineProcess(self.command(engine), self.environment, log, self.limit)
                self.versions[engine] = self.running[engine].version
            return self.running[engine].call(method, *arguments)
        except OSError as error:
            raise EngineError(str(error)) from None
        except EngineError:
            if engine in self.running:
                self.running.pop(engine).close()
            raise

    def close(self) -> None:
        """End all processes."""
        for process in self.running.values():
            process.close()
