"""Orders of admission under load: servers that differ in `--scheduling-policy` alone get the same requests.

A text ends where it has an empty line, so only the text says how long it is: a server is told no more than a
limit. A first run in a closed loop has found the lengths. Limits are the same for all requests, or within a
factor of the length.
"""

import contextlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from entropic_jax.serving.bench import arrivals as laws
from entropic_jax.serving.bench.arrivals import Arrival
from entropic_jax.serving.bench.client import Outcome
from entropic_jax.serving.bench.measures import summary
from entropic_jax.serving.bench.prompts import Prompts

from .workload import drive, sustained

if TYPE_CHECKING:
    from .measure import ServingBenchmark

POLICIES = ("fcfs", "entropic", "predicted")
STOP, LONGEST = "\n\n", 512  # the end of a text, and its tokens at most
FACTOR = 4  # of the length, below which a limit is in the second workload
SAME, WITHIN = f"{LONGEST} for all", f"1 to {FACTOR} times the length"
PROMPTS = 32, 256  # tokens
TEMPERATURE = 0.8
FIRST_SEED = 20  # of the prompts and texts; those of the next repetitions follow


def measure(benchmark: "ServingBenchmark") -> list[dict[str, Any]]:
    """Latencies with more sequences than rows, by order of admission and by what limits say.

    Args:
        benchmark: starts the servers, and has the text that prompts are taken from.
    """
    options, quick = benchmark.options, benchmark.quick
    count, width = (24, 4) if quick else (300, 8)
    common = ("--max-num-seqs", str(width), "--max-model-len", "1024", "--scheduling-policy")
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        servers = {policy: stack.enter_context(benchmark.server(*common, policy)) for policy in POLICIES}
        for repetition in range(options.repeat):
            seed = FIRST_SEED + repetition
            prompts = Prompts(benchmark.tokens, seed)
            body = {"temperature": TEMPERATURE, "seed": seed, "ignore_eos": False, "stop": [STOP]}
            drawn = laws.drawn(count, 1.0, 1.0, PROMPTS, (LONGEST, LONGEST), seed)
            warming = POLICIES if repetition == 0 else ("fcfs",)
            first = {name: drive(servers[name].url, drawn, prompts, 4 * width, **body) for name in warming}
            known = first["fcfs"]
            rate = options.utilisation * sustained(known, 4 * width)
            bound = 4 * summary(known)["e2e"]["mean"]
            for limits, requests in workloads(drawn, known, rate, seed).items():
                order = POLICIES if repetition % 2 == 0 else POLICIES[::-1]
                outcomes = {policy: drive(servers[policy].url, requests, prompts, **body) for policy in order}
                for policy in POLICIES:
                    rows.append(
                        {"limits": limits, "policy": policy, "repetition": repetition, "rate": rate}
                        | figures(outcomes[policy], known, bound)
                    )
    return rows


def workloads(drawn: list[Arrival], known: list[Outcome], rate: float, seed: int) -> dict[str, list[Arrival]]:
    """The same requests with limits of both kinds, at their times.

    Args:
        drawn: with times at a rate of one request a second.
        known: their texts.
        rate: requests per second.
        seed: the seed of the limits.
    """
    factors = np.random.default_rng(seed).uniform(1, FACTOR, len(drawn))
    timed = [arrival._replace(time=arrival.time / rate) for arrival in drawn]
    pairs = zip(timed, known, factors, strict=True)
    loose = [a._replace(output_tokens=min(LONGEST, math.ceil(f * o.output_tokens))) for a, o, f in pairs]
    return {SAME: timed, WITHIN: loose}


def figures(outcomes: list[Outcome], known: list[Outcome], bound: float) -> dict[str, float]:
    """Figures of the run of one server.

    Args:
        outcomes: the outcomes of its requests.
        known: the outcomes of the same requests in the first run.
        bound: milliseconds from arrival to end that a request may take.
    """
    latency = summary(outcomes, {"e2e": bound})
    lengths = [outcome.output_tokens for outcome in known]
    return {
        "mean": latency["e2e"]["mean"],
        "p95": latency["e2e"]["p95"],
        "longest_wait": latency["ttft"]["max"],
        "within": latency["within_slo"],
        "bound": bound,
        "equal": sum(a.text == b.text for a, b in zip(outcomes, known, strict=True)) / len(known),
        "length_mean": float(np.mean(lengths)),
        "length_p50": float(np.median(lengths)),
        "length_p99": float(np.percentile(lengths, 99)),
    }
