"""Arrival times and lengths of requests: drawn from a distribution or read from a trace."""

import csv
import json
import math
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..request import RequestError

BLOCK = 512  # tokens of a named block in Mooncake's traces


class Arrival(NamedTuple):
    """A request that is to be sent."""

    time: float  # seconds from the start of the run
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # names of the prompt's blocks of BLOCK tokens; equal names, equal tokens


class Lengths(NamedTuple):
    """Published statistics of a distribution of lengths, in tokens."""

    median: float
    mean: float
    p99: float


class Published(NamedTuple):
    """Published statistics of a trace, enough to generate a similar one."""

    rate: float | None  # requests per second; None: not given, ask the user
    cv: float  # standard deviation of the gaps between arrivals, over their mean
    prompt: Lengths
    output: Lengths


# Azure's traces of 2023 (Patel et al., Splitwise, 2024).
PUBLISHED = {
    "azure-conversation": Published(5.5, 1.1, Lengths(1020, 1155, 4142), Lengths(129, 211, 601)),
    "azure-code": Published(None, 13.2, Lengths(1469, 2048, 7436), Lengths(13, 28, 251)),
}


def times(count: int, rate: float, cv: float, random: np.random.Generator) -> np.ndarray:
    """Times of arrivals, seconds, float64 `[count]`, the first at 0.

    The gaps follow a Gamma distribution with coefficient of variation `cv` (1: Poisson arrivals; 0: equal
    gaps). They are scaled so that the run lasts `count / rate` seconds; otherwise bursty runs would differ
    widely in rate.

    Args:
        count: how many arrivals.
        rate: their mean rate, 1/s.
        cv: coefficient of variation of the gaps: 1 for Poisson arrivals, 0 for a clock.
        random: source of the gaps.
    """
    if cv == 0:
        return np.arange(count) / rate
    gaps = random.gamma(1 / cv**2, size=count)
    gaps = gaps if gaps.sum() > 0 else np.ones(count)
    return np.concatenate([[0.0], np.cumsum(gaps)[:-1]]) * (count / rate / gaps.sum())


def draw_lengths(law: Lengths, count: int, random: np.random.Generator) -> np.ndarray:
    """Lengths whose median, mean and 99th percentile are those of the law, int64 `[count]`, at least 1.

    The logarithm is symmetric about its median: ln q(u) = ln p50 ± (ln p99 − ln p50)·min(s^κ, 1.2) with
    s = |2u − 1| / 0.98, where 1.2 bounds the longest hundredth. The only free parameter, κ, is fitted to the
    mean. Raises ValueError if no κ gives that mean.

    Args:
        law: median, mean and 99th percentile.
        count: how many lengths.
        random: source of the draws.
    """
    spread = math.log(law.p99 / law.median)

    def quantile(u: np.ndarray, power: float) -> np.ndarray:
        side = 2 * u - 1
        return law.median * np.exp(spread * np.sign(side) * np.minimum((np.abs(side) / 0.98) ** power, 1.2))

    grid = (np.arange(20_000) + 0.5) / 20_000
    low, high = 1e-3, 100.0
    if not quantile(grid, high).mean() <= law.mean <= quantile(grid, low).mean():
        raise ValueError(
            f"mean must be nearer to the median, {law.median:g}, with p99 {law.p99:g}; got {law.mean:g}"
        )
    for _ in range(60):
        power = math.sqrt(low * high)
        low, high = (power, high) if quantile(grid, power).mean() > law.mean else (low, power)
    return np.maximum(np.rint(quantile(random.random(count), low)), 1).astype(np.int64)


def drawn_like(name: str, count: int, rate: float | None, cv: float | None, seed: int) -> list[Arrival]:
    """Arrivals with the statistics of a published trace; `rate` and `cv` override those of the trace.

    Args:
        name: the name of a published trace.
        count: how many arrivals.
        rate: mean rate in 1/s, None for that of the trace.
        cv: coefficient of variation of the gaps, None for that of the trace.
        seed: the seed of times and lengths.
    """
    law = PUBLISHED[name]
    rate = rate or law.rate
    if rate is None:
        raise RequestError(f"--rate is required with --like {name}, whose rate is not published")
    random = np.random.default_rng(seed)
    return _together(
        times(count, rate, law.cv if cv is None else cv, random),
        draw_lengths(law.prompt, count, random),
        draw_lengths(law.output, count, random),
    )


