"""Sleep and wake-up: the KV pool is released, requests wait, and results are as before."""

import threading
import time

import httpx2
import jax
import jax.numpy as jnp
import pytest

from entropic_jax.serving.engine import sleep, start
from entropic_jax.serving.engine.options import EngineOptions
from entropic_jax.serving.request import RequestError

from .live import refused
from .test_allocator import LINUX, resident
from .test_engine import engine_request, nothing_is_left, prompt, run

SERVER_SETTINGS = {"sleep_mode": True}


@pytest.fixture(scope="module")
def running(directory):
    options = EngineOptions(preset="off", max_num_seqs=2, block_size=16, num_pages=16, warmup="min")
    engine = start.start(directory, options)
    while not engine.ready():
        time.sleep(0.05)
    yield engine
    engine.close()
    nothing_is_left(engine)


def pool(engine):
    return engine.scheduler.device_state.state.cache.layers


def requests():
    return [engine_request(f"r{i}", prompt(30, i), seed=i, temperature=0.8) for i in range(3)]


@pytest.mark.slow
def test_the_pool_is_released_and_requests_wait(running):
    expected = [tokens for tokens, _ in run(running, *requests())]
    assert run(running, requests()[0])[0][1].cached_tokens > 0
    keys = pool(running)[0].keys
    running.sleep("abort").result(30)
    assert running.is_sleeping() and keys.is_deleted()
    running.sleep("abort").result(30)  # once more changes nothing
    streams = [running.submit(request) for request in requests()]
    cancelled = running.submit(engine_request("cancelled", prompt(5)))
    timed = running.submit(engine_request("timed", prompt(5), timeout=0.1))
    cancelled.cancel()
    assert [delta.finish_reason for delta in cancelled] == ["abort"]
    assert [delta.timed_out for delta in timed] == [True]
    assert running.snapshot()["waiting"] == 3
    running.reset_prefix_cache().result(30)
    running.wake_up().result(30)
    deltas = [list(stream) for stream in streams]
    assert [[t.id for d in of_one for t in d.tokens] for of_one in deltas] == expected
    assert all(of_one[-1].cached_tokens == 0 for of_one in deltas)  # cached prefixes are lost
    assert not running.is_sleeping() and pool(running)[0].keys.shape == keys.shape
    running.wake_up().result(30)


def test_cached_prefixes_are_lost(running):
    """Their pages are in the pool that is released."""
    request = engine_request("cached", prompt(40, 9), temperature=0)
    expected, _ = run(running, request)[0]
    assert run(running, request)[0][1].cached_tokens > 0
    running.sleep("abort").result(30)
    running.wake_up().result(30)
    tokens, last = run(running, request)[0]
    assert (tokens, last.cached_tokens) == (expected, 0)


@pytest.mark.slow
def test_running_requests_end_or_are_waited_for(running):
    first = iter(running.submit(engine_request("long", prompt(5), max_tokens=90)))
    next(first)
    running.sleep("abort").result(30)
    assert [delta.finish_reason for delta in first][-1] == "abort"
    running.wake_up().result(30)
    waited = running.submit(engine_request("waited", prompt(5), max_tokens=60))
    deltas = iter(waited)
    next(deltas)
    slept = running.sleep("wait")
    late = running.submit(engine_request("late", prompt(6)))
    last = [*deltas][-1]
    assert last.finish_reason == "length" and last.usage.completion_tokens == 60
    slept.result(30)
    running.wake_up().result(30)
    assert [*late][-1].finish_reason == "length"


def test_requests_that_wait_outlast_a_second_sleep(running):
    running.sleep("abort").result(30)
    waiting = running.submit(engine_request("waits", prompt(5)))
    running.sleep("abort").result(30)
    running.wake_up().result(30)
    assert [*waiting][-1].finish_reason == "length"


def test_a_sleep_that_is_interrupted_fails(running):
    deltas = iter(running.submit(engine_request("long", prompt(5), max_tokens=90)))
    next(deltas)
    slept = running.sleep("wait")
    running.wake_up().result(30)
    if not slept.done() or slept.exception() is not None:  # else it was quicker
        with pytest.raises(RequestError, match="woken up before it slept"):
            slept.result(30)
    assert [*deltas][-1].finish_reason == "length"


def test_an_engine_that_compiles_does_not_sleep(running, monkeypatch):
    monkeypatch.setattr(running.warmup, "ended", threading.Event())
    with pytest.raises(RequestError, match="must be ready before it sleeps"):
        running.sleep("abort")


def shapes(numbers):
    """A pool of this many float32 numbers in two arrays, as `Sleep` keeps it."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return [jax.ShapeDtypeStruct((numbers // 2,), jnp.float32, sharding=place) for _ in range(2)]


@LINUX
def test_a_pool_takes_memory_as_it_fills():
    sleep._allocate(shapes(2**20))  # the kernel exists before anything is measured
    before = resident()
    arrays = sleep._allocate(shapes(2**27))
    assert sum(array.nbytes for array in arrays) == 2**29 and resident() - before < 2**27


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_without_enough_memory_it_stays_asleep(live, running, error, monkeypatch):
    for name in ("sleep", "wake_up", "is_sleeping"):
        monkeypatch.setattr(live.engine, name, getattr(running, name))
    expected = run(running, engine_request("before", prompt(5)))[0][0]
    running.sleep("abort").result(30)

    def exhausted(_):
        raise error("RESOURCE_EXHAUSTED: Out of memory allocating 1073741824 bytes.")

    with monkeypatch.context() as context:
        context.setattr(sleep.jax, "block_until_ready", exhausted)
        answer = httpx2.post(f"{live.url}/wake_up", timeout=30)
    assert "there is not enough memory for the KV cache of" in refused(answer, 503)["message"]
    assert running.is_sleeping() and running.failure() is None
    waiting = running.submit(engine_request("waits", prompt(5)))
    running.wake_up().result(30)
    assert [token.id for delta in waiting for token in delta.tokens] == expected


def test_what_does_not_exist_is_not_allocated():
    with pytest.raises(RuntimeError, match=r"not enough memory for the KV cache of 3725290\.30 GiB"):
        sleep._allocate(shapes(10**15))


def test_routes(live, running, monkeypatch):
    for name in ("sleep", "wake_up", "is_sleeping"):
        monkeypatch.setattr(live.engine, name, getattr(running, name))
    assert httpx2.get(f"{live.url}/is_sleeping").json() == {"is_sleeping": False}
    answer = httpx2.post(f"{live.url}/sleep?level=1&mode=wait", timeout=30)
    assert answer.json() == {"is_sleeping": True} == httpx2.get(f"{live.url}/is_sleeping").json()
    assert httpx2.post(f"{live.url}/wake_up", timeout=30).json() == {"is_sleeping": False}
    for query, param in (("level=2", "level"), ("mode=keep", "mode")):
        assert refused(httpx2.post(f"{live.url}/sleep?{query}"), 400)["param"] == param
    for name in ("sleep", "wake_up"):
        assert refused(httpx2.post(f"{live.url}/{name}?tags=weights"), 400)["param"] == "tags"


def test_an_engine_that_cannot(live):
    assert "never sleeps" in refused(httpx2.post(f"{live.url}/sleep"), 409)["message"]
    assert "never sleeps" in refused(httpx2.post(f"{live.url}/wake_up"), 503)["message"]
    live.frontend.draining = True
    refused(httpx2.post(f"{live.url}/sleep"), 503)
