"""Every study of the serving benchmark runs and stores its measurements, with fake engines."""

import argparse
import contextlib
from types import SimpleNamespace

import pytest

from benchmarks.harness.baselines.float32_model import write_float32
from benchmarks.harness.baselines.pool import EngineError
from benchmarks.harness.held_out_text import module_tokens
from benchmarks.serving import admission, report
from benchmarks.serving.measure import STUDIES, ServingBenchmark
from benchmarks.serving.workload import drive
from entropic_jax.serving.bench.arrivals import Arrival
from entropic_jax.serving.bench.client import Outcome
from entropic_jax.serving.bench.prompts import Prompts
from entropic_jax.serving.options.model import EMBEDDED
from tests.serving.fake_server import FakeServer


class Pretended(ServingBenchmark):
    """A benchmark with fake servers and engines; an engine call takes 0.25 s."""

    def __init__(self, work, model) -> None:
        self.options = argparse.Namespace(
            model=EMBEDDED, repeat=2, threads=2, utilisation=0.9, quick=True, limit=1.0
        )
        self.quick, self.work, self.model = True, work, model
        self.tokens = module_tokens(EMBEDDED / "tokenizer.json")
        self.engines = SimpleNamespace(call=self.call, versions={"ours": "1"})
        self.failures, self.calls, self.servers = {}, [], []

    @contextlib.contextmanager
    def server(self, *arguments):
        self.servers.append(arguments)
        with FakeServer() as running:
            yield running

    llama = server

    def call(self, engine, method, *arguments):
        self.calls.append((engine, method))
        if engine == "transformers-batched":
            raise EngineError("it is not installed")
        return {"seconds": 0.25}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    pytest.importorskip("ml_dtypes")
    return write_float32(EMBEDDED, tmp_path_factory.mktemp("work"))


def test_the_model_in_float32_is_the_same(work):
    import numpy as np
    from safetensors.numpy import load_file

    ours, theirs = (load_file(path / "model.safetensors") for path in (work / "huggingface", EMBEDDED))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name].astype(np.float32)) for name in ours)


@pytest.mark.parametrize("study", STUDIES)
def test_studies(work, study, monkeypatch):
    bench = Pretended(work, work / "huggingface")
    # Loads of a trace come faster than they would: nothing here takes time.
    monkeypatch.setattr("benchmarks.serving.measure.drive", hurried())
    monkeypatch.setattr("benchmarks.serving.admission.drive", hurried())
    rows = getattr(bench, study)()
    assert {row["repetition"] for row in rows} == {0, 1}
    results = {"cpu": "", "threads": 2, "date": "", "load_average": 0.0, "utilisation": 0.9}
    results |= {"studies": {study: rows}, "failures": bench.failures}
    ((_, head, lines),) = report.tables(results)
    assert lines and all(len(line) == len(head) for line in lines)
    assert report.notes(results)
    if study == "throughput":
        names = {
            "ours-batched",
            "ours, served",
            "ours, off",
            "ours",
            "transformers",
            "openvino-batched",
            "llama_cpp.server",
        }
        assert {row["engine"] for row in rows} == names
        assert bench.failures == {"transformers-batched": "it is not installed"}
        static = [row["rate"] for row in rows if row["engine"] == "transformers"]
        assert static == [64 * 8 / 0.5] * 2  # 64 requests of 8 tokens in one prefill and one decode
    if study == "load":
        assert [arguments[-1] for arguments in bench.servers] == list(admission.POLICIES)
        assert len({arguments[:-1] for arguments in bench.servers}) == 1, "everything but the order is equal"
        assert {row["equal"] for row in rows if row["limits"] == admission.SAME} == {1.0}


def test_limits_are_the_same_or_near_the_length():
    drawn = [Arrival(2.0, 50, admission.LONGEST)] * 50
    known = [Outcome(0.0, 0.0, 50, admission.LONGEST, output_tokens=10 + i) for i in range(50)]
    same, within = admission.workloads(drawn, known, 4.0, 0).values()
    assert {arrival.time for arrival in [*same, *within]} == {0.5}
    assert {arrival.output_tokens for arrival in same} == {admission.LONGEST}
    factors = [a.output_tokens / o.output_tokens for a, o in zip(within, known, strict=True)]
    assert min(factors) >= 1 and max(factors) < admission.FACTOR + 0.1 and max(factors) > 2


def hurried():
    def send(url, requests, prompts, concurrency=None, **body):
        soon = [arrival._replace(time=arrival.time / 1000) for arrival in requests]
        return drive(url, soon, prompts, concurrency, **body)

    return send


def test_a_request_that_fails_ends_the_study(work):
    prompts, requests = Prompts(module_tokens(EMBEDDED / "tokenizer.json"), 0), [Arrival(0.0, 4, 2)] * 3
    with FakeServer() as server, pytest.raises(RuntimeError, match="requests failed: HTTP 500"):
        drive(server.url, requests, prompts, 2, fake={"status": 500})