def drawn(
    count: int, rate: float, cv: float, prompt: tuple[int, int], output: tuple[int, int], seed: int
) -> list[Arrival]:
    """Arrivals with lengths drawn uniformly between two bounds, both inclusive.

    Args:
        count: how many arrivals.
        rate: their mean rate, 1/s.
        cv: coefficient of variation of the gaps.
        prompt: bounds of a prompt's tokens.
        output: bounds of an answer's tokens.
        seed: the seed of times and lengths.
    """
    random = np.random.default_rng(seed)

    def between(bounds):
        return random.integers(bounds[0], bounds[1] + 1, count)

    return _together(times(count, rate, cv, random), between(prompt), between(output))


def _together(seconds: np.ndarray, prompts: np.ndarray, outputs: np.ndarray) -> list[Arrival]:
    columns = zip(seconds, prompts, outputs, strict=True)
    return [Arrival(float(time), int(prompt), int(output)) for time, prompt, output in columns]


def read_trace(path: Path, count: int | None = None, rate: float | None = None) -> list[Arrival]:
    """The requests of a trace, starting at time 0.

    Raises RequestError, which names the line.

    Args:
        path: Azure's CSV (columns TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake's JSONL (timestamp
            in milliseconds, input_length, output_length, hash_ids).
        count: how many requests, from the first; None for all.
        rate: mean rate in 1/s to which time is stretched; None leaves it.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            head = file.readline()
            file.seek(0)
            read = _mooncake if head.lstrip().startswith("{") else _azure
            arrivals = []
            for number, arrival in read(file, path):
                if not (arrival.prompt_tokens > 0 and arrival.output_tokens >= 0):
                    raise RequestError(f"{path}, line {number}: lengths must be above 0; got {arrival[1:3]}")
                arrivals.append(arrival._replace(output_tokens=max(arrival.output_tokens, 1)))
                if count is not None and len(arrivals) >= count:
                    break
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--trace {path}: {error}") from None
    if not arrivals:
        raise RequestError(f"--trace must hold at least one request; {path} has none")
    arrivals.sort(key=lambda arrival: arrival.time)
    first, last = arrivals[0].time, arrivals[-1].time
    if rate is not None and last == first:
        raise RequestError(
            f"--rate needs requests at different times; all of {path} arrive at one; got {rate:g}"
        )
    factor = 1.0 if rate is None else (len(arrivals) - 1) / rate / (last - first)
    return [arrival._replace(time=(arrival.time - first) * factor) for arrival in arrivals]


def _azure(file, path):
    for number, row in enumerate(csv.DictReader(file), 2):
        try:
            when = datetime.fromisoformat(row["TIMESTAMP"].strip()).timestamp()
            yield number, Arrival(when, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RequestError(
                f"{path}, line {number} must have the columns TIMESTAMP, ContextTokens, GeneratedTokens; "
                f"{_reason(error)}"
            ) from None


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _mooncake(file, path):
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            blocks = tuple(int(block) for block in row.get("hash_ids", ()))
            yield (
                number,
                Arrival(row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]), blocks),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RequestError(
                f"{path}, line {number} must be an object with timestamp, input_length, output_length and "
                f"hash_ids; {_reason(error)}"
            ) from None


def fitting_factor(arrivals: list[Arrival], context: int) -> float:
    """The largest factor, up to 1, with which all but the longest 1 % fit into `context` tokens."""
    totals = [arrival.prompt_tokens + arrival.output_tokens for arrival in arrivals]
    return min(1.0, context / float(np.quantile(totals, 0.99)))


def scaled(arrivals: list[Arrival], factor: float, context: int | None) -> list[Arrival]:
    """Lengths times a factor, at least 1 token. The prompt, then the output, is cut to fit into `context`.

    Args:
        arrivals: the arrivals to scale.
        factor: the factor of all lengths.
        context: tokens that prompt and answer have room for; None for any number.
    """
    result = []
    for arrival in arrivals:
        prompt = max(1, round(arrival.prompt_tokens * factor))
        output = max(1, round(arrival.output_tokens * factor))
        if context is not None:
            output = min(output, context - 1)
            prompt = min(prompt, context - output)
        result.append(arrival._replace(prompt_tokens=prompt, output_tokens=output))
    return result
