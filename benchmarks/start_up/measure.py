"""Measurements of start-up: processes started with empty and with filled caches."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from ..harness.paths import ROOT

PRESETS = ("off", "meso")
CACHES = ("all", "no programs")  # which caches a process has
NAMED_FOLDERS = ("JAX_COMPILATION_CACHE_DIR", "ENTROPIC_KERNEL_CACHE", "ENTROPIC_COST_CACHE")
LIMIT = 600  # seconds of a process
REQUEST = {"prompt": "def add(", "max_tokens": 8, "stream": True, "ignore_eos": True, "seed": 1}


def environment(folder: Path, caches: str) -> dict[str, str]:
    """The environment of a process with its caches in a folder.

    Args:
        folder: the folder that holds the caches, empty before the first process.
        caches: one of `CACHES`.
    """
    left_out = {*NAMED_FOLDERS, "ENTROPIC_PROGRAM_CACHE", "PYTHONDONTWRITEBYTECODE"}
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    programs = {} if caches == "all" else {"ENTROPIC_PROGRAM_CACHE": ""}
    return {**kept, "XDG_CACHE_HOME": str(folder), **programs}


class Start(NamedTuple):
    """Measurements of a process."""

    seconds: dict[str, float]  # from its start, by what they are counted to
    resident: float | None = None  # MiB of memory, once all programs are there; None of one that has ended


def generate(preset: str, settings: dict[str, str]) -> Start:
    """Seconds from the start of `entropic generate` to its exit.

    Args:
        preset: the name of the preset.
        settings: the environment of the process.
    """
    command = [sys.executable, "-m", "entropic_jax", "generate", "--preset", preset, "--prompt", "import "]
    begin = time.perf_counter()
    subprocess.run(
        [*command, "--max-tokens", "20", "--seed", "1"],
        env=settings,
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=LIMIT,
    )
    return Start({"exit": time.perf_counter() - begin})


def serve(preset: str, settings: dict[str, str]) -> Start:
    """Seconds from the start of a server to the first token of a waiting request, and to the warm-up's end.

    Its memory is read after the warm-up.

    Args:
        preset: the name of the preset.
        settings: the environment of the process.
    """
    command = [sys.executable, "-m", "entropic_jax.serving.server", "--port", "0", "--preset", preset]
    begin = time.perf_counter()
    with running([*command, "--log-format", "json"], settings) as (process, log):
        url = next(entry["address"] for entry in log if entry["message"] == "listening")
        body = json.dumps(REQUEST).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            events = (line for line in answer if line.startswith(b"data: {"))
            next(event for event in events if json.loads(event[6:])["choices"][0]["text"])
            first = time.perf_counter() - begin
            answer.read()
        while not is_ready(url):
            if process.poll() is not None:
                raise RuntimeError(f"the server has ended with status {process.returncode}")
            time.sleep(0.05)
        seconds = {"first token": first, "ready": time.perf_counter() - begin}
        return Start(seconds, resident(process.pid))


def resident(process_id: int) -> float | None:
    """MiB of memory that a process has; None where the system does not tell."""
    file = Path(f"/proc/{process_id}/status")
    if not file.exists():
        return None
    return next(int(line.split()[1]) / 1024 for line in file.read_text().splitlines() if "VmRSS" in line)


@contextlib.contextmanager
def running(
    command: Sequence[str], settings: dict[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], Iterator[dict]]]:
    """A process, and the entries of its log as they are written; it is ended with the block."""
    with tempfile.NamedTemporaryFile("w+") as file, open(file.name, "ab") as written:
        process = subprocess.Popen(command, env=settings, cwd=ROOT, stdout=written, stderr=written)

        def entries() -> Iterator[dict]:
            line = ""
            while process.poll() is None:
                line += file.readline()
                if not line.endswith("\n"):
                    time.sleep(0.02)
                    continue
                if line.startswith("{"):
                    yield json.loads(line)
                line = ""
            file.seek(0)
            raise RuntimeError(f"{' '.join(command)} has ended:\n{file.read()[-2000:]}")

        try:
            yield process, entries()
        finally:
            process.terminate()
            process.wait(60)


def is_ready(url: str) -> bool:
    """Whether the server has all programs of its warm-up."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


COMMANDS: dict[str, Callable[[str, dict[str, str]], Start]] = {
    "generate": generate,
    "serve": serve,
}


def measure(commands: Sequence[str], repeat: int, console: Console) -> list[dict]:
    """A record of every start: command, preset, caches, whether it was the first, its seconds and memory.

    Args:
        commands: among `COMMANDS`.
        repeat: starts with filled caches, of each kind, in turn.
        console: where to say what runs.
    """
    records: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeat + 1):
            for command in commands:
                for preset in PRESETS:
                    for caches in CACHES:
                        settings = environment(Path(folder, command, preset, caches), caches)
                        start = COMMANDS[command](preset, settings)
                        kind = {"command": command, "preset": preset, "caches": caches, "cold": number == 0}
                        console.print(f"{kind} {start}", highlight=False)
                        records.append({**kind, **start._asdict()})
    return records
