"""Hours of abuse in minutes: mixed requests against a server, none of which may hang, leak or be wrong.

    python -m benchmarks.soak [--requests 10000] [--concurrency 48] [--document]

Starts a server with a small cache, so that sequences are preempted, and `--batch-invariant`, so that the
right answer to each request is known from when the server was alone with it. Long requests, and those that
ask to go behind others, may be ended by the server's time limit if it says so. At the end every page must be
free again, memory within 5 % of what it was after warm-up, and after kill -9 the server must come back.
Exits with 1 where any of it does not hold. On the way it says how far it is, and keeps what came of the
requests so far beside the results (`soak-CPU.partial.json`), in case it is broken off; it gives up where a
hundred requests have failed.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from entropic_jax.serving.bench.connection import Pool
from entropic_jax.serving.generation import EMBEDDED

from . import report
from .server_process import ServerProcess, ours
from .soak_requests import LONG, Known, RefusedError, Requests, TimedOutError, WrongAnswerError
from .worker import ROOT

DOCUMENT = ROOT / "docs" / "results.md"
GROWTH = 0.05  # of memory, allowed
PATIENCE = 180.0  # seconds after which a request counts as hanging
HOPELESS = 100  # failures after which no more requests are sent
SERVER = (
    *("--max-num-seqs", "16", "--max-model-len", "1024", "--kv-cache-bytes", str(18 * 2**20)),
    *("--request-timeout", "60", "--batch-invariant", "--warmup", "full"),
)


async def learn(server: ServerProcess, texts: list[str], tokens: int) -> list[Known]:
    """What the server says to each prompt when it is alone with it."""
    pool = Pool(server.url)
    requests = Requests(pool, tokens)
    try:
        return [await requests.learn(text, seed) for seed, text in enumerate(texts)]
    finally:
        pool.close()


async def state(pool: Pool) -> dict[str, Any]:
    """What the server says of itself."""
    response = await pool.send("GET", "/entropic/state")
    try:
        return json.loads(await response.read())
    finally:
        response.close()


async def soak(
    server: ServerProcess,
    known: list[Known],
    count: int,
    concurrency: int,
    tokens: int,
    seed: int,
    told: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Send `count` requests, `concurrency` at a time; what came of them, also told a hundred times."""
    pool = Pool(server.url)
    requests = Requests(pool, tokens, known)
    kinds = requests.kinds()
    shares = np.array([share for share, _ in kinds.values()], float)
    order = np.random.default_rng(seed).choice(len(kinds), count, p=shares / shares.sum())
    sent, timed_out, failures, refused = Counter(), Counter(), [], 0
    memory: list[tuple[int, float]] = []
    queue = iter(enumerate(order))
    begin = time.perf_counter()

    def so_far() -> dict[str, Any]:
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
            if len(failures) >= HOPELESS:
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
                told(so_far())

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    found = so_far()
    for _ in range(150):  # those whose clients have left need a moment
        after = await state(pool)
        if after["running"] + after["waiting"] == 0 and after["kv_usage"] == 0:
            break
        await asyncio.sleep(0.2)
    pool.close()
    return {**found, "after": {name: value for name, value in after.items() if name != "sequences"}}


async def crash(server: ServerProcess, known: list[Known], tokens: int) -> dict[str, Any]:
    """Kill it with -9 in the middle of streams, start again, and see that the answers are the same."""
    requests = Requests(pool := Pool(server.url), tokens, known)
    streams = [
        asyncio.create_task(requests.stream(prompt=one.prompt, max_tokens=LONG, temperature=0))
        for one in known[:8]
    ]
    await asyncio.sleep(1.0)
    await asyncio.to_thread(server.kill)
    async with asyncio.timeout(30):
        ends = await asyncio.gather(*streams, return_exceptions=True)
    broken = sum(isinstance(end, OSError) for end in ends)
    pool.close()
    seconds = await asyncio.to_thread(server.start)
    again = await learn(server, [one.prompt for one in known], tokens)
    return {"streams": len(streams), "broken_off": broken, "ready_again": seconds, "same": again == known}


def prompts(count: int) -> list[str]:
    """Stretches of source text of different length."""
    text = "".join(path.read_text("utf-8") for path in sorted((ROOT / "serving").glob("*.py")))
    random = np.random.default_rng(0)
    starts = random.integers(0, len(text) - 2000, count)
    return [text[s : s + int(n)] for s, n in zip(starts, random.integers(20, 1200, count), strict=True)]


