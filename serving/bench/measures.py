"""Figures of a run: latencies, throughput, goodput and errors. Times are in milliseconds."""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from ..request import RequestError
from .client import Outcome

LEVELS = (50, 90, 95, 99)
# Latencies of a request; an SLO uses the same names.
LATENCIES = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2e": "end to end",
}


def first_token(outcome: Outcome) -> float | None:
    """Milliseconds from when the request was due to its first token."""
    return 1000 * (outcome.chunks[0][0] - outcome.due) if outcome.chunks else None


def pauses(outcome: Outcome) -> list[float]:
    """Milliseconds between one chunk of text and the next, as a reader sees them."""
    times = [when for when, _ in outcome.chunks]
    return [1000 * (b - a) for a, b in pairwise(times)]


def per_token(outcome: Outcome) -> float | None:
    """Milliseconds per token after those of the first chunk."""
    later = outcome.output_tokens - outcome.chunks[0][1] if outcome.chunks else 0
    return 1000 * (outcome.chunks[-1][0] - outcome.chunks[0][0]) / later if later > 0 else None


def end_to_end(outcome: Outcome) -> float:
    """Milliseconds from when the request was due to its end."""
    return 1000 * (outcome.ended - outcome.due)


def distribution(values: Iterable[float | None]) -> dict[str, float] | None:
    """Count, mean, p50, p90, p95, p99, minimum and maximum; None if there are no values."""
    present = np.array([value for value in values if value is not None], float)
    if not present.size:
        return None
    figures = {"count": present.size, "mean": float(present.mean())}
    figures |= {f"p{level}": float(np.percentile(present, level)) for level in LEVELS}
    return figures | {"min": float(present.min()), "max": float(present.max())}


def parse_slo(text: str) -> dict[str, float]:
    """`ttft:500 itl:50 e2e:2000` (milliseconds) as a mapping. Raises RequestError."""
    bounds: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        name, _, value = part.partition(":")
        try:
            bounds[name] = float(value)
            if name not in LATENCIES or not bounds[name] > 0:
                raise ValueError
        except ValueError:
            raise RequestError(
                f"--slo must be NAME:MILLISECONDS, NAME one of {', '.join(LATENCIES)}; got {part}"
            ) from None
    return bounds


def meets(outcome: Outcome, slo: Mapping[str, float]) -> bool:
    """Whether a request was completed within every bound; `itl` bounds the p99 of its pauses."""
    if outcome.error or not outcome.chunks:
        return False
    gaps = pauses(outcome)
    figures = {
        "ttft": first_token(outcome),
        "itl": float(np.percentile(gaps, 99)) if gaps else None,
        "tpot": per_token(outcome),
        "e2e": end_to_end(outcome),
    }
    return all((value := figures[name]) is None or value <= bound for name, bound in slo.items())


def summary(outcomes: list[Outcome], slo: Mapping[str, float] | None = None) -> dict[str, Any]:
    """All figures of one run.

    Latencies and throughput are those of completed requests. A run lasts from the time at which the first
    request was due to the end of the last. `late` is how late a request was sent.
    If that is not small against the latencies, the client was the bottleneck.
    """
    good = [outcome for outcome in outcomes if outcome.error is None]
    seconds = max(o.ended for o in outcomes) - min(o.due for o in outcomes)
    prompt, output = sum(o.prompt_tokens for o in good), sum(o.output_tokens for o in good)
    chunks = sum(len(o.chunks) for o in good)
    figures: dict[str, Any] = {
        "seconds": seconds,
        "requests": len(outcomes),
        "completed": len(good),
        "errors": dict(Counter(o.error for o in outcomes if o.error)),
        "short": sum(o.output_tokens < o.requested_tokens for o in good),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "tokens_per_chunk": output / chunks if chunks else None,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": output / seconds,
        "total_tokens_per_second": (prompt + output) / seconds,
        "ttft": distribution(first_token(o) for o in good),
        "itl": distribution(gap for o in good for gap in pauses(o)),
        "tpot": distribution(per_token(o) for o in good),
        "e2e": distribution(end_to_end(o) for o in good),
        "late": distribution(1000 * (o.sent - o.due) for o in outcomes),
    }
    details = {o.error: o.detail for o in reversed(outcomes) if o.error}
    if details:
        figures["error_examples"] = details
    if slo:
        within = sum(meets(outcome, slo) for outcome in outcomes)
        figures["slo"] = dict(slo)
        figures["goodput"] = within / seconds
        figures["within_slo"] = within / len(outcomes)
    return figures


# Figures that `--compare` compares: name, path in the summary, whether more is better.
COMPARED = (
    ("requests/s", ("requests_per_second",), True),
    ("output tokens/s", ("output_tokens_per_second",), True),
    ("goodput, requests/s", ("goodput",), True),
    *(
        (f"{name} {level}, ms", (name, level), False)
        for name in LATENCIES
        for level in ("mean", "p50", "p95", "p99")
    ),
)


def pick(figures: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    """A figure of a summary by its path; None if it is absent."""
    value: Any = figures
    for name in path:
        value = value.get(name) if value else None
    return value


def compared(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians of both servers for each figure, and ratios (first over second) of the paired runs."""
    rows = []
    for name, path, more in COMPARED:
        pairs = [(pick(a, path), pick(b, path)) for a, b in zip(first, second, strict=True)]
        usable = [(a, b) for a, b in pairs if a is not None and b]
        if usable:
            ratios = [a / b for a, b in usable]
            rows.append(
                {
                    "figure": name,
                    "more_is_better": more,
                    "first": float(np.median([a for a, _ in usable])),
                    "second": float(np.median([b for _, b in usable])),
                    "ratio": float(np.median(ratios)),
                    "lowest": min(ratios),
                    "highest": max(ratios),
                }
            )
    return rows
