"""Interference benchmark: a small request beside hard input, and decoding while long prompts are read.

    python -m benchmarks.serving.interference [--seconds 30] [--output FILE] [--quick]

Hard input: small requests arrive at a steady rate, first alone, then while 16 hard schemas (all refused) and
8 tokenisations of long texts are in flight all the time. Long prompts: short requests arrive at a fixed rate
and stream their text, while prompts of 8000 tokens arrive beside them; once with the server's own prefill
chunks, once with chunks as long as the prompts. Client and server share the cores. Exits with 1 if a target
is missed. Programs are compiled on the first run, so run it once with `--quick` before.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from entropic_jax.serving.bench.client import Outcome, Target
from entropic_jax.serving.bench.connection import Pool
from entropic_jax.serving.options.model import EMBEDDED

from ..harness.provenance import describe_run
from ..harness.publishing import write_json
from ..harness.server_process import ours, running
from ..harness.tables import Table, print_tables

HARD_SCHEMAS, LONG_TEXTS = 16, 8  # in flight at a time
TEXT = 10**6  # characters of a long text
LONG_PROMPT, SHORT_PROMPT, SHORT_TEXT = 8000, 64, 64  # tokens
TARGET = 3.0  # times the latency without interference
SERVER = ("--max-num-seqs", "16", "--max-model-len", "8192", "--warmup", "min")
ARMS = {  # options of the server, by the name of the arm
    "own chunks": (),
    "one chunk a prompt": ("--max-num-batched-tokens", "8192"),
}


class Rates(NamedTuple):
    """Arrivals of a second."""

    small: float = 5.0
    short: float = 1.5  # with streamed texts
    long: float = 0.1  # with long prompts


def main() -> int:
    """Measure, print and store; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of the four measurements")
    for name, value in Rates._field_defaults.items():
        parser.add_argument(f"--{name}-rate", type=float, default=value, help=f"arrivals a second ({value})")
    parser.add_argument("--output", type=Path, help="file of the figures and of every latency")
    parser.add_argument("--quick", action="store_true", help="4 s each: shows that everything runs")
    options = parser.parse_args()
    console = Console(highlight=False)
    seconds = 4.0 if options.quick else options.seconds
    rates = Rates(*(getattr(options, f"{name}_rate") for name in Rates._fields))
    results = describe_run(console) | {"seconds": seconds, "rates": rates._asdict(), "server": SERVER}
    results["arms"] = {}
    for name, extra in ARMS.items():
        with tempfile.TemporaryDirectory() as folder:
            command = ours(options.model, *SERVER, *extra)
            with running(command, Path(folder) / "server.log") as server:
                measure = arm(server.url, seconds, rates, with_hard_input=not extra)
                results["arms"][name] = asyncio.run(measure)
    print_tables(tables(results), [], console)
    for requirement, held, figures in verdicts(results):
        console.print(f"{'held' if held else 'MISSED'}: {requirement} ({figures})")
    if options.output:
        write_json(options.output, results)
    return 0 if options.quick or all(held for _, held, _ in verdicts(results)) else 1


async def arm(url: str, seconds: float, rates: Rates, with_hard_input: bool) -> dict[str, Any]:
    """The measurements of one server.

    Args:
        url: The address of the server.
        seconds: The length of each measurement.
        rates: The arrivals of each kind.
        with_hard_input: Whether to measure small requests beside hard input.
    """
    target = Target(Pool(url), "embedded", 120.0, {"temperature": 0.0})
    rng = random.Random(0)
    small = lambda due: target.complete(tokens(rng, 8), 8, 1, due)
    await arrivals(4.0, rates.small, small)  # not counted: what is compiled late
    await target.complete(tokens(rng, LONG_PROMPT), LONG_PROMPT, 1)
    results: dict[str, Any] = {}
    if with_hard_input:
        results["alone"] = [latency(o) for o in await arrivals(seconds, rates.small, small)]
        load = HardInput(url, rng)
        async with load:
            results["beside"] = [latency(o) for o in await arrivals(seconds, rates.small, small)]
        results["hard input"] = {kind: dict(counts) for kind, counts in load.answers.items()}
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
    prefill = [latency(o) for o in prompts]
    return results | {
        "pauses while reading": gaps[True],
        "other pauses": gaps[False],
        "first token": first,
        "long prompts": prefill,
        "failed": dict(failed),
    }


async def arrivals(seconds: float, rate: float, send: Callable[[float], Awaitable[Outcome]]) -> list[Outcome]:
    """Send requests at fixed times, whatever the server does; their outcomes.

    Args:
        seconds: Length of the arrivals.
        rate: Requests of a second.
        send: Sends a request that was due at a time of `time.perf_counter`.
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


class HardInput:
    """Hard schemas and long texts, so many in flight at a time, while the block runs."""

    def __init__(self, url: str, rng: random.Random) -> None:
        """Nothing in flight.

        Args:
            url: The address of the server.
            rng: Makes every input another one.
        """
        self.url, self.rng = url, rng
        self.answers: dict[str, Counter[str]] = {"schemas": Counter(), "texts": Counter()}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> None:
        """Begin."""
        kinds = [("schemas", self._schema)] * HARD_SCHEMAS + [("texts", self._text)] * LONG_TEXTS
        self._tasks = [asyncio.create_task(self._repeat(kind, make)) for kind, make in kinds]
        await asyncio.sleep(1.0)

    async def __aexit__(self, *_: object) -> None:
        """End, whatever is in flight."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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


def level(values: Sequence[float], percent: float) -> float:
    """A percentile; NaN without values."""
    return float(np.percentile(values, percent)) if len(values) else float("nan")


def verdicts(results: dict[str, Any]) -> list[tuple[str, bool, str]]:
    """Each target, whether it held, and the figures."""
    measured = results["arms"]["own chunks"]
    alone, beside = level(measured["alone"], 95), level(measured["beside"], 95)
    p50, p99 = (level(measured["pauses while reading"], percent) for percent in (50, 99))
    return [
        (
            f"p95 of a small request beside hard input within {TARGET:g} times of it alone",
            beside <= TARGET * alone,
            f"{beside:.1f} and {alone:.1f} ms, {beside / alone:.2f} times",
        ),
        (
            f"p99 of the pauses of a text while long prompts are read within {TARGET:g} times of their p50",
            p99 <= TARGET * p50,
            f"{p99:.1f} and {p50:.1f} ms, {p99 / p50:.2f} times",
        ),
    ]


def tables(results: dict[str, Any]) -> list[Table]:
    """Latencies of small requests, and of texts while long prompts are read, in milliseconds."""
    measured = results["arms"]["own chunks"]
    cells = lambda values: [str(len(values)), *(f"{level(values, p):.1f}" for p in (50, 95, 99))]
    small = [["alone", *cells(measured["alone"])], ["beside hard input", *cells(measured["beside"])]]
    kinds = ("pauses while reading", "other pauses", "first token", "long prompts")
    rows = [[name, kind, *cells(a[kind])] for name, a in results["arms"].items() for kind in kinds]
    header = ["count", "p50", "p95", "p99"]
    answered = [[kind, json.dumps(counts)] for kind, counts in measured["hard input"].items()]
    failed = [[name, json.dumps(a["failed"])] for name, a in results["arms"].items()]
    return [
        ("Milliseconds of a small request", ["", *header], small),
        ("Answers to hard input, by status", ["", "answers"], answered),
        ("Milliseconds beside prompts of 8000 tokens", ["prefill", "", *header], rows),
        ("Failed requests", ["prefill", "failures"], failed),
    ]


if __name__ == "__main__":
    sys.exit(main())
