"""Parts of a fleet that need no Ray: what is forwarded, which replica is chosen, how many there should be."""

import random
from types import SimpleNamespace

import pytest

from entropic_jax.serving.engine.routing import Router
from entropic_jax.serving.fleet.forwarding import BLOCK, Forwarded, parsed, prefix_hashes, refusal
from entropic_jax.serving.fleet.prefix_routing import PrefixRouting
from entropic_jax.serving.fleet.work import METRIC, SecondsOfWork, WorkMeter


def prompt_hashes(group: int, question: int) -> tuple[bytes, ...]:
    return prefix_hashes({"prompt": f"{group} " * 200 + f"{question} " * 40})


def hit_blocks(choose, requests, ended=lambda chosen: None) -> int:
    """Blocks that the chosen replicas had been sent before."""
    held, hits = {}, 0
    for hashes in requests:
        chosen = choose(hashes)
        known = held.setdefault(chosen, set())
        hits += sum(page_hash in known for page_hash in hashes)
        known.update(hashes)
        ended(chosen)
    return hits


def shuffled_requests() -> list[tuple[bytes, ...]]:
    requests = [prompt_hashes(group, question) for group in range(12) for question in range(5)]
    random.Random(0).shuffle(requests)
    return requests


def test_prefix_routing_finds_more_than_random_choice():
    routing, names, generator = PrefixRouting(bound=4), ["a", "b", "c", "d"], random.Random(1)

    def by_prefix(hashes):
        chosen = routing.order(hashes, names)[0]
        routing.sent(hashes, chosen)
        return chosen

    best = hit_blocks(by_prefix, shuffled_requests(), routing.ended)
    at_random = hit_blocks(lambda hashes: generator.choice(names), shuffled_requests())
    assert best > 1.2 * at_random


def test_a_prefix_that_everybody_sends_fills_a_replica_up_to_the_bound_only():
    routing, hashes = PrefixRouting(bound=3), prompt_hashes(0, 0)
    chosen = []
    for _ in range(8):
        chosen.append(routing.order(hashes, ["a", "b"])[0])
        routing.sent(hashes, chosen[-1])
    assert chosen[:4] == [chosen[0]] * 4 and set(chosen) == {"a", "b"}
    assert abs(routing.loads["a"] - routing.loads["b"]) <= 4


def test_replicas_come_and_go():
    routing, hashes = PrefixRouting(bound=1), prompt_hashes(0, 0)
    routing.sent(hashes, "a")
    routing.died("a")
    assert routing.order(hashes, ["b", "c"])[0] in ("b", "c")
    assert set(routing.order(hashes, ["b", "c", "d"])) == {"b", "c", "d"}
    routing.ended("a")  # may be reported after the death
    assert "a" not in routing.loads


def test_equal_loads_are_used_in_turn():
    routing, chosen = PrefixRouting(bound=1), []
    for question in range(6):
        hashes = prompt_hashes(question, question)
        chosen.append(routing.order(hashes, ["a", "b", "c"])[0])
        routing.sent(hashes, chosen[-1])
        routing.ended(chosen[-1])
    assert chosen == ["a", "b", "c"] * 2


def test_conversations_share_the_hashes_of_their_beginning():
    first = [{"role": "system", "content": "s" * 300}, {"role": "user", "content": "u" * 300}]
    longer = [*first, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b" * 100}]
    short_hashes = prefix_hashes({"model": "m", "messages": first})
    long_hashes = prefix_hashes({"model": "m", "messages": longer})
    assert len(short_hashes) > 600 // BLOCK
    assert long_hashes[: len(short_hashes) - 1] == short_hashes[:-1]
    others = [{name: "x"} for name in ("cache_salt", "model", "instructions", "system")]
    for other in (*others, {"tools": [{"type": "function"}]}):
        assert prefix_hashes({"model": "m", "messages": first, **other})[:1] != short_hashes[:1]


def test_the_prefix_that_was_sent_longest_ago_is_forgotten():
    router = Router(2, bound=9, capacity=2, is_cached=lambda rank, page_hash: False)
    for page_hash in (b"a", b"b", b"a", b"c"):  # a is sent again before there is no room
        router.sent(1, [page_hash])
    assert [router.match(1, [page_hash]) for page_hash in (b"a", b"b", b"c")] == [1, 0, 1]


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"1", b"[" * 100_000])
def test_a_body_that_is_no_object_has_no_hashes(body):
    assert prefix_hashes(parsed(body)) == ()


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("/metrics", {}, "path must be"),
        ("/sleep", {}, "path must be"),
        ("/v1/responses/resp_1", {}, "path must be"),
        ("/v1/load_lora_adapter", {}, "path must be"),
        ("/v1/responses", {"previous_response_id": "resp_1"}, "previous_response_id must be null"),
    ],
)
def test_what_concerns_one_replica_is_refused(path, fields, said):
    assert said in refusal(path, fields)
    assert refusal("/v1/responses", {"input": "x"}) is None


def test_a_request_becomes_an_asgi_scope():
    forwarded = Forwarded("POST", "/v1/completions", b"a=1", ((b"host", b"x"),), ("1.2.3.4", 5), b"{}")
    scope = forwarded.scope()
    assert (scope["method"], scope["path"], scope["query_string"]) == ("POST", "/v1/completions", b"a=1")
    assert scope["headers"] == [(b"host", b"x")] and scope["client"] == ("1.2.3.4", 5)


def test_seconds_of_work_use_the_highest_recent_rate():
    times = iter(range(0, 100, 2))
    meter = WorkMeter(lambda: next(times))
    assert meter.seconds({"work_done": 0, "work_left": 100}) == 0  # no rate is known
    assert meter.seconds({"work_done": 100, "work_left": 400}) == 8  # 50 steps a second
    assert meter.seconds({"work_done": 110, "work_left": 400}) == 8  # a slower interval counts for nothing
    assert meter.seconds({"work_done": 110, "work_left": 0}) == 0


@pytest.mark.parametrize(("seconds", "replicas"), [([], 2), ([0.0, 0.0], 2), ([25.0, 10.0], 4), ([200.0], 6)])
def test_replicas_follow_the_seconds_of_work(seconds, replicas):
    context = SimpleNamespace(
        aggregated_metrics={METRIC: dict(enumerate(seconds))} if seconds else None,
        capacity_adjusted_min_replicas=2,
        capacity_adjusted_max_replicas=6,
    )
    assert SecondsOfWork(10.0)(context) == (replicas, {})
