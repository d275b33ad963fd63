"""Robustness of the server: invalid bodies and keys, overload, clients that leave, signals."""

import asyncio
import json
import logging
import socket
import time
from datetime import datetime

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from entropic_jax.serving.http import log
from entropic_jax.serving.http.frontend import Frontend
from entropic_jax.serving.http.settings import Limits, Settings

from .live import refused, serving
from .scripted_engine import ScriptedEngine

PATH = "/v1/completions"
ENDLESS = {"allOf": [{"type": "string", "pattern": f"a{number}.*"} for number in range(50)]}


def until(condition, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_models(live):
    listed = httpx2.get(f"{live.url}/v1/models").json()
    first = listed["data"][0]
    assert (first["type"], first["display_name"]) == ("model", first["id"])  # Anthropic's form
    assert datetime.fromisoformat(first["created_at"]).timestamp() == first["created"]
    assert (listed["has_more"], listed["first_id"]) == (False, first["id"])
    assert [card["id"] for card in listed["data"]] == ["embedded", "default"]
    assert listed["data"][0]["max_model_len"] == 256
    assert httpx2.get(f"{live.url}/v1/models/default").json()["id"] == "default"
    refused(httpx2.get(f"{live.url}/v1/models/gpt-9"), 404)
    error = refused(httpx2.post(live.url + PATH, json={"model": "gpt-9", "prompt": "x"}), 404)
    assert error["param"] == "model" and "embedded, default" in error["message"]
    answer = httpx2.post(live.url + PATH, json={"model": "default", "prompt": "x", "max_tokens": 1})
    assert answer.json()["model"] == "default"


def test_no_such_path_and_no_such_method(live):
    refused(httpx2.get(f"{live.url}/v2"), 404)
    answer = httpx2.get(live.url + PATH)
    assert "method must be POST for" in refused(answer, 405)["message"]
    assert "got /v1/nothing" in refused(httpx2.get(f"{live.url}/v1/nothing"), 404)["message"]
    assert answer.headers["allow"] == "POST"
    refused(httpx2.delete(f"{live.url}/"), 405)


def test_the_field_at_fault_is_named(live):
    answer = httpx2.post(f"{live.url}/detokenize", json={"tokens": [10**6]})
    assert refused(answer, 400)["param"] == "tokens"
    answer = httpx2.post(f"{live.url}/v1/completions", json={"prompt": "x", "suffix": "y"})
    assert refused(answer, 400)["param"] == "suffix"
    body = {"prompt": "x", "guided_regex": "a", "structured_outputs": {"regex": "a"}}
    assert refused(httpx2.post(f"{live.url}/v1/completions", json=body), 400)["param"] == "structured_outputs"


def test_alive_ready_and_warming_up(live):
    assert httpx2.get(f"{live.url}/health").status_code == 200
    assert httpx2.head(f"{live.url}/health").status_code == 200
    assert httpx2.get(f"{live.url}/ready").status_code == 200
    live.engine.is_ready = False
    assert httpx2.get(f"{live.url}/health").status_code == 200
    answer = httpx2.get(f"{live.url}/ready")
    refused(answer, 503)
    assert int(answer.headers["retry-after"]) >= 1
    assert httpx2.get(f"{live.url}/entropic/state").json()["ready"] is False
    assert httpx2.get(f"{live.url}/version").json()["version"]


def test_a_full_queue(live):
    live.engine.room = 0
    answer = httpx2.post(live.url + PATH, json={"prompt": "x"})
    assert refused(answer, 429)["type"] == "RateLimitError"
    assert answer.headers["retry-after"] == "7"


def test_all_of_a_batch_or_nothing(live, monkeypatch):
    from entropic_jax.serving.engine.interface import QueueFullError

    submit, taken = live.engine.submit, []

    def third_fails(engine_request):
        if len(taken) == 2:
            raise QueueFullError(1.0)
        taken.append(engine_request.id)
        return submit(engine_request)

    monkeypatch.setattr(live.engine, "submit", third_fails)
    refused(httpx2.post(live.url + PATH, json={"prompt": ["a", "b", "c"]}), 429)
    assert live.engine.cancelled == taken
    assert not live.frontend.busy


def test_an_engine_that_has_failed(live):
    live.engine.failed = "out of memory"
    answer = httpx2.post(live.url + PATH, json={"prompt": "x"})
    assert "out of memory" in refused(answer, 503)["message"]
    assert "out of memory" in refused(httpx2.get(f"{live.url}/health"), 503)["message"]


def test_a_timeout(live, monkeypatch):
    live.engine.pace = 0.02
    monkeypatch.setattr(live.frontend, "settings", live.frontend.settings._replace(request_timeout=0.05))
    error = refused(httpx2.post(live.url + PATH, json={"prompt": "x", "max_tokens": 99}), 408)
    assert error["type"] == "RequestTimeoutError"
    with httpx2.stream(
        "POST", live.url + PATH, json={"prompt": "x", "max_tokens": 99, "stream": True}
    ) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == 408
    assert lines[-1] == "data: [DONE]"


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_ends_its_requests(live, streamed, stage, n):
    live.engine.prefill, live.engine.pace = (60.0, 0.0) if stage == "prefill" else (0.0, 0.05)
    body = json.dumps({"prompt": "x", "n": n, "max_tokens": 10**6, "stream": streamed, "ignore_eos": True})
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json"
        head += f"\r\nContent-Length: {len(body)}"
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        until(lambda: live.engine.running == n)
        if stage == "decode":
            time.sleep(0.1)
    until(lambda: len(live.engine.cancelled) == n and live.engine.running == 0)
    assert not live.frontend.busy


def test_a_reader_that_is_done_cancels_nothing(live):
    assert httpx2.post(live.url + PATH, json={"prompt": "x", "n": 3, "max_tokens": 2}).status_code == 200
    assert live.engine.cancelled == []


def test_request_ids(live, monkeypatch):
    logger, seen = logging.getLogger("entropic_jax.serving.requests"), {}

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.setdefault(log.request_id.get(), []).append(record)

    monkeypatch.setattr(logger, "handlers", [Handler()])
    logger.setLevel(logging.INFO)
    answer = httpx2.post(
        live.url + PATH, json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "mine-1"}
    )
    until(lambda: "mine-1" in seen)
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["id"] == "cmpl-mine-1"
    (record,) = seen["mine-1"]
    assert (record.msg, record.path, record.status, record.method) == ("request", PATH, 200, "POST")
    strange = httpx2.get(f"{live.url}/version", headers={"X-Request-Id": 'a"; drop'})
    assert strange.headers["x-request-id"] != 'a"; drop'


