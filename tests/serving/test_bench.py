"""`entropic bench` against a server that records when it sent what."""

import asyncio
import json
import statistics
import time

import numpy as np
import pytest

from entropic_jax.serving.bench.arrivals import Arrival
from entropic_jax.serving.bench.client import Target
from entropic_jax.serving.bench.connection import Pool
from entropic_jax.serving.bench.load import closed_loop, open_loop
from entropic_jax.serving.bench.measures import compared, meets, per_token, summary
from entropic_jax.serving.bench.prompts import Prompts
from tests.serving.fake_server import FakeServer

LATE = 0.25  # seconds that a busy machine may add to a sleep


@pytest.fixture
def server():
    with FakeServer() as running:
        yield running


def send(server, arrivals, *, concurrency=None, timeout=30.0, **fake):
    async def main():
        pool = Pool(server.url, "secret")
        target = Target(pool, "fake", timeout, {"fake": fake})
        prompts = Prompts(list(range(100, 1100)), 0)
        try:
            if concurrency:
                return await closed_loop(target, arrivals, prompts, concurrency)
            return await open_loop(target, arrivals, prompts)
        finally:
            pool.close()

    return asyncio.run(main())


def evenly(count, gap=0.02, prompt=5, output=6):
    return [Arrival(i * gap, prompt, output) for i in range(count)]


@pytest.mark.parametrize(("per_chunk", "usage"), [(1, "running"), (1, "last"), (1, None), (4, "running")])
def test_what_is_measured_is_what_the_server_did(server, per_chunk, usage):
    outcomes = send(server, evenly(8, output=8), first=0.08, gap=0.03, per_chunk=per_chunk, usage=usage)
    logged = {tuple(entry["body"]["prompt"]): entry for entry in server.log}
    assert len(logged) == len(outcomes) == 8
    delays, firsts, gaps = [], [], []
    for outcome, entry in zip(outcomes, server.log, strict=True):
        assert outcome.error is None
        assert [tokens for _, tokens in outcome.chunks] == [tokens for _, tokens in entry["written"]]
        assert outcome.output_tokens == 8
        assert outcome.sent <= entry["begun"]
        pairs = zip(outcome.chunks, entry["written"], strict=True)
        delays += [seen - written for (seen, _), (written, _) in pairs]
        assert outcome.ended >= outcome.chunks[-1][0]
        written = [when for when, _ in entry["written"]]
        firsts.append(1000 * (written[0] - outcome.due))
        gaps += list(1000 * np.diff(written))
    assert min(delays) >= 0
    assert statistics.median(delays) < 0.01
    figures = summary(outcomes)
    late = 1000 * max(delays)
    assert figures["ttft"]["p50"] >= 80
    assert 0 <= figures["ttft"]["p50"] - np.percentile(firsts, 50) <= late
    assert abs(figures["itl"]["p50"] - np.percentile(gaps, 50)) <= late
    assert figures["tokens_per_chunk"] == per_chunk
    chunks = 8 / per_chunk
    expected = figures["itl"]["mean"] * (chunks - 1) / (8 - per_chunk)
    assert figures["tpot"]["mean"] == pytest.approx(expected)
    assert figures["output_tokens"] == 64
    assert figures["output_tokens_per_second"] == pytest.approx(64 / figures["seconds"])


def test_open_loop_sends_on_time_and_counts_the_wait():
    """A server with one row needs 50 ms per request and gets one every 10 ms: queues build up."""
    with FakeServer(rows=1) as server:
        outcomes = send(server, evenly(10, gap=0.01, output=1), first=0.05)
    assert server.most_in_flight > 5
    begun = [entry["begun"] for entry in server.log]
    assert begun[-1] - begun[0] < 0.1 + LATE
    figures = summary(outcomes)
    assert figures["e2e"]["max"] >= 10 * 50 - 9 * 10 - 5
    waits = [1000 * (o.chunks[0][0] - o.due) for o in outcomes]
    assert waits[-1] > waits[0] + 300
    assert figures["late"]["p50"] < 50


