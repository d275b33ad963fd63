"""Worker pools: hard grammars and long texts do not delay other requests; a full queue refuses."""

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from entropic_jax.serving.engine import grammar_check
from entropic_jax.serving.engine.interface import QueueFullError
from entropic_jax.serving.http.frontend import Frontend
from entropic_jax.serving.http.settings import Settings
from entropic_jax.serving.http.worker_pools import LONG, WorkerPool

from .live import refused, serving
from .scripted_engine import ScriptedEngine
from .test_allocator import LINUX


def small(live) -> httpx2.Response:
    return httpx2.post(f"{live.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=20)


def wait_until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_full_pool_refuses_and_counts_those_who_left():
    async def main():
        pool, gate = WorkerPool("test", threads=1, queue=2), threading.Event()
        first, second, third = (asyncio.ensure_future(pool.run(gate.wait, 20)) for _ in range(3))
        await asyncio.sleep(0.01)
        try:
            fourth = asyncio.ensure_future(pool.run(gate.wait, 20))
            await asyncio.sleep(0.01)
            assert pool.pending == 3
            second.cancel()  # the caller leaves, the call stays in the queue
            await asyncio.sleep(0.01)
            assert pool.pending == 3
        finally:
            gate.set()
        with pytest.raises(QueueFullError) as full:
            await fourth
        assert full.value.retry_after >= 1
        assert [await first, await third] == [True, True] and second.cancelled()
        while pool.pending:
            await asyncio.sleep(0.01)
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda: 1 / 0)
        pool.close()

    asyncio.run(main())


def too_hard(gate: threading.Event):
    """A trial that refuses all grammars which need one, once the gate is open."""

    def trial(grammar: str) -> grammar_check.Trial:
        tries = grammar_check.needs_trial(grammar)
        return grammar_check.Trial(str(gate.wait(30) and "too hard") if tries else None)

    return trial


def ask_for(live, schema: dict, **more) -> httpx2.Response:
    body = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"json": schema}, **more}
    return httpx2.post(f"{live.url}/v1/completions", json=body, timeout=60)


def test_hard_schemas_delay_no_other_request(live, monkeypatch):
    gate, pools = threading.Event(), live.frontend.pools

    monkeypatch.setattr(grammar_check, "trial", too_hard(gate))
    monkeypatch.setattr(pools.grammars, "queue", 4)
    schema = lambda number: {"allOf": [{"type": "string", "pattern": f"a{number}"}]}
    ask = lambda number: ask_for(live, schema(number))
    with ThreadPoolExecutor(8) as clients:
        try:
            answers = [clients.submit(ask, number) for number in range(8)]
            wait_until(lambda: sum(answer.done() for answer in answers) == 3)  # 5 fit
            assert small(live).status_code == 200
            easy = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"choice": ["a", "b"]}}
            assert httpx2.post(f"{live.url}/v1/completions", json=easy).status_code == 200
            assert pools.grammars.pending == 5
        finally:
            gate.set()
        replies = [answer.result() for answer in answers]
    assert sorted(reply.status_code for reply in replies) == [400] * 5 + [429] * 3
    assert all(int(reply.headers["Retry-After"]) >= 1 for reply in replies if reply.status_code == 429)


def test_multiples_of_a_number_wait_with_the_hard_grammars(live, monkeypatch):
    gate, pools = threading.Event(), live.frontend.pools
    monkeypatch.setattr(grammar_check, "trial", too_hard(gate))
    with ThreadPoolExecutor(3) as clients:
        try:
            answers = [
                clients.submit(ask_for, live, {"type": "integer", "multipleOf": number})
                for number in (600011, 600043, 600053)
            ]
            wait_until(lambda: pools.grammars.pending == 3)
            assert small(live).status_code == 200 and pools.short_texts.pending == 0
        finally:
            gate.set()
        errors = [refused(answer.result(), 400) for answer in answers]
    assert {error["param"] for error in errors} == {"structured_outputs.json"}


@pytest.mark.parametrize(("full", "kind"), [("grammars", "grammars"), ("long_texts", "long texts")])
def test_a_full_queue_refuses_before_the_request_waits_for_another(live, monkeypatch, full, kind):
    gate, pools = threading.Event(), live.frontend.pools
    monkeypatch.setattr(getattr(pools, full), "pending", 1000)
    held = pools.long_texts if full == "grammars" else pools.grammars
    schema = {"type": "string", "pattern": "a" * LONG}
    with ThreadPoolExecutor(1) as clients:
        held._executor.submit(gate.wait, 30)  # whoever waits for this pool gets no answer
        try:
            error = refused(clients.submit(ask_for, live, schema).result(20), 429)
        finally:
            gate.set()
    assert error["message"].startswith(f"the queue of {kind} is full; try again in ")


def test_who_was_admitted_to_a_pool_may_wait_though_it_is_full():
    async def main():
        pool = WorkerPool("test", threads=1, queue=0)
        pool.check_room()
        pool.pending = 1
        with pytest.raises(QueueFullError, match="the queue of tests is full"):
            pool.check_room()
        assert await pool.run(int, "7", admitted=True) == 7
        pool.close()

    asyncio.run(main())


