"""The checks of the soak benchmark pass on a correct server and detect a faulty one."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from benchmarks.soak.adapters import LAYERS, RANK, write_adapter
from benchmarks.soak.report import memory_growth, verdicts
from benchmarks.soak.workload import (
    ADAPTERS,
    PARAMETERS,
    RefusedError,
    Requests,
    TimedOutError,
    WrongAnswerError,
)
from entropic_jax.models.lora_files import read_adapter
from entropic_jax.models.model import read_config
from entropic_jax.serving.bench.connection import Pool

TOKENS = 9
KINDS = tuple(Requests(Pool("http://127.0.0.1:1"), TOKENS).kinds())


def ask(live, known, kind, times=4):
    """Send requests of one kind, each with its own random draws."""

    async def main():
        pool = Pool(live.url)
        requests = Requests(pool, TOKENS, known)
        try:
            for i in range(times):
                await requests.kinds()[kind][1](known[i % len(known)], np.random.default_rng(i))
        finally:
            pool.close()

    asyncio.run(main())


@pytest.fixture
def known(live):
    live.engine.adapters.update({name: name for name in ADAPTERS})

    async def main():
        pool = Pool(live.url)
        try:
            return [await Requests(pool, TOKENS).learn(prompt, 2) for prompt in ("def f(", "import os\n")]
        finally:
            pool.close()

    return asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_accepts_what_is_right(live, known, kind):
    live.engine.pace = 0.002 if "disconnects" in kind else 0.0
    ask(live, known, kind, 20 if kind == "invalid" else 4)


@pytest.mark.parametrize(
    "kind",
    ["greedy", "sampled", "streamed", "stop strings", "token ids", "several", "logprobs", "adapters"],
)
def test_another_text_is_found(live, known, kind):
    wrong = [
        answer._replace(
            greedy=answer.greedy[::-1],
            sampled=answer.sampled + "!",
            adapted=tuple(text[::-1] for text in answer.adapted),
        )
        for answer in known
    ]
    with pytest.raises(WrongAnswerError, match="another text from character"):
        ask(live, wrong, kind)


def test_another_embedding_is_found(live, known):
    wrong = [answer._replace(embedding=answer.embedding[::-1]) for answer in known]
    with pytest.raises(WrongAnswerError, match="another embedding"):
        ask(live, wrong, "embeddings")
    assert known[0].same_as(known[0]) and not known[0].same_as(wrong[0]) and not known[0].same_as(known[1])


def test_a_call_that_the_tool_does_not_take_is_found(live, known, monkeypatch):
    other = {**PARAMETERS, "properties": {"colour": {"enum": ["green"]}, "twice": {"type": "boolean"}}}
    monkeypatch.setattr("benchmarks.soak.workload.PARAMETERS", other)
    with pytest.raises(WrongAnswerError, match="not what the tool takes"):
        ask(live, known, "tools", 8)


def test_an_adapter_is_of_the_model(directory, tmp_path):
    folder = write_adapter(tmp_path / "left", Path(directory), 0)
    adapter = read_adapter(folder, read_config(Path(directory)), RANK)
    assert all(np.any(adapter[name].a) and np.any(adapter[name].b) for name in LAYERS)


def test_a_server_that_is_full_or_not_able_is_asked_again(live, known):
    live.engine.room = 0
    with pytest.raises(RefusedError):
        ask(live, known, "greedy")
    live.engine.room = 10**6
    live.engine.failed = "it has stopped"  # answered 503, which is no fault of an answer
    with pytest.raises(RefusedError):
        ask(live, known, "streamed")


def test_a_request_that_times_out_must_have_gone_behind_others(live, known):
    async def main(draw):
        pool = Pool(live.url)
        requests = Requests(pool, TOKENS, known)
        requests.stream = timed_out
        try:
            await requests.streamed(known[0], np.random.default_rng(draw))
        finally:
            pool.close()

    async def timed_out(**body):
        raise TimedOutError

    for draw in range(8):
        behind = int(np.random.default_rng(draw).integers(-5, 6)) > 0
        with pytest.raises(TimedOutError if behind else WrongAnswerError):
            asyncio.run(main(draw))


def test_growth_is_from_after_warm_up_to_the_end():
    rising = [(n, 100.0 + n) for n in range(1, 101)]
    assert memory_growth(rising, 100) == pytest.approx(195.5 / 130 - 1)
    assert memory_growth([(n, 500.0 if n > 10 else 1.0) for n in range(1, 101)], 100) == 0


def test_verdicts_name_what_did_not_hold():
    after = {"pages": 10, "pages_free": 7, "prefix_pages": 3, "compilations": 0, "preemptions": 4}
    run = {
        "failures": [],
        "sent": {"greedy": 5},
        "seconds": 2.0,
        "refused": 0,
        "timed_out": {},
        "memory": [(5, 100.0)],
    }
    crash = {"streams": 8, "broken_off": 8, "same": True, "ready_again": 3.0}
    results = {"run": {**run, "after": after}, "crash": crash, "growth": 0.01, "status": 0}
    assert all(right for _, right, _ in verdicts(results))
    for key, value, name in (
        ("growth", 0.2, "memory flat"),
        ("growth", float("nan"), "memory flat"),
        ("run", {**run, "after": {**after, "pages_free": 6}}, "pages free as at the start"),
        ("run", {**run, "after": after, "failures": [("greedy", "")]}, "no wrong answer, no lost request"),
        ("crash", {**crash, "same": False}, "the same answers after kill -9"),
        ("status", 1, "SIGTERM ends it"),
    ):
        assert [what for what, right, _ in verdicts({**results, key: value}) if not right] == [name]