def test_a_late_client_does_not_flatter_the_server(server):
    """The delay before a request was sent counts in its latency."""

    async def main():
        pool = Pool(server.url)
        outcome = await Target(pool, "fake", 5, {}).complete([1], 1, 1, due=time.perf_counter() - 2)
        pool.close()
        return outcome

    figures = summary([asyncio.run(main())])
    assert figures["ttft"]["p50"] > 2000
    assert figures["late"]["p50"] > 2000


def test_closed_loop_keeps_so_many_under_way(server):
    outcomes = send(server, evenly(12, gap=100), concurrency=3, first=0.02)
    assert server.most_in_flight == 3
    assert len({id(o) for o in outcomes}) == 12
    assert [len(entry["body"]["prompt"]) for entry in server.log] == [5] * 12
    assert server.connections == 3, "connections are used again"


def test_headers_and_body(server):
    (outcome,) = send(server, [Arrival(0, 3, 2)])
    (entry,) = server.log
    assert entry["headers"]["authorization"] == "Bearer secret"
    assert entry["body"]["stream"] and entry["body"]["ignore_eos"]
    assert (entry["body"]["max_tokens"], entry["body"]["model"]) == (2, "fake")
    assert outcome.prompt_tokens == 3


@pytest.mark.parametrize(
    ("fake", "kind"),
    [
        ({"status": 429}, "HTTP 429"),
        ({"status": 500}, "HTTP 500"),
        ({"cut": 2}, "broken off"),
        ({"fails": True}, "error in the stream"),
        ({"first": 5}, "timeout"),
    ],
)
def test_errors_by_kind(server, fake, kind):
    outcomes = send(server, evenly(3), timeout=0.4, **fake)
    figures = summary(outcomes, {"ttft": 1e9})
    assert figures["errors"] == {kind: 3}
    assert figures["error_examples"][kind]
    assert (figures["completed"], figures["goodput"], figures["ttft"]) == (0, 0, None)


def test_a_server_that_is_not_there():
    with FakeServer() as server:
        pass
    assert summary(send(server, evenly(2)))["errors"] == {"refused": 2}


def test_a_connection_closed_between_requests_is_opened_again(server):
    async def main():
        pool = Pool(server.url)
        target = Target(pool, "fake", 5, {})
        first = await target.complete([1], 1, 1)
        for _, writer in pool.idle:
            writer.close()
        second = await target.complete([2], 1, 1)
        pool.close()
        return first, second

    assert [outcome.error for outcome in asyncio.run(main())] == [None, None]


def test_goodput_counts_requests_within_every_bound(server):
    fast = send(server, evenly(3), first=0.0, gap=0.0)
    slow = send(server, evenly(3), first=0.0, gap=0.4, timeout=30)
    slo = {"ttft": 1000 * LATE, "itl": 300.0}
    assert [meets(o, slo) for o in fast + slow] == [True] * 3 + [False] * 3
    assert meets(slow[0], {"ttft": 1000 * LATE})
    figures = summary(fast + slow, slo)
    assert figures["within_slo"] == 0.5
    assert figures["goodput"] == pytest.approx(3 / figures["seconds"])
    assert per_token(slow[0]) == pytest.approx(400, abs=1000 * LATE)


def test_ratios_are_of_paired_runs():
    run = lambda rate, ttft: {"requests_per_second": rate, "ttft": {"mean": ttft, "p50": ttft}}
    rows = compared([run(2, 100), run(6, 300)], [run(1, 200), run(2, 200)])
    by_name = {row["figure"]: row for row in rows}
    rate, ttft = by_name["requests/s"], by_name["ttft mean, ms"]
    assert (rate["ratio"], rate["lowest"], rate["highest"], rate["more_is_better"]) == (2.5, 2, 3, True)
    assert (ttft["ratio"], ttft["lowest"], ttft["highest"], ttft["more_is_better"]) == (1.0, 0.5, 1.5, False)
    assert "goodput, requests/s" not in by_name


