"""Several processes on one machine: the answers of one process, and the end of all when one of them dies."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from entropic_jax import LLM, SamplingParams, models
from entropic_jax.serving.engine.embedding import Embedder
from tests.compilation import virtual_devices
from tests.marks import exhaustive

from .process_programs import PROMPTS

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600  # that a set of processes gets at most
END = 10  # seconds in which all end once one is dead


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def divisible(directory, tmp_path_factory) -> str:
    """A model whose heads and vocabulary four devices can divide."""
    changes = dict(vocab_size=260, num_key_value_heads=4)
    small = models.load(directory)
    config = dataclasses.replace(small.config, **changes)
    path = tmp_path_factory.mktemp("divisible")
    models.save(dataclasses.replace(models.initialise(config, 3), tokenizer=small.tokenizer), path)
    return str(path)


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """Of the processes: caches of their own, so that each compiles once and later sets load."""
    folder = str(tmp_path_factory.mktemp("cache"))
    return {**os.environ, "JAX_PLATFORMS": "cpu", "ENTROPIC_PROGRAM_CACHE": folder, "XDG_CACHE_HOME": folder}


@contextlib.contextmanager
def started(commands: list[list[str]], environment: dict[str, str], folder: Path) -> Iterator[list[Any]]:
    """Processes with their logs in `folder`; those that are left at the end are killed."""
    processes = []
    try:
        for number, command in enumerate(commands):
            with (folder / f"{number}.out").open("w") as out, (folder / f"{number}.err").open("w") as err:
                processes.append(subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err, env=environment))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait(30)


def statuses(processes: list[Any], seconds: float) -> list[int]:
    """The exit statuses, at most so many seconds later."""
    deadline = time.monotonic() + seconds
    return [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]


def tokens_of(
    directory: str, processes: int, devices: int, environment: dict[str, str], folder: Path, **options: Any
) -> Any:
    """What `process_programs` prints where so many processes have so many devices each."""
    port, commands = free_port(), []
    for number in range(processes):
        stated = {**options, "tensor_parallel_size": processes * devices}
        if processes > 1:
            stated |= dict(
                coordinator_address=f"127.0.0.1:{port}", num_processes=processes, process_id=number
            )
        program = [sys.executable, "-m", "tests.serving.process_programs"]
        commands.append([*program, directory, json.dumps(stated)])
    flags = {"XLA_FLAGS": virtual_devices(devices)}
    with started(commands, {**environment, **flags}, folder) as running:
        ended = statuses(running, SECONDS)
    assert ended == [0] * processes, (folder / "0.err").read_text()[-3000:]
    assert not any("tokens" in (folder / f"{number}.out").read_text() for number in range(1, processes))
    return json.loads((folder / "0.out").read_text().splitlines()[-1])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("preset", "processes", "devices"),
    [
        ("off", 4, 1),
        ("off", 2, 1),
        ("meso", 2, 1),
        ("full-lossy", 2, 1),
    ],
)
def test_processes_give_the_tokens_of_one(preset, processes, devices, divisible, environment, tmp_path):
    stated = {"preset": preset} | ({"num_speculative_tokens": 3} if preset == "meso" else {})
    for name in ("alone", "together"):
        (tmp_path / name).mkdir()
    total = processes * devices
    alone = tokens_of(divisible, 1, total, environment, tmp_path / "alone", **stated)
    several = tokens_of(divisible, processes, devices, environment, tmp_path / "together", **stated)
    assert several["tokens"] == alone["tokens"] and [len(t) for t in alone["tokens"]] == [40] * 3
    assert several["devices"] == total
    assert alone["share_read"] == 1 and 1 / processes <= several["share_read"] < 1.1 / processes
    assert several["preemptions"] > 0, "no row was saved and restored"
    assert several["drafting"] == (preset == "meso"), "no launch drafted, or one that should not"


@pytest.mark.exhaustive
def test_two_processes_convert_a_model_that_any_number_loads(divisible, environment, tmp_path):
    output, port = str(tmp_path / "converted"), free_port()
    command = [sys.executable, "-m", "entropic_jax", "convert", "--model", divisible, "--output", output]
    command += ["--dtype", "float32", "--tensor-parallel-size", "2", "--num-processes", "2"]
    command += ["--coordinator-address", f"127.0.0.1:{port}"]
    for name in ("convert", "alone", "together", "one"):
        (tmp_path / name).mkdir()
    with started(
        [[*command, "--process-id", str(number)] for number in range(2)],
        {**environment, "XLA_FLAGS": virtual_devices(1)},
        tmp_path / "convert",
    ) as running:
        assert statuses(running, SECONDS) == [0, 0], (tmp_path / "convert" / "0.err").read_text()[-3000:]
    for number in range(2):  # each has written shards of its own
        assert any(Path(output, "weights", f"ocdbt.process_{number}", "d").iterdir())
    run = lambda path, processes, folder: tokens_of(
        path, processes, 2 // processes, environment, tmp_path / folder, preset="off"
    )["tokens"]
    expected = run(divisible, 1, "alone")
    assert run(output, 2, "together") == expected and run(output, 1, "one") == expected


def servers(directory: str, port: int, num_processes: int = 2, *options: str) -> list[list[str]]:
    """The commands of a server's processes."""
    sizes = [
        "--max-num-seqs",
        "1",
        "--max-num-batched-tokens",
        "64",
        "--max-model-len",
        "128",
        "--kv-cache-bytes",
        "262144",
        *options,
    ]
    command = [sys.executable, "-m", "entropic_jax", "serve", directory, "--port", "0", *sizes]
    command += ["--log-format", "json", "--tensor-parallel-size", str(num_processes), "--preset", "off"]
    command += ["--coordinator-address", f"127.0.0.1:{port}", "--num-processes", str(num_processes)]
    return [[*command, "--process-id", str(number)] for number in range(num_processes)]