def test_metrics(live):
    def read() -> dict[str, float]:
        text = httpx2.get(f"{live.url}/metrics").text
        return {
            sample.name + sample.labels.get("finished_reason", ""): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if "le" not in sample.labels
        }

    before = read()
    httpx2.post(live.url + PATH, json={"prompt": [5, 6], "max_tokens": 4, "ignore_eos": True})
    after = read()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["vllm:prompt_tokens_total"] == 2
    assert grown["vllm:generation_tokens_total"] == 4
    assert grown["vllm:request_success_totallength"] == 1
    for name, count in (
        ("vllm:time_to_first_token_seconds", 1),
        ("vllm:inter_token_latency_seconds", 3),
        ("vllm:e2e_request_latency_seconds", 1),
        ("vllm:request_queue_time_seconds", 1),
        ("entropic_entropy_nats", 4),
        ("entropic_temperature", 4),
        ("entropic_kept_fraction", 4),
    ):
        assert grown[f"{name}_count"] == count, name
    assert grown["entropic_entropy_nats_sum"] == 0.0 + 0.5 + 1.0 + 1.5
    assert grown["entropic_time_nats_total"] == 1.5
    assert after["vllm:num_requests_running"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0.25
    assert after["vllm:num_preemptions_total"] == 3
    assert (after["vllm:prefix_cache_queries_total"], after["vllm:prefix_cache_hits_total"]) == (10, 4)
    assert after["entropic_compilations_after_warmup_total"] == 0
    counted = ("explorations", "lookaheads", "rollbacks", "discarded_tokens")
    assert [after[f"entropic_{name}_total"] for name in counted] == [5, 6, 7, 80]


def test_the_page_talks_to_nobody_else(live):
    answer = httpx2.get(f"{live.url}/")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert "http:" not in policy and "unsafe" not in policy
    assert httpx2.get(f"{live.url}/dashboard/../serving/cli.py").status_code == 404
    assert httpx2.get(f"{live.url}/dashboard/%2e%2e/cli.py").status_code == 404


def test_inline_scripts_are_allowed_by_what_they_say():
    from entropic_jax.serving.http.routes.dashboard import policy

    said = policy(b"<style>a{}</style><script src=x></script><script type=module>f()</script>")
    assert said.count("sha256-") == 2
    assert policy(b"<script>f()</script>") != policy(b"<script>g()</script>")


def test_the_document_is_truthful(live):
    tree = httpx2.get(f"{live.url}/openapi.json").json()
    text = json.dumps(tree)
    assert "422" not in text and "HTTPValidationError" not in text
    body = tree["components"]["schemas"]["CompletionBody"]["properties"]
    assert body["stop_token_ids"]["anyOf"][0]["items"]["maximum"] == 4095
    assert body["allowed_token_ids"]["anyOf"][0]["items"]["maximum"] == 4095
    assert tree["components"]["schemas"]["Entropic"]["additionalProperties"] is False
    longest = tree["components"]["schemas"]["TokenizeBody"]["properties"]["prompt"]["maxLength"]
    assert longest == live.frontend.settings.limits.tokenize
    assert "securitySchemes" not in tree["components"]
    for name in ("CompletionBody", "ChatBody", "MessagesBody", "CountTokensBody", "ResponsesBody"):
        bias = tree["components"]["schemas"][name]["properties"]["logit_bias"]["anyOf"][0]
        assert bias["additionalProperties"] is False and len(bias["patternProperties"]) == 1, name


@pytest.fixture
def other(served):
    """A server with keys and small limits."""
    limits = Limits(body=2000, stops=2)
    settings = Settings(
        port=0,
        api_keys=("secret-1", "secret-2"),
        limits=limits,
        drain=5.0,
        allowed_origins=("https://a.example",),
    )
    engine = ScriptedEngine(served)
    with serving(Frontend(engine, served, settings)) as live:
        live.engine = engine
        yield live


def test_an_operator_may_allow_fewer_stop_strings(other):
    headers = {"Authorization": "Bearer secret-1"}
    body = {"prompt": "x", "max_tokens": 1, "stop": ["a", "b"]}
    assert httpx2.post(other.url + PATH, json=body, headers=headers).status_code == 200
    error = refused(
        httpx2.post(other.url + PATH, json=body | {"stop": ["a", "b", "c"]}, headers=headers), 400
    )
    assert error["message"] == "stop must have at most 2 strings; got 3" and error["param"] == "stop"


def test_keys(other):
    body = {"prompt": "x", "max_tokens": 1}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret-1"}):
        answer = httpx2.post(other.url + PATH, json=body, headers=headers)
        assert refused(answer, 401)["type"] == "AuthenticationError"
        assert answer.headers["www-authenticate"] == "Bearer"
    for key in ("secret-1", "secret-2"):
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx2.post(other.url + PATH, json=body, headers=headers).status_code == 200
    for path in ("/health", "/ready", "/metrics", "/version", "/", "/openapi.json"):
        assert httpx2.get(other.url + path).status_code == 200
    for path in ("/v1/models", "/entropic/state", "/tokenizer_info"):
        refused(httpx2.get(other.url + path), 401)
    assert "secret" not in repr(other.frontend.settings)
    tree = httpx2.get(f"{other.url}/openapi.json").json()
    assert tree["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large(other, chunked):
    body = json.dumps({"prompt": "x" * 3000}).encode()
    content = (body[i : i + 500] for i in range(0, len(body), 500)) if chunked else body
    headers = {"Authorization": "Bearer secret-1", "Content-Type": "application/json"}
    error = refused(httpx2.post(other.url + PATH, content=content, headers=headers), 413)
    assert "2000" in error["message"]


def test_other_sites_only_where_allowed(other, live):
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in httpx2.options(live.url + PATH, headers=preflight).headers
    answer = httpx2.options(other.url + PATH, headers=preflight)
    assert answer.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://[evil"}, 403),
        ({"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "https://proxy.example", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "https://proxy.example", "X-Forwarded-Host": "proxy.example"}, 200),
    ],
)
def test_pages_of_other_sites_change_nothing(live, headers, status):
    body = {"prompt": "x", "max_tokens": 1}
    assert httpx2.post(live.url + PATH, json=body, headers=headers).status_code == status
    assert httpx2.get(f"{live.url}/v1/models", headers=headers).status_code == 200
    same_site = {"Origin": live.url}
    assert httpx2.post(live.url + PATH, json=body, headers=same_site).status_code == 200


def test_a_key_is_enough_for_pages_of_other_sites(other):
    headers = {"Authorization": "Bearer secret-1", "Origin": "https://b.example"}
    assert (
        httpx2.post(other.url + PATH, json={"prompt": "x", "max_tokens": 1}, headers=headers).status_code
        == 200
    )


def test_draining_finishes_what_was_begun(other):
    other.engine.pace = 0.05
    key = {"Authorization": "Bearer secret-1"}

    async def run() -> tuple[httpx2.Response, httpx2.Response]:
        async with httpx2.AsyncClient(headers=key) as client, httpx2.AsyncClient(headers=key) as late:
            assert (await late.get(f"{other.url}/ready")).status_code == 200  # a connection that stays open
            body = {"prompt": "x", "max_tokens": 10, "ignore_eos": True}
            begun = asyncio.create_task(client.post(other.url + PATH, json=body))
            while not other.engine.running:
                await asyncio.sleep(0.01)
            other.server.handle_exit(15, None)
            refusal = await late.post(other.url + PATH, json=body)
            return await begun, refusal

    answer, refusal = asyncio.run(run())
    assert answer.json()["usage"]["completion_tokens"] == 10
    refused(refusal, 503)
    assert "retry-after" in refusal.headers
    other.thread.join(5)
    assert not other.thread.is_alive()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_a_shutdown_answers_requests_that_cannot_begin_at_once(served, streamed):
    engine = ScriptedEngine(served)
    engine.does_serve, engine.prefill = False, 60.0
    with serving(Frontend(engine, served, Settings(port=0, drain=30.0))) as live:

        async def run() -> httpx2.Response:
            async with httpx2.AsyncClient() as client:
                body = {"prompt": "x", "max_tokens": 10, "stream": streamed}
                waits = asyncio.create_task(client.post(live.url + PATH, json=body))
                while not engine.running:
                    await asyncio.sleep(0.01)
                live.server.handle_exit(15, None)
                return await waits

        start = time.monotonic()
        answer = asyncio.run(run())
        live.thread.join(10)
        assert not live.thread.is_alive() and time.monotonic() - start < 10
    if streamed:
        first, last = (line for line in answer.text.splitlines() if line)
        assert last == "data: [DONE]"
        error = json.loads(first.removeprefix("data: "))["error"]
    else:
        error = refused(answer, 503)
        assert "retry-after" in answer.headers
    assert (error["code"], error["message"]) == (503, "the server is shutting down")


def test_a_drain_that_runs_out_tells_a_text_from_none(served):
    """Cut off with some text: it is sent as far as it came. Without any: 503."""
    engine = ScriptedEngine(served)
    engine.pace = 0.3
    with serving(Frontend(engine, served, Settings(port=0, drain=2.4))) as live:

        async def run() -> list[httpx2.Response]:
            async with httpx2.AsyncClient(timeout=20) as client:
                body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
                begun = asyncio.create_task(client.post(live.url + PATH, json=body))
                while not engine.running:
                    await asyncio.sleep(0.01)
                engine.prefill = 60.0
                waits = asyncio.create_task(client.post(live.url + PATH, json=body))
                while engine.running < 2:
                    await asyncio.sleep(0.01)
                live.server.handle_exit(15, None)
                return [await begun, await waits]

        begun, waits = asyncio.run(run())
    assert begun.json()["choices"][0]["finish_reason"] == "abort" and begun.json()["choices"][0]["text"]
    refused(waits, 503)