def test_command(server, entropic, tmp_path):
    out, plot = tmp_path / "out.json", tmp_path / "plot.png"
    status, text, err = entropic(
        *("bench", server.url, "--rate=100", "--requests=20", "--prompt-tokens=4-9", "--output-tokens=3"),
        *("--slo=ttft:5000 e2e:5000", f"--out={out}", f"--plot={plot}", "--body", '{"fake": {"gap": 0.01}}'),
    )
    assert (status, err) == (0, "")
    assert "20 of 20 requests" in text and "goodput under ttft:5000 e2e:5000" in text
    tree = json.loads(out.read_text())
    (figures,) = tree["servers"][0]["runs"]
    assert figures["completed"] == len(figures["outcomes"]) == 20
    assert all(len(outcome["chunks"]) == 3 for outcome in figures["outcomes"])
    assert {len(entry["body"]["prompt"]) for entry in server.log} <= set(range(4, 10))
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "secret" not in out.read_text()


def test_compare_alternates_and_sends_both_the_same(entropic):
    with FakeServer() as first, FakeServer() as second:
        status, text, _ = entropic(
            *("bench", first.url, "--compare", second.url, "--repeat=2", "--closed-loop=4"),
            *("--requests=6", "--output-tokens=4", "--json", "--warm-up=1", "--api-key=k"),
        )
    tree = json.loads(text)
    assert status == 0
    assert [len(server["runs"]) for server in tree["servers"]] == [2, 2]
    prompts = lambda server: [entry["body"]["prompt"] for entry in server.log]
    assert len(first.log) == len(second.log) == 1 + 2 * 6
    assert sorted(prompts(first)) == sorted(prompts(second))
    assert len({tuple(prompt) for prompt in prompts(first)}) == 13, "no repetition finds a cache warm"
    assert first.log[6]["begun"] < second.log[1]["begun"] < first.log[7]["begun"]
    assert tree["comparison"]
    assert "--api-key" not in text and '"k"' not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "one of --rate, --like, --trace and --closed-loop is required"),
        (["--rate=0"], "--rate must be a number above 0; got 0"),
        (["--like=azure-code"], "--rate is required with --like azure-code, whose rate is not published"),
        (
            ["--rate=1", "--slo=ttft"],
            "--slo must be NAME:MILLISECONDS, NAME one of ttft, itl, tpot, e2e; got ttft",
        ),
        (["--rate=1", "--prompt-tokens=9-4"], "must be N or LOW-HIGH; got 9-4"),
        (["--rate=1", "--body=[]"], "must be a JSON object; got []"),
        (["--rate=1", "--as-text"], "--as-text goes with --text"),
        (["--trace=none.csv", "--like=azure-code"], "--like must not be combined with --trace"),
        (["--trace=none.csv"], "--trace none.csv"),
        (["--rate=1", "--model=other", "--body", '{"fake": {"status": 503}}'], "HTTP 503: "),
    ],
)
def test_wrong_use_is_one_line(server, entropic, arguments, said):
    status, _, err = entropic("bench", server.url, *arguments)
    assert status == 2
    assert said in err
    assert err.count("\n") == 1


def test_a_failed_request_is_status_1(server, entropic):
    body = '{"fake": {"cut": 1}}'
    status, text, _ = entropic(
        "bench", server.url, "--rate=50", "--requests=3", "--warm-up=0", "--body", body
    )
    assert status == 1
    assert "3 × broken off" in text


def test_prompts_from_a_text(server, entropic, tmp_path):
    text = tmp_path / "text"
    text.write_text("".join(chr(97 + i % 26) for i in range(500)))
    base = ("bench", server.url, "--rate=50", "--requests=2", "--warm-up=0", "--prompt-tokens=40", "--text")
    assert entropic(*base, str(text))[0] == 0
    assert entropic(*base, str(text), "--as-text")[0] == 0
    ids, _, words, _ = [entry["body"]["prompt"] for entry in server.log]
    assert len(ids) == 40 and np.all(np.diff(ids) % 26 == 1)
    assert len(words) == 160 and words in text.read_text() * 2
