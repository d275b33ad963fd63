"""Two replicas of the embedded model under Ray Serve: answers, the death of one, and prefix-aware routing."""

import os
import random
import signal
import threading
import time

import pytest

from tests.serving.ray_fleet import Answer, Fleet, clients, running_fleet

pytest.importorskip("ray", reason="pip install -e '.[ray]'")
pytest.importorskip("fastapi")
pytestmark = pytest.mark.slow

REQUESTS, CLIENTS, KILLED_AFTER = 200, 12, 60
BACK = 90.0  # seconds in which the fleet must have recovered


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with running_fleet(tmp_path_factory.mktemp("fleet") / "log.txt") as running:
        yield running


def completion(number: int, **fields) -> dict:
    return {
        "prompt": f"def function_{number}(",
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
    } | fields


def complete(answer: Answer, stream: bool) -> bool:
    """Whether an answer is a whole text."""
    if not stream:
        return answer.status == 200 and answer.json["choices"][0]["finish_reason"] == "length"
    *begun, done = answer.events
    ends = [choice["finish_reason"] for event in begun for choice in event.get("choices", ())]
    return done == "[DONE]" and ends[-1:] == ["length"]


def ended_midway(answer: Answer) -> bool:
    """Whether a stream had begun and then ended with an event that says what has happened."""
    *begun, error, done = answer.events
    return (
        bool(begun)
        and done == "[DONE]"
        and error["error"]["code"] == 503
        and "gone" in error["error"]["message"]
    )


def rate(fleet: Fleet, count: int = 24) -> float:
    """Requests per second of a burst."""
    start = time.monotonic()
    with clients(CLIENTS) as pool:
        answers = list(pool.map(lambda n: fleet.request("/v1/completions", completion(n)), range(count)))
    assert all(complete(answer, False) for answer in answers)
    return count / (time.monotonic() - start)


def test_answers_are_those_of_a_server(fleet):
    plain = fleet.request("/v1/completions", completion(0))
    assert complete(plain, False)
    streamed = fleet.request("/v1/completions", completion(0, stream=True))
    text = "".join(e["choices"][0]["text"] for e in streamed.events[:-1] if e["choices"])
    assert text == plain.json["choices"][0]["text"]
    refused = fleet.request("/v1/completions", completion(0, top_p=7))
    assert (refused.status, refused.json["error"]["param"]) == (400, "top_p")
    assert fleet.request("/v1/nothing").status == 404
    assert fleet.request("/metrics").status == 400
    assert fleet.request("/health").json == {"status": "alive"}


def test_no_request_is_lost_when_a_replica_is_killed(fleet):
    victim, _ = fleet.process_ids(2, BACK)
    rate(fleet)  # programs that only bursts need are compiled
    before = rate(fleet)
    ended, begin_kill = [], threading.Event()

    def send(number: int) -> tuple[bool, Answer]:
        stream = number % 2 == 0
        answer = fleet.request("/v1/completions", completion(number, stream=stream, max_tokens=48))
        ended.append(number)
        if len(ended) >= KILLED_AFTER:
            begin_kill.set()
        return stream, answer

    with clients(CLIENTS) as pool:
        futures = [pool.submit(send, number) for number in range(REQUESTS)]
        assert begin_kill.wait(BACK * 3)
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        outcomes = [future.result() for future in futures]
    lost = [
        (stream, answer)
        for stream, answer in outcomes
        if not complete(answer, stream) and not (stream and ended_midway(answer))
    ]
    assert lost == []
    num_cut = sum(not complete(answer, stream) for stream, answer in outcomes)
    assert num_cut <= CLIENTS  # streams that had begun; no others
    assert victim not in fleet.process_ids(2, BACK - (time.monotonic() - killed))
    while (after := rate(fleet)) < 0.5 * before and time.monotonic() - killed < BACK:
        pass
    seconds = time.monotonic() - killed
    print(f"rate {before:.1f}/s, {after:.1f}/s {seconds:.0f} s after the death; {num_cut} streams cut")
    assert after >= 0.5 * before and seconds < BACK


def cached_tokens(fleet: Fleet) -> int:
    """Tokens from prefix caches, of requests in random order that share prefixes in groups."""
    fleet.process_ids(2, BACK)
    requests = [(group, question) for group in range(8) for question in range(4)]
    random.Random(0).shuffle(requests)
    hits = 0
    for group, question in requests:
        prompt = f"{group} = value\n" * 30 + f"question_{question} ="
        answer = fleet.request("/v1/completions", completion(0, prompt=prompt, max_tokens=2))
        hits += answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return hits


def ends_what_it_has_begun(fleet: Fleet) -> bool:
    """Whether a fleet that gets SIGTERM finishes a stream, and then exits with 0."""
    with clients(1) as pool:
        body = completion(0, stream=True, max_tokens=900)
        stream = pool.submit(fleet.request, "/v1/completions", body)
        time.sleep(1.0)
        fleet.process.send_signal(signal.SIGTERM)
        return complete(stream.result(), True) and fleet.process.wait(BACK) == 0


def test_prefix_aware_routing_finds_more_cached_prefixes(fleet, tmp_path):
    by_prefix = cached_tokens(fleet)
    with running_fleet(tmp_path / "log.txt", "--replica-routing", "load") as other:
        by_load = cached_tokens(other)
        assert ends_what_it_has_begun(other)
    print(f"cached tokens: {by_prefix} by prefix, {by_load} by load")
    assert by_prefix > by_load > 0
