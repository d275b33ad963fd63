"""An engine in a process of its own: both ends of the pipe.

    python -m benchmarks.worker ENGINE DIRECTORY [--threads 2] [--prepare]

reads one JSON command per line and answers each with one line; `--prepare` only converts the weights. The
interpreter must have the engine and numpy, nothing else.
"""

import argparse
import gc
import json
import os
import select
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from .peers import ENGINES, Engine
from .weights import CONVERSIONS

ROOT = Path(__file__).resolve().parents[1]


def family(engine: str) -> str:
    """The library behind the name of an engine: what stands before the first hyphen."""
    return engine.partition("-")[0]


class PeerError(Exception):
    """An engine that failed or took too long, in a few words."""


class Peer:
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
        except PeerError:
            self.close()
            raise

    def ask(self, do: str, *arguments: int | str) -> dict[str, Any]:
        """Call a method of the engine; `seconds` and `tokens` of the answer. Raises PeerError."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, "arguments": arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise PeerError("its process has ended") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], self.limit)
        if not ready:
            raise PeerError(f"took more than {self.limit:g} s")
        line = self.process.stdout.readline()
        if not line:
            said = [text for text in self.log.read_text(errors="replace").splitlines() if text.strip()]
            raise PeerError(
                f"its process ended with status {self.process.wait()}: {''.join(said[-1:])[:200]}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


class Peers:
    """The engines of a run, started when first needed and again after a failure."""

    def __init__(self, directory: Path, threads: int, limit: float, interpreters: dict[str, str]) -> None:
        """`limit` is the most seconds of a call; `interpreters` is by family, by default this Python."""
        self.directory, self.threads, self.limit = directory, str(threads), limit
        self.interpreters = interpreters
        self.running: dict[str, Peer] = {}
        self.versions: dict[str, str] = {}
        names = (f"{library}_NUM_THREADS" for library in ("OMP", "MKL", "OPENBLAS"))
        self.environment = {**os.environ, **dict.fromkeys(names, self.threads), "HF_HUB_OFFLINE": "1"}

    def command(self, engine: str) -> list[str]:
        """How to start the process of an engine."""
        interpreter = self.interpreters.get(family(engine), sys.executable)
        module, threads = ["-m", "benchmarks.worker"], ["--threads", self.threads]
        return [interpreter, *module, engine, str(self.directory), *threads]

    def prepare(self, engine: str) -> None:
        """Convert the weights for an engine, if that has not been done; raises PeerError."""
        if family(engine) not in CONVERSIONS or (self.directory / CONVERSIONS[family(engine)][0]).exists():
            return
        command = [*self.command(engine), "--prepare"]
        result = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True)
        if result.returncode:
            raise PeerError(f"its conversion failed: {result.stderr.strip().splitlines()[-1][:200]}")

    def ask(self, engine: str, do: str, *arguments: int | str) -> dict[str, Any]:
        """Like `Peer.ask`; a failure ends the process of the engine."""
        try:
            if engine not in self.running:
                self.prepare(engine)
                log = self.directory / f"{engine}.log"
                self.running[engine] = Peer(self.command(engine), self.environment, log, self.limit)
                self.versions[engine] = self.running[engine].version
            return self.running[engine].ask(do, *arguments)
        except OSError as error:
            raise PeerError(str(error)) from None
        except PeerError:
            if engine in self.running:
                self.running.pop(engine).close()
            raise

    def close(self) -> None:
        """End all processes."""
        for peer in self.running.values():
            peer.close()


def pin(count: int) -> None:
    """Keep this process on `count` processors, the same for every engine, where the system allows it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, processors(count))


def processors(count: int) -> list[int]:
    """The first `count` processors this process may use, on different cores as far as there are enough."""
    cores: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings.read_text() if siblings.exists() else str(cpu), []).append(cpu)
    ranked = sorted((rank, cpu) for group in cores.values() for rank, cpu in enumerate(group))
    return [cpu for _, cpu in ranked[:count]]


def serve(engine_class: type, half: bool, directory: Path, threads: int) -> None:
    """Answer commands `{"do": method, "arguments": [...]}` from standard input until it ends.

    An argument that is a string names a .npy file. Answers go to the original standard output; whatever the
    libraries print there is diverted to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        engine: Engine = engine_class(directory, threads, half)
        answer(version=engine.version)
        for line in sys.stdin:
            command = json.loads(line)
            arguments = [np.load(a) if isinstance(a, str) else a for a in command["arguments"]]
            method = getattr(engine, command["do"])
            gc.collect()
            begin = time.perf_counter()
            tokens = method(*arguments)
            seconds = time.perf_counter() - begin
            listed = None if tokens is None else np.asarray(tokens).tolist()
            answer(
                seconds=seconds, tokens=listed, detail=engine.detail, read=getattr(engine, "tokens_read", 0)
            )
    except Exception as error:
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}".splitlines()[0])
        sys.exit(1)


def main() -> None:
    """Run one engine, or convert the weights for it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("directory", type=Path, help="holds huggingface/ and what was converted from it")
    parser.add_argument("--threads", type=int, default=2, help="threads of the engine")
    parser.add_argument("--prepare", action="store_true", help="convert the weights and stop")
    arguments = parser.parse_args()
    engine_class, half = ENGINES[arguments.engine]
    if arguments.prepare:
        CONVERSIONS[family(arguments.engine)][1](arguments.directory)
        return
    pin(arguments.threads)
    serve(engine_class, half, arguments.directory, arguments.threads)


if __name__ == "__main__":
    main()
