"""Measurements of the interference benchmark: small requests beside hard input, texts beside long prompts."""

import asyncio
import contextlib
import itertools
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from entropic_jax.serving.bench.client import Outcome, Target
from entropic_jax.serving.bench.connection import Pool

HARD_SCHEMAS, LONG_TEXTS = 16, 8  # in flight at a time
TEXT = 10**6  # characters of a long text
LONG_PROMPT, SHORT_PROMPT, SHORT_TEXT = 8000, 64, 64  # tokens
FIRST_TOKEN, PAUSE = 500.0, 100.0  # milliseconds: bounds of the first token and the p99 of a text's pauses


class Rates(NamedTuple):
    """Arrivals of a second."""

    small: float = 5.0
    short: float = 1.5  # with streamed texts
    long: float = 0.3  # with long prompts


async def arm(url: str, seconds: float, rates: Rates, with_hard_input: bool) -> dict[str, Any]:
    """The measurements of one server.

    Args:
        url: the address of the server.
        seconds: the length of each measurement.
        rates: the arrivals of each kind.
        with_hard_input: whether to measure small requests beside hard input.
    """
    target = Target(Pool(url), "embedded", 120.0, {"temperature": 0.0})
    rng = random.Random(0)
    small = lambda due: target.complete(tokens(rng, 8), 8, 1, due)
    await arrivals(4.0, rates.small, small)  # not counted: what is compiled late
    await target.complete(tokens(rng, LONG_PROMPT), LONG_PROMPT, 1)
    results: dict[str, Any] = {}
    short = lambda due: target.complete(tokens(rng, SHORT_PROMPT), SHORT_PROMPT, SHORT_TEXT, due)
    long = lambda due: target.complete(tokens(rng, LONG_PROMPT), LONG_PROMPT, 1, due)
    texts, prompts = await asyncio.gather(
        arrivals(seconds, rates.short, short), arrivals(seconds, rates.long, long)
    )
    failed = Counter(o.error for o in (*texts, *prompts) if o.error is not None)
    spans = [(o.sent, o.ended) for o in prompts]
    gaps = {True: [], False: []}
    for outcome in texts:
        for begin, end in itertools.pairwise(when for when, _ in outcome.chunks):
            gaps[any(begin < b and end > a for a, b in spans)].append(1000 * (end - begin))
    first = [1000 * (o.chunks[0][0] - o.due) for o in texts if o.chunks]
    prefill = [latency(o) for o in prompts if o.error is None]
    results |= {
        "pauses during prefill": gaps[True],
        "other pauses": gaps[False],
        "first token": first,
        "long prompts": prefill,
        "within bounds": sum(map(is_within_bounds, texts)) / len(texts),
        "failed": dict(failed),
    }
    if with_hard_input:  # last, since what is in flight at its end keeps the server busy for a while
        results["alone"] = [latency(o) for o in await arrivals(seconds, rates.small, small)]
        with hard_input(url) as answers:
            await asyncio.sleep(1.0)
            results["beside"] = [latency(o) for o in await arrivals(seconds, rates.small, small)]
        results["hard input"] = answers
    return results


def is_within_bounds(outcome: Outcome) -> bool:
    """Whether a text kept the bounds of its first token and of the 99th percentile of its pauses."""
    times = [when for when, _ in outcome.chunks]
    if outcome.error is not None or len(times) < 2:
        return False
    pauses = 1000 * np.diff(times)
    return 1000 * (times[0] - outcome.due) <= FIRST_TOKEN and float(np.percentile(pauses, 99)) <= PAUSE


async def arrivals(seconds: float, rate: float, send: Callable[[float], Awaitable[Outcome]]) -> list[Outcome]:
    """Send requests at fixed times, whatever the server does; their outcomes.

    Args:
        seconds: length of the arrivals.
        rate: requests of a second.
        send: sends a request that was due at a time of `time.perf_counter`.
    """
    start, tasks = time.perf_counter(), []
    for number in range(max(1, int(seconds * rate))):
        due = start + number / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(send(due)))  # type: ignore[arg-type]
    return list(await asyncio.gather(*tasks))


def tokens(rng: random.Random, count: int) -> list[int]:
    """A random prompt, so that no two share a prefix."""
    return [rng.randrange(10, 4000) for _ in range(count)]


def latency(outcome: Outcome) -> float:
    """Milliseconds from when a request was due to its end. RuntimeError if it failed."""
    if outcome.error is not None:
        raise RuntimeError(f"a request failed: {outcome.error}: {outcome.detail}")
    return 1000 * (outcome.ended - outcome.due)


@contextlib.contextmanager
def hard_input(url: str) -> Iterator[dict[str, dict[str, int]]]:
    """Hard schemas and long texts, so many in flight at a time, while the block runs.

    A process of its own makes and sends them, since writing a text takes as long as a small request. The
    counts of their answers are there at the end of the block.

    Args:
        url: the address of the server.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_hard_input, args=(url, theirs), daemon=True)
    process.start()
    answers: dict[str, dict[str, int]] = {}
    try:
        ours.recv()  # it has begun
        yield answers
    finally:
        ours.send(None)
        answers.update(ours.recv())
        process.join()


def _send_hard_input(url: str, connection: Any) -> None:
    """Send hard input until a message comes; answer it with the counts."""
    asyncio.run(HardInput(url, random.Random(1)).run(connection))


class HardInput:
    """Hard schemas and long texts, so many in flight at a time."""

    def __init__(self, url: str, rng: random.Random) -> None:
        """Nothing in flight.

        Args:
            url: the address of the server.
            rng: makes every input another one.
        """
        self.url, self.rng = url, rng
        self.answers: dict[str, Counter[str]] = {"schemas": Counter(), "texts": Counter()}

    async def run(self, connection: Any) -> None:
        """Send until a message comes over the connection, and answer with the counts by status.

        Args:
            connection: the end of a pipe, over which a message says that it has begun.
        """
        kinds = [("schemas", self._schema)] * HARD_SCHEMAS + [("texts", self._text)] * LONG_TEXTS
        tasks = [asyncio.create_task(self._repeat(kind, make)) for kind, make in kinds]
        connection.send(None)
        await asyncio.to_thread(connection.recv)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        connection.send({kind: dict(counts) for kind, counts in self.answers.items()})

    async def _repeat(self, kind: str, make: Callable[[], tuple[str, Any]]) -> None:
        pool = Pool(self.url)
        while True:
            path, body = make()
            response = await pool.send("POST", path, body)
            await response.read()
            response.close()
            self.answers[kind][str(response.status)] += 1
            if response.status == 429:
                await asyncio.sleep(0.2)

    def _schema(self) -> tuple[str, Any]:
        number = self.rng.randrange(10**9)
        parts = [{"type": "string", "pattern": f"a{number}x{i}.*"} for i in range(50)]
        body = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"json": {"allOf": parts}}}
        return "/v1/completions", body

    def _text(self) -> tuple[str, Any]:
        words = " ".join(f"w{self.rng.randrange(10**6)}" for _ in range(1000))
        return "/tokenize", {"prompt": (words * (TEXT // len(words) + 1))[:TEXT]}