def test_long_texts_delay_no_short_one(live, monkeypatch):
    gate, pools = threading.Event(), live.frontend.pools
    encode = type(live.model).encode

    def slow(model, prompt, *rest, **options):
        if isinstance(prompt, str) and len(prompt) > LONG:
            gate.wait(30)
        return encode(model, prompt, *rest, **options)

    monkeypatch.setattr(type(live.model), "encode", slow)
    ask = lambda: httpx2.post(f"{live.url}/tokenize", json={"prompt": "a" * 2 * LONG}, timeout=60)
    with ThreadPoolExecutor(3) as clients:
        try:
            answers = [clients.submit(ask) for _ in range(3)]
            wait_until(lambda: pools.long_texts.pending == 3)
            assert small(live).status_code == 200
            assert httpx2.post(f"{live.url}/tokenize", json={"prompt": "a"}).json()["count"] == 2
            assert not any(answer.done() for answer in answers)
        finally:
            gate.set()
        assert all(answer.result().json()["count"] > LONG // 100 for answer in answers)


@contextlib.contextmanager
def blocked_server(served, monkeypatch, drain):
    """A server whose tokenizer waits for an event, which is yielded with it."""
    gate, encode = threading.Event(), type(served).encode

    def slow(model, *rest, **options):
        gate.wait(30)
        return encode(model, *rest, **options)

    monkeypatch.setattr(type(served), "encode", slow)
    frontend = Frontend(ScriptedEngine(served), served, Settings(port=0, drain=drain))
    try:
        with serving(frontend) as live, ThreadPoolExecutor(4) as clients:
            yield live, clients, gate
    finally:
        gate.set()


REQUESTS = {
    "/tokenize": {"prompt": "a"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a", "max_tokens": 2, "structured_outputs": {"choice": ["a", "b"]}},
    "/v1/embeddings": {"input": "a"},
}


def posted(live, path):
    return httpx2.post(live.url + path, json=REQUESTS[path], timeout=60)


def test_a_shutdown_waits_for_requests_that_are_prepared(served, monkeypatch):
    with blocked_server(served, monkeypatch, drain=30.0) as (live, clients, gate):
        accepted = [clients.submit(posted, live, path) for path in REQUESTS]
        wait_until(lambda: live.frontend.pools.awaited == len(REQUESTS))
        with httpx2.Client(base_url=live.url) as late:
            late.get("/health")  # a connection that stays open
            live.server.handle_exit(15, None)
            for path, body in REQUESTS.items():
                assert late.post(path, json=body).status_code == 503
        time.sleep(0.3)
        assert not live.server.should_exit
        gate.set()
        assert [answer.result().status_code for answer in accepted] == [200] * len(REQUESTS)


def test_requests_that_are_still_prepared_at_the_end_get_503(served, monkeypatch, caplog):
    with blocked_server(served, monkeypatch, drain=1.2) as (live, clients, _):
        accepted = [clients.submit(posted, live, path) for path in REQUESTS]
        wait_until(lambda: live.frontend.pools.awaited == len(REQUESTS))
        live.server.handle_exit(15, None)
        for path, answer in zip(REQUESTS, accepted, strict=True):
            assert answer.result().status_code == 503, path
            assert answer.result().json()["error"]["message"] == "the server is shutting down"
    timed_out = [record for record in caplog.records if record.message == "drain timed out"]
    assert [record.ended for record in timed_out] == [len(REQUESTS)]
    assert all(record.levelname != "ERROR" and record.exc_info is None for record in caplog.records)


def test_the_length_of_a_text_is_bounded(live, monkeypatch):
    most = live.frontend.settings.limits.tokenize
    for path, body, name in (
        ("/tokenize", {"prompt": "a" * (most + 1)}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * (most + 1)}]}, "messages"),
        ("/detokenize", {"tokens": [5] * (most + 1)}, "tokens"),
    ):
        error = refused(httpx2.post(live.url + path, json=body, timeout=60), 400)
        assert error["param"] == name
        assert error["message"].startswith(f"{name} must have at most {most} ")


TRIAL = """
import sys
from types import SimpleNamespace
import llguidance
from entropic_jax.serving.engine import grammar_check

llguidance.LLMatcher = SimpleNamespace(validate_grammar=lambda text: str(len(bytearray(int(text)))))
sys.argv = ["grammar_check", "60"]
sys.exit(grammar_check.main())
"""


@LINUX
@pytest.mark.parametrize(("size", "fits"), [(1 << 20, True), (grammar_check.BYTES, False)])
def test_the_memory_of_a_trial_is_limited(size, fits):
    trial = subprocess.run([sys.executable, "-c", TRIAL], input=str(size), capture_output=True, text=True)
    assert (trial.returncode == 0) == fits, trial.stderr
    assert str(size) in trial.stdout if fits else "MemoryError" in trial.stderr