def log_of(folder: Path, number: int) -> list[dict[str, Any]]:
    """The records of a process's log."""
    lines = (folder / f"{number}.err").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


@contextlib.contextmanager
def serving(
    directory: str, environment: dict[str, str], folder: Path, *options: str, num_processes: int = 2
) -> Iterator[Any]:
    """Processes that serve; yields them and a client."""
    flags, commands = (
        {"XLA_FLAGS": virtual_devices(1)},
        servers(directory, free_port(), num_processes, *options),
    )
    with started(commands, {**environment, **flags}, folder) as running:
        deadline, url = time.monotonic() + SECONDS, ""
        while not url:
            assert time.monotonic() < deadline, "the server did not begin to listen"
            assert all(process.poll() is None for process in running), (folder / "0.err").read_text()[-3000:]
            time.sleep(0.1)
            url = next((r["address"] for r in log_of(folder, 0) if r["message"] == "listening"), "")
        with httpx2.Client(base_url=url, timeout=SECONDS) as client:
            while client.get("/ready").status_code != 200:
                assert time.monotonic() < deadline, "the warm-up did not end"
                time.sleep(0.2)
            yield running, client


def complete(client: httpx2.Client, prompt: str) -> str:
    body = {"model": "m", "prompt": prompt, "max_tokens": 12, "seed": 3, "temperature": 0.7}
    answer = client.post("/v1/completions", json={**body, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def texts_of_one_process(directory: str) -> list[str]:
    """What `complete` has for `PROMPTS` from a process with one device."""
    with LLM(directory, preset="off", max_num_seqs=1, max_model_len=128, num_pages=16) as llm:
        params = SamplingParams(max_tokens=12, seed=3, temperature=0.7, ignore_eos=True)
        return [output.outputs[0].text for output in llm.generate(PROMPTS, params)]


def assert_embeddings_of_one_process(directory: str, client: httpx2.Client) -> None:
    """Texts of two shapes, while requests decode."""
    texts = [[5, 6, 7], list(range(2, 30)), list(range(2, 120))]
    model = models.load(directory)
    expected = Embedder(model, 128, lambda function: None).embed(texts, "mean", threading.Event())
    with ThreadPoolExecutor(3) as threads:
        texts_ahead = [threads.submit(complete, client, PROMPTS[0]) for _ in range(2)]
        futures = [threads.submit(embeddings, client, texts) for _ in range(2)]
        for answer in futures:
            unit = expected / np.linalg.norm(expected, axis=-1, keepdims=True)
            np.testing.assert_allclose(answer.result(), unit, rtol=1e-4, atol=1e-5)
        assert len({text.result() for text in texts_ahead}) == 1


def embeddings(client: httpx2.Client, texts: list[list[int]]) -> np.ndarray:
    answer = client.post("/v1/embeddings", json={"model": "m", "input": texts})
    assert answer.status_code == 200, answer.text
    return np.array([entry["embedding"] for entry in answer.json()["data"]])


def killed_while_streaming(client: httpx2.Client, process: subprocess.Popen) -> list[str]:
    """The lines of a stream during which a process is killed."""
    body = {"model": "m", "prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}
    lines = []
    with client.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line and not lines:
                process.kill()
            lines += [line] if line else []
    return lines


def ended(request: Future[httpx2.Response]) -> bool:
    """Whether a request has an answer, or its connection was closed by a process that ended before."""
    try:
        return request.result().status_code in (200, 500, 503)
    except httpx2.RemoteProtocolError as error:
        return "disconnected without sending a response" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, *exhaustive(4)])
def test_a_server_of_several_processes(number, divisible, environment, tmp_path):
    options, several = ("--served-model-name", "m"), partial(serving, divisible, environment)
    (tmp_path / "first").mkdir()
    with several(tmp_path / "first", *options, num_processes=number) as (processes, client):
        answers = [complete(client, prompt) for prompt in PROMPTS]
        assert answers == [complete(client, prompt) for prompt in PROMPTS] == texts_of_one_process(divisible)
        assert_embeddings_of_one_process(divisible, client)
        assert client.get("/metrics").status_code == 200
        for process in processes:  # as Kubernetes does, to all at once
            process.send_signal(signal.SIGTERM)
        assert statuses(processes, 60) == [0] * number
    for victim in (1, 0):
        folder = tmp_path / f"victim-{victim}"
        folder.mkdir()
        with several(folder, *options, num_processes=number) as (processes, client):
            assert [complete(client, prompt) for prompt in PROMPTS] == answers
            if victim == 1:
                with ThreadPoolExecutor(2) as threads:
                    body = {"model": "m", "prompt": "a", "max_tokens": 100, "ignore_eos": True}
                    many = {"model": "m", "input": [[5, 6, 7]] * 512}
                    bodies = {"/v1/completions": body, "/v1/embeddings": many}
                    others = [threads.submit(client.post, path, json=x) for path, x in bodies.items()]
                    lines = killed_while_streaming(client, processes[victim])
                    assert all(ended(other) for other in others)
                assert f"process {victim} of {number} has ended" in lines[-2] and '"error"' in lines[-2], (
                    lines[-3:]
                )
            processes[victim].kill()
            survivors = [process for other, process in enumerate(processes) if other != victim]
            assert statuses(survivors, END) == [1] * (number - 1)
        message = log_of(folder, 1 - victim)[-1]["message"]
        assert message == f"process {victim} of {number} has ended; without it, this process ends"
        assert "Traceback" not in (folder / f"{1 - victim}.err").read_text()