def memory_growth(memory: list[tuple[int, float]], count: int) -> float:
    """How much more memory the last tenth of the requests saw than those after the first fifth."""
    early = [size for n, size in memory if 0.2 * count <= n <= 0.4 * count]
    late = [size for n, size in memory if n > 0.9 * count]
    return statistics.median(late) / statistics.median(early) - 1 if early and late else float("nan")


def verdicts(results: dict[str, Any]) -> list[tuple[str, bool, str]]:
    """What had to hold, whether it did, and the figures."""
    run, after, restart = results["run"], results["run"]["after"], results["crash"]
    free = after["pages_free"] + after.get("prefix_pages", 0)
    total = sum(run["sent"].values())
    seconds = run["seconds"]
    return [
        ("no wrong answer, none missing", not run["failures"], f"{len(run['failures'])} of {total}"),
        ("pages free as at the start", free == after["pages"], f"{free} of {after['pages']}"),
        (
            "memory flat",
            results["growth"] <= GROWTH,
            f"{results['growth']:+.1%} after warm-up, {run['memory'][-1][1]:.0f} MB at the end",
        ),
        ("nothing compiled after warm-up", after["compilations"] == 0, f"{after['compilations']} programs"),
        ("sequences were preempted", after["preemptions"] > 0, f"{after['preemptions']} times"),
        ("streams end when the server is killed", restart["broken_off"] == restart["streams"], ""),
        ("the same answers after kill -9", restart["same"], f"ready in {restart['ready_again']:.1f} s"),
        ("SIGTERM ends it", results["status"] == 0, f"status {results['status']}"),
        ("rate", True, f"{total / seconds:.1f} requests/s for {seconds:.0f} s"),
    ]


def grids(results: dict[str, Any]) -> list[report.Grid]:
    """The verdicts and the kinds as tables."""
    held = [[what, "yes" if right else "NO", figures] for what, right, figures in verdicts(results)]
    wrong = Counter(name for name, _ in results["run"]["failures"])
    late = results["run"]["timed_out"]
    kinds = [
        [k, str(n), str(late.get(k, 0)), str(wrong[k])] for k, n in sorted(results["run"]["sent"].items())
    ]
    return [
        ("Soak", ["what had to hold", "held", "figures"], held),
        ("Requests of the soak", ["kind", "sent", "timed out", "failed"], kinds),
    ]


def main() -> int:
    """Soak a server, print and store what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=24, help="of an ordinary answer")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/soak-CPU.json")
    parser.add_argument("--document", action="store_true", help="put the tables into docs/results.md")
    options = parser.parse_args()
    console = Console(highlight=False)
    out = options.out or ROOT / "benchmarks" / "results" / f"soak-{report.slug(report.processor())}.json"
    partial = out.with_suffix(".partial.json")

    def tell(run: dict[str, Any]) -> None:
        partial.write_text(json.dumps(results | {"run": run}, indent=1) + "\n", "utf-8")
        done, megabytes = run["memory"][-1]
        console.print(
            f"{done} of {options.requests} requests in {run['seconds']:.0f} s: {megabytes:.0f} MB, "
            f"{len(run['failures'])} failed, {sum(run['timed_out'].values())} timed out"
        )

    results = report.machine(console) | {"server": " ".join(SERVER)}
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(ours(options.model, *SERVER), Path(folder) / "server.log")
        try:
            results["ready"] = server.start()
            known = asyncio.run(learn(server, prompts(options.prompts), options.tokens))
            results["run"] = asyncio.run(
                soak(
                    server,
                    known,
                    options.requests,
                    options.concurrency,
                    options.tokens,
                    options.seed,
                    tell,
                )
            )
            results["growth"] = memory_growth(results["run"]["memory"], options.requests)
            results["crash"] = asyncio.run(crash(server, known, options.tokens))
            results["status"] = server.stop()
        finally:
            server.kill()
    notes = [f"{results['cpu']}, {results['date']}. Server: `{results['server']}`."]
    report.show_grids(grids(results), notes, console)
    for name, detail in results["run"]["failures"][:20]:
        console.print(f"{name}: {detail}", markup=False)
    out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    partial.unlink(missing_ok=True)
    if options.document:
        report.write_section(DOCUMENT, "soak", report.markdown(grids(results), notes))
    return int(not all(right for _, right, _ in verdicts(results)))


if __name__ == "__main__":
    sys.exit(main())
