"""Load of the soak test: mixed requests against one server, then a crash and a restart."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from entropic_jax.serving.bench.connection import Pool

from ..harness.paths import ROOT
from ..harness.server_process import ServerProcess
from .workload import LONG, Known, RefusedError, Requests, TimedOutError, WrongAnswerError

PATIENCE = 180.0  # seconds after which a request counts as hanging
MOST_FAILURES = 100  # after which no more requests are sent


async def learn(server: ServerProcess, texts: list[str], tokens: int) -> list[Known]:
    """The answers that each prompt gets when the server has no other request."""
    pool = Pool(server.url)
    requests = Requests(pool, tokens)
    try:
        return [await requests.learn(text, seed) for seed, text in enumerate(texts)]
    finally:
        pool.close()


async def state(pool: Pool) -> dict[str, Any]:
    """The server's own report of its state."""
    response = await pool.send("GET", "/entropic/state")
    try:
        return json.loads(await response.read())
    finally:
        response.close()


async def idle_state(pool: Pool) -> dict[str, Any]:
    """The server's state once it is idle, or after half a minute."""
    for _ in range(150):  # requests whose clients have disconnected end a little later
        after = await state(pool)
        if after["running"] + after["waiting"] == 0 and after["kv_usage"] == 0:
            break
        await asyncio.sleep(0.2)
    return after


async def soak(
    server: ServerProcess,
    known: list[Known],
    count: int,
    concurrency: int,
    tokens: int,
    seed: int,
    report_progress: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Send requests of every kind to a server.

    Args:
        server: ready for requests.
        known: prompts with the answers that they must get.
        count: number of requests.
        concurrency: requests at a time.
        tokens: number of tokens of an ordinary answer.
        seed: the seed of the order of the kinds and of their draws.
        report_progress: called with the results so far, a hundred times.

    Returns:
        Counts of what was sent, refused, timed out and failed, the memory over time, and the server's state
        at the end.
    """
    pool = Pool(server.url)
    requests = Requests(pool, tokens, known)
    kinds = requests.kinds()
    shares = np.array([share for share, _ in kinds.values()], float)
    order = np.random.default_rng(seed).choice(len(kinds), count, p=shares / shares.sum())
    sent, timed_out, failures, refused = Counter(), Counter(), [], 0
    memory: list[tuple[int, float]] = []
    queue = iter(enumerate(order))
    begin = time.perf_counter()

    def progress() -> dict[str, Any]:
        return {
            "seconds": time.perf_counter() - begin,
            "sent": dict(sent),
            "refused": refused,
            "timed_out": dict(timed_out),
            "failures": failures,
            "memory": memory,
        }

    async def worker() -> None:
        nonlocal refused
        for index, kind in queue:
            if len(failures) >= MOST_FAILURES:
                return
            name, (_, send) = list(kinds.items())[kind]
            random = np.random.default_rng((seed, index))
            while True:
                try:
                    async with asyncio.timeout(PATIENCE):
                        await send(known[int(random.integers(len(known)))], random)
                except RefusedError:
                    refused += 1
                    await asyncio.sleep(0.2)
                    continue
                except TimedOutError:
                    timed_out[name] += 1
                except TimeoutError:
                    failures.append((name, f"no answer within {PATIENCE:g} s"))
                except (WrongAnswerError, OSError, ValueError, KeyError) as error:
                    failures.append((name, f"{type(error).__name__}: {error}"))
                break
            sent[name] += 1
            if sent.total() % max(1, count // 100) == 0:
                memory.append((sent.total(), server.resident()))
                report_progress(progress())

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    summary = progress()
    after = await idle_state(pool)
    pool.close()
    return {**summary, "after": {name: value for name, value in after.items() if name != "sequences"}}


async def crash(server: ServerProcess, known: list[Known], tokens: int) -> dict[str, Any]:
    """Kill the server with -9 during streams, restart it, and compare its answers with those before."""
    requests = Requests(pool := Pool(server.url), tokens, known)
    streams = [
        asyncio.create_task(requests.stream(prompt=entry.prompt, max_tokens=LONG, temperature=0))
        for entry in known[:8]
    ]
    await asyncio.sleep(1.0)
    await asyncio.to_thread(server.kill)
    async with asyncio.timeout(30):
        endings = await asyncio.gather(*streams, return_exceptions=True)
    broken = sum(isinstance(ending, OSError) for ending in endings)
    pool.close()
    seconds = await asyncio.to_thread(server.start)
    after_restart = await learn(server, [entry.prompt for entry in known], tokens)
    return {
        "streams": len(streams),
        "broken_off": broken,
        "ready_again": seconds,
        "same": all(new.same_as(old) for new, old in zip(after_restart, known, strict=True)),
    }


def prompts(count: int) -> list[str]:
    """Stretches of source text of different length."""
    text = "".join(path.read_text("utf-8") for path in sorted((ROOT / "serving").glob("*.py")))
    random = np.random.default_rng(0)
    starts = random.integers(0, len(text) - 2000, count)
    return [text[s : s + int(n)] for s, n in zip(starts, random.integers(20, 1200, count), strict=True)]
