"""--request-rate-limit: 429 with Retry-After, for each API key."""

import httpx2
import pytest

from entropic_jax.serving.cli import parser
from entropic_jax.serving.commands import serve_setup
from entropic_jax.serving.http.rate_limit import RateLimit, RateLimiter
from entropic_jax.serving.http.settings import Limits

from .live import refused

SERVER_SETTINGS = {"api_keys": ("one", "two"), "limits": Limits(rate=RateLimit(2, 3600.0))}


def post(live, key, path="/v1/completions", **fields):
    headers = {"Authorization": f"Bearer {key}"}
    return httpx2.post(live.url + path, json={"prompt": "x", "max_tokens": 1, **fields}, headers=headers)


def test_a_key_above_its_rate_waits_and_others_do_not(live):
    assert [post(live, "one").status_code for _ in range(2)] == [200, 200]
    answer = post(live, "one")
    error = refused(answer, 429)
    assert error["type"] == "RateLimitError"
    assert "requests of an API key must be at most 2 in 3600 s; try again in" in error["message"]
    assert 1700 < int(answer.headers["retry-after"]) <= 1800
    answer = post(live, "one", "/v1/messages")
    assert answer.status_code == 429 and answer.json()["error"]["type"] == "rate_limit_error"
    assert post(live, "three").status_code == 401  # which uses up nothing
    assert post(live, "two").status_code == 200
    headers = {"Authorization": "Bearer one"}
    assert httpx2.get(f"{live.url}/v1/models", headers=headers).status_code == 200
    info = httpx2.get(f"{live.url}/server_info", headers=headers).json()
    assert info["server"]["limits"]["rate"] == "2 in 3600 s"
    metrics = httpx2.get(f"{live.url}/metrics").text
    assert 'entropic_rate_limited_requests_total{model_name="embedded"} 2.0' in metrics


def test_a_bucket_fills_steadily_and_is_forgotten_when_full():
    current = 0.0
    limiter = RateLimiter(RateLimit(4, 2.0), clock=lambda: current)
    assert [limiter.admit("a") for _ in range(5)] == [0, 0, 0, 0, 0.5]
    assert limiter.admit("b") == 0 and len(limiter) == 2
    current = 0.25
    assert limiter.admit("a") == pytest.approx(0.25)
    current = 0.5
    assert limiter.admit("a") == 0 and limiter.admit("a") == pytest.approx(0.5)
    current = 3.0
    assert [limiter.admit("c") for _ in range(4)] == [0] * 4 and len(limiter) == 1


def test_a_bucket_never_holds_more_than_the_limit():
    current = 0.0
    limiter = RateLimiter(RateLimit(4, 2.0), clock=lambda: current)
    assert limiter.admit("a") == 0
    current = 1.5  # in which three more requests come to the three that are left
    assert [limiter.admit("a") for _ in range(5)] == [0, 0, 0, 0, 0.5]


def test_the_flag():
    options = parser().parse_args(["serve", "--request-rate-limit", "600/min"])
    assert serve_setup.settings_of(options).limits.rate == RateLimit(600, 60.0)


@pytest.mark.parametrize("text", ["10", "0/s", "1.5/s", "10/day", "/s"])
def test_what_is_no_rate(entropic, text):
    status, _, errors = entropic("serve", "--request-rate-limit", text)
    assert (
        status == 2
        and f"must be a number of at least 1 and a period of s, min or h, as 10/s; got {text}" in errors
    )
