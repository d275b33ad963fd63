"""Data-parallel engines sleep and wake up together, or none does."""

import time

import httpx2
import jax
import pytest

from entropic_jax.serving.engine import sleep, start
from entropic_jax.serving.engine.data_parallel import DataParallelEngine
from entropic_jax.serving.engine.options import EngineOptions
from entropic_jax.serving.request import RequestError

from .live import refused
from .test_engine import engine_request, nothing_is_left, prompt, run

pytestmark = pytest.mark.slow

SERVER_SETTINGS = {"sleep_mode": True}


@pytest.fixture
def two(directory):
    """Two engines, which share the device of this process."""
    options = EngineOptions(max_num_seqs=2, block_size=16, num_pages=16, warmup="none", pruning=False)
    engines = [start.start(directory, options) for _ in range(2)]
    both = DataParallelEngine(engines)
    while not both.ready():
        time.sleep(0.05)
    yield both
    both.close()
    for engine in engines:
        if engine.failure() is None:
            nothing_is_left(engine)


def asleep(both):
    return [engine.is_sleeping() for engine in both.engines]


def served_by(live, both, monkeypatch):
    for name in ("sleep", "wake_up", "is_sleeping"):
        monkeypatch.setattr(live.engine, name, getattr(both, name))


def exhausted_from(call: int, error: type[Exception]):
    """`jax.block_until_ready` that has no memory left at a call and all later ones."""
    calls, ready = iter(range(1000)), jax.block_until_ready

    def allocate(arrays):
        if next(calls) >= call:
            raise error("RESOURCE_EXHAUSTED: Out of memory allocating 1073741824 bytes.")
        return ready(arrays)

    return allocate


@pytest.mark.parametrize(("call", "error"), [(0, RuntimeError), (1, ValueError)])
def test_all_wake_up_or_none(live, two, call, error, monkeypatch):
    served_by(live, two, monkeypatch)
    expected = run(two, engine_request("before", prompt(5)))[0][0]
    assert httpx2.post(f"{live.url}/sleep", timeout=30).json() == {"is_sleeping": True}
    assert asleep(two) == [True, True]
    waiting = [two.submit(engine_request(f"waits {i}", prompt(5))) for i in range(3)]
    with monkeypatch.context() as context:
        context.setattr(sleep.jax, "block_until_ready", exhausted_from(call, error))
        answer = httpx2.post(f"{live.url}/wake_up", timeout=30)
    assert "there is not enough memory for the KV cache of" in refused(answer, 503)["message"]
    assert asleep(two) == [True, True] and two.failure() is None
    assert [engine._sleep._reserved for engine in two.engines] == [None, None]
    assert two.snapshot()["running"] == 0 and two.snapshot()["waiting"] == 3
    assert httpx2.post(f"{live.url}/wake_up", timeout=30).json() == {"is_sleeping": False}
    assert asleep(two) == [False, False]
    for stream in waiting:
        assert [token.id for delta in stream for token in delta.tokens] == expected


def test_an_engine_that_falls_asleep_does_so_after_the_others_could_not_wake_up(two, monkeypatch):
    first, second = two.engines
    first.sleep("abort").result(30)
    deltas = iter(second.submit(engine_request("long", prompt(5), max_tokens=90)))
    next(deltas)
    slept = second.sleep("wait")
    with monkeypatch.context() as context:
        context.setattr(sleep.jax, "block_until_ready", exhausted_from(0, RuntimeError))
        with pytest.raises(RuntimeError, match="not enough memory"):
            two.wake_up().result(30)
    assert [*deltas][-1].finish_reason == "length"
    slept.result(30)
    assert asleep(two) == [True, True]
    two.wake_up().result(30)
    assert asleep(two) == [False, False]


def test_none_falls_asleep_while_one_compiles(two, monkeypatch):
    monkeypatch.setattr(two.engines[1], "ready", lambda: False)
    with pytest.raises(RequestError, match="must be ready before it sleeps"):
        two.sleep("abort")
    assert asleep(two) == [False, False]


def test_an_engine_that_has_failed_keeps_no_other_from_sleep(two):
    second = two.engines[1]
    second._inbox.put(RuntimeError("broken by the test"))
    while second.failure() is None:
        time.sleep(0.01)
    two.sleep("abort").result(30)
    assert asleep(two) == [True, False] and two.is_sleeping()
    two.wake_up().result(30)
    assert not two.is_sleeping()


def test_an_engine_that_stops_meanwhile_leaves_the_others_asleep(two, monkeypatch):
    two.sleep("abort").result(30)
    first, second = two.engines
    with monkeypatch.context() as context:
        context.setattr(second, "_open", False)
        with pytest.raises(RuntimeError, match="the engine has stopped"):
            two.wake_up().result(30)
    assert asleep(two) == [True, True] and first._sleep._reserved is None
    two.wake_up().result(30)
    assert asleep(two) == [False, False]
