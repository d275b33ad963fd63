"""A replica of two processes under Ray Serve: its answers, and the death of the process that follows."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from entropic_jax import LLM, SamplingParams
from tests.serving.ray_fleet import running_fleet

pytest.importorskip("ray", reason="pip install -e '.[ray]'")
pytest.importorskip("fastapi")
pytestmark = pytest.mark.exhaustive

BACK = 90.0  # seconds in which a replica must have been replaced
TITLE = b"ray::ReplicaProcess"


def followers() -> list[int]:
    """The process ids of the actors that follow a replica."""
    result = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if (folder / "cmdline").read_bytes().startswith(TITLE):
                result.append(int(folder.name))
    return result


def test_a_replica_of_two_processes(directory, tmp_path):
    before = set(followers())
    options = ("--model", directory, "--max-model-len", "128", "--warmup", "none")
    options += ("--replicas", "1", "--num-processes", "2", "--tensor-parallel-size", "2")
    body = {"prompt": "def f(", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    with LLM(directory, preset="off", max_num_seqs=4, max_model_len=128, warmup="none") as llm:
        (alone,) = llm.generate("def f(", SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    with running_fleet(tmp_path / "log.txt", *options) as fleet:
        answer = fleet.request("/v1/completions", body)
        assert answer.json["choices"][0]["text"] == alone.outputs[0].text
        (follower,) = set(followers()) - before
        timer = threading.Timer(0.2, os.kill, (follower, signal.SIGKILL))
        timer.start()
        streams = []
        start = time.monotonic()
        while follower in followers() or not streams:  # some of them are cut short
            streams.append(fleet.request("/v1/completions", {**body, "max_tokens": 100, "stream": True}))
        timer.join()
        for stream in streams:
            *_, last, done = stream.events
            assert done == "[DONE]" and (last.get("choices") or last["error"]["code"] == 503), stream
        again = fleet.request("/v1/completions", body)
        assert again.json["choices"][0]["text"] == alone.outputs[0].text
        assert time.monotonic() - start < BACK
        assert follower not in followers() and set(followers()) - before
