"""Data parallelism: routing, and engines on virtual devices that answer as one does, from Python and HTTP."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from entropic_jax.analysis.plan import Dtypes, page_bytes, weight_bytes
from entropic_jax.mesh import make_mesh
from entropic_jax.models.model import read_config
from entropic_jax.serving.engine.data_parallel import DataParallelEngine, Progress, gathered
from entropic_jax.serving.engine.interface import Embeddings, PrefixCacheReset
from entropic_jax.serving.engine.routing import Router
from entropic_jax.serving.options.parallelism import places_of
from tests.compilation import virtual_devices

ROOT = Path(__file__).resolve().parents[2]
A, B, C = b"a", b"b", b"c"
XLA_FLAGS = virtual_devices(4)


def router(*cached: set[bytes], bound: int = 2, capacity: int = 100) -> Router:
    return Router(len(cached), bound, capacity, lambda rank, page_hash: page_hash in cached[rank])


def test_the_longest_prefix_decides_within_the_bound():
    routes = router({A}, {A, B}, set())
    assert routes.order([A, B, C], [0, 2, 0], (0, 1, 2)) == [1, 0, 2]
    assert routes.order([A, B, C], [0, 3, 0], (0, 1, 2)) == [0, 2, 1]
    assert routes.order([B, C], [1, 0, 1], (0, 1, 2))[0] == 1  # B without A before it is no prefix
    assert [routes.match(rank, [B, A]) for rank in range(3)] == [0, 2, 0]


def test_without_a_prefix_the_least_loaded_decides_and_equal_ones_take_turns():
    routes = router(set(), set(), set())
    assert routes.order([A], [3, 1, 2], (0, 1, 2)) == [1, 2, 0]
    chosen = []
    for _ in range(6):
        chosen.append(routes.order([], [1, 1, 1], (0, 1, 2))[0])
        routes.sent(chosen[-1], [])
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_prompts_that_come_together_stay_together_up_to_the_bound():
    routes, loads = router(set(), set(), bound=2), [0, 0]
    chosen = []
    for _ in range(8):
        rank = routes.order([A, B], loads, (0, 1))[0]
        routes.sent(rank, [A, B])
        loads[rank] += 1
        chosen.append(rank)
    assert chosen[:3] == [0, 0, 0] and max(loads) - min(loads) <= 3
    routes.forget()
    assert routes.match(0, [A]) == routes.match(1, [A]) == 0


def test_a_rank_that_is_not_able_gets_nothing_and_old_prompts_are_forgotten():
    routes = router({A}, set(), capacity=2)
    assert routes.order([A], [0, 9], (1,)) == [1] and routes.order([A], [0, 0], ()) == []
    routes.sent(1, [B, C])
    routes.sent(1, [A])
    assert [routes.match(1, [page]) for page in (A, B, C)] == [1, 0, 1]


def test_the_progress_of_all_warm_ups_is_one():
    reports: list[Any] = []
    progress = Progress(lambda done, total: reports.append((done, total)), 2)
    progress.of(0)(1, 4)
    progress.of(1)(1, 6)
    progress.of(0)(4, 4)
    progress.of(1)(6, 6)
    assert reports == [(1, 8), (2, 10), (5, 10), (10, 10)]


def test_resets_are_added_up_or_fail_together():
    first: Future[PrefixCacheReset] = Future()
    second: Future[PrefixCacheReset] = Future()
    total = gathered([first, second])
    first.set_result(PrefixCacheReset(3, 1))
    assert not total.done()
    second.set_result(PrefixCacheReset(2, 0))
    assert total.result() == PrefixCacheReset(5, 1)
    stopped: Future[PrefixCacheReset] = Future()
    stopped.cancel()
    with pytest.raises(RuntimeError, match="an engine has stopped"):
        gathered([stopped, second]).result(1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data_parallel_size": 64}, "data_parallel_size must be (between 1 and .+|1), .*devices; got 64"),
        (
            {"expert_parallel_size": 64},
            "expert_parallel_size must be (between 1 and .+|1), .*devices; got 64",
        ),
        (
            {"tensor_parallel_size": 64},
            "tensor_parallel_size must be (between 1 and .+|1), .*devices; got 64",
        ),
    ],
)
def test_a_lack_of_devices_names_the_option(sizes, message):
    with pytest.raises(ValueError, match=message) as refusal:
        places_of(**sizes)
    assert refusal.value.param == next(iter(sizes))


def test_devices_are_counted_in_groups():
    message = "expert_parallel_size must be between 1 and 2, for 5 devices in groups of 2; got 3"
    with pytest.raises(ValueError, match=message):
        make_mesh(2, [object()] * 5, expert_parallel_size=3)
    message = "data_parallel_size must be 1, for 5 devices in groups of 4; got 2"
    with pytest.raises(ValueError, match=message):
        make_mesh(2, [object()] * 5, expert_parallel_size=2, data_parallel_size=2)


@pytest.fixture(scope="module")
def report(directory, tmp_path_factory) -> dict[str, Any]:
    """What `data_parallel_programs` prints."""
    folder = tmp_path_factory.mktemp("cache")
    changes = {"XLA_FLAGS": XLA_FLAGS, "ENTROPIC_PROGRAM_CACHE": str(folder), "XDG_CACHE_HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.serving.data_parallel_programs", directory],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        env={**os.environ, **changes},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["two", "two by two", "mesh"])
def test_answers_do_not_depend_on_the_rank(report, way):
    alone, several = report["one"], report[way]
    assert several["tokens"] == alone["tokens"] and len(alone["tokens"]) == 8
    assert min(several["launches"]) > 0, "one engine did everything: the test compares nothing"


@pytest.mark.slow
def test_engines_have_devices_and_pages_of_their_own(report):
    assert report["one"]["devices"] == [[0]]
    assert report["two"]["devices"] == [[0], [1]] and report["mesh"]["devices"] == [[2], [3]]
    assert report["two by two"]["devices"] == [[0, 1], [2, 3]]
    assert report["two"]["pages"] == report["one"]["pages"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("way", "devices"), [("one", 1), ("two", 1), ("two by two", 2)])
def test_engines_hold_the_bytes_of_their_plan(report, directory, way, devices):
    config = read_config(Path(directory))
    weights = weight_bytes(config, devices, Dtypes("float32", "float32")).total
    page = page_bytes(config, devices, 16, "float32")
    assert report[way]["weight_bytes"] == [weights] * len(report[way]["devices"])
    assert report[way]["pool_bytes"] == [(pages + 1) * page for pages in report[way]["pages"]]


@pytest.mark.slow
def test_no_collective_spans_engines(report):
    assert report["one"]["collectives"] == report["two"]["collectives"] == 0
    assert report["two by two"]["collectives"] > 0
    for groups in report["two by two"]["groups"]:
        assert groups.startswith(("{{0,1}}", "[1,2]")), groups


@pytest.mark.slow
def test_engines_share_programs_and_on_a_cpu_weights(report):
    assert sum(report["one"]["compilations"]) > 0
    assert report["two"]["compilations"] == report["mesh"]["compilations"] == [0, 0]
    divided = report["two by two"]
    assert sum(divided["compilations"]) == len(divided["programs"])
    assert report["other devices"]["compilations"] == [0]
    assert report["other devices"]["devices"] == [[2, 3]]
    assert report["other devices"]["tokens"] == divided["tokens"]
    for way in ("two", "two by two", "mesh"):
        first, second = report[way]["buffers"]
        assert first == second


@pytest.mark.slow
def test_a_warm_up_compiles_each_program_once(report):
    http = report["http"]
    assert http["late"] == 0
    assert sum(http["compiled"]) <= http["programs"][0] == http["programs"][1]
    done, total = http["progress"][-1]
    assert done == total == sum(http["programs"])


def series(text: str, name: str) -> dict[str, float]:
    """The values of a metric by engine."""
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    engine = lambda line: line.split('engine="')[1].split('"')[0]
    return {engine(line): float(line.split()[-1]) for line in lines}


@pytest.mark.slow
def test_requests_follow_their_prefix_and_metrics_their_engine(report):
    http = report["http"]
    assert http["texts"] == http["texts"][:2] * 3 and http["others"] == http["again"]
    requests = len([*http["texts"], *http["others"], *http["again"]])
    generated = series(http["metrics"], "vllm:generation_tokens_total")
    assert set(generated) == {"0", "1"} and min(generated.values()) > 0
    assert sum(generated.values()) == 6 * requests
    latencies = series(http["metrics"], "vllm:e2e_request_latency_seconds_count")
    assert sum(latencies.values()) == requests
    hits = series(http["metrics"], "vllm:prefix_cache_hits_total")
    assert max(hits.values()) >= 5 * 48, "the same prefix went to the same engine"
    assert set(series(http["metrics"], "entropic_ready").values()) == {1.0}


@pytest.mark.slow
def test_embeddings_do_not_depend_on_the_rank(report):
    http = report["http"]
    assert http["embedding_programs"] == [1, 1], "one engine did everything: the test compares nothing"
    assert http["embeddings"] == http["embeddings"][:1] * 4 and len(set(http["embeddings"][0])) > 8
    assert http["reranked"][0] == http["reranked"][1] and len(http["reranked"][0]) == 2
    assert http["embedding_after"] == http["embeddings"][0], "the rank that has not failed embeds"


class EmbeddingRank:
    """A rank that embeds texts as its number, once it may."""

    model = tokenizer = None
    sizes = SimpleNamespace(rows=4, pages=8)

    def __init__(self, number: int, load: int = 0) -> None:
        self.number, self.load = number, load
        self.begun, self.may_end = threading.Event(), threading.Event()

    def serves(self) -> bool:
        return True

    def failure(self) -> None:
        return None

    def embed(self, texts: Any, pooling: Any, stop: Any) -> Embeddings:
        self.begun.set()
        assert self.may_end.wait(10)
        return Embeddings(np.full((len(texts), 1), self.number, np.float32))


def test_texts_are_embedded_at_the_least_loaded_rank():
    ranks = [EmbeddingRank(0, load=1), EmbeddingRank(1), EmbeddingRank(2, load=2)]
    engine = DataParallelEngine(cast(Any, ranks))
    with ThreadPoolExecutor(3) as pool:
        calls = []
        for rank in (1, 0, 1):  # a call counts in the load of its rank; among equals, each in turn
            ranks[rank].begun.clear()
            calls.append(pool.submit(engine.embed, [[5]], "mean", threading.Event()))
            assert ranks[rank].begun.wait(10), f"rank {rank} was not chosen"
        for rank in ranks:
            rank.may_end.set()
        results = [call.result(10) for call in calls]
    assert [result.rank for result in results if result is not None] == [1, 0, 1]
    assert [result.vectors.item() for result in results if result is not None] == [1, 0, 1]
    assert engine._loads() == [1, 0, 2]


@pytest.mark.slow
def test_state_and_configuration_cover_all_engines(report):
    state, info = report["http"]["state"], report["http"]["info"]
    assert [part["engine"] for part in state["engines"]] == [0, 1] and state["sequences"] == []
    for name in ("pages", "rows", "prefix_hits", "prefix_pages"):
        assert state[name] == sum(part[name] for part in state["engines"])
    assert [part["load"] for part in state["engines"]] == [0, 0]
    assert info["options"]["data_parallel_size"] == 2
    assert [part["devices"] for part in info["engines"]] == [[0], [1]]
    pages = report["http"]["reset"]["released_pages"]
    assert pages == state["prefix_pages"] > 0 and report["http"]["reset"]["pages_in_use"] == 0


@pytest.mark.slow
def test_the_other_engines_go_on_where_a_failure_does_not_end_the_server(report):
    http = report["http"]
    assert http["after"] == http["texts"][:4]
    assert http["health"] == 503 and http["reset_after"] == 200 and http["closed"]
