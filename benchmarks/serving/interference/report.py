"""Tables of the interference benchmark."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...harness.provenance import stamp
from ...harness.tables import Table
from .measure import FIRST_TOKEN, HARD_SCHEMAS, LONG_PROMPT, LONG_TEXTS, PAUSE, SHORT_PROMPT, SHORT_TEXT

MEASURED_CODE = (
    "serving/engine",
    "serving/http/worker_pools.py",
    "serving/engine/grammar_check.py",
    "entropic_jax",
    "models",
)
TARGET = 3.0  # times the latency without interference
CHUNKED, UNCHUNKED = "chunked prefill", "whole prompts"  # the arms


def level(values: Sequence[float], percent: float) -> float:
    """A percentile; NaN without values."""
    return float(np.percentile(values, percent)) if len(values) else float("nan")


def verdicts(results: dict[str, Any]) -> list[tuple[str, bool, str]]:
    """Each target, whether it held, and the figures."""
    measured = results["arms"][CHUNKED]
    alone, beside = level(measured["alone"], 95), level(measured["beside"], 95)
    p50, p99 = (level(measured["pauses during prefill"], percent) for percent in (50, 99))
    return [
        (
            f"p95 of a small request beside hard input within {TARGET:g} times of it alone",
            beside <= TARGET * alone,
            f"{beside:.1f} and {alone:.1f} ms, {beside / alone:.2f} times",
        ),
        (
            f"p99 of the pauses of a text while others are prefilled within {TARGET:g} times of their p50",
            p99 <= TARGET * p50,
            f"{p99:.1f} and {p50:.1f} ms, {p99 / p50:.2f} times",
        ),
    ]


def _statuses(answers: dict[str, dict[str, int]]) -> str:
    """How many requests of each kind were answered with each status.

    >>> _statuses({"schemas": {"400": 5}, "texts": {"200": 28, "429": 2}})
    'schemas: 5 × 400; texts: 28 × 200, 2 × 429'
    """
    of_kind = lambda counts: ", ".join(f"{count} × {status}" for status, count in counts.items())
    return "; ".join(f"{kind}: {of_kind(counts)}" for kind, counts in answers.items())


def tables(results: dict[str, Any]) -> list[Table]:
    """Latencies of small requests, and of texts while long prompts are prefilled, in milliseconds."""
    arms = results["arms"]
    cells = lambda values: [str(len(values)), *(f"{level(values, p):.1f}" for p in (50, 95, 99))]
    header = ["count", "p50", "p95", "p99"]
    shown: list[Table] = []
    if "alone" in (measured := arms.get(CHUNKED, {})):
        answers = measured["hard input"]
        small = [["alone", *cells(measured["alone"]), ""]]
        small += [["beside hard input", *cells(measured["beside"]), _statuses(answers)]]
        shown.append(("Milliseconds of a small request", ["", *header, "answers to hard input"], small))
    kinds = ("pauses during prefill", "other pauses", "first token", "long prompts")
    rows = [[name, kind, *cells(arm[kind])] for name, arm in arms.items() for kind in kinds]
    shown.append((f"Milliseconds beside prompts of {LONG_PROMPT} tokens", ["prefill", "", *header], rows))
    rate = results["rates"]["short"]
    goodput = [
        [
            name,
            f"{rate * arm['within bounds']:.2f} of {rate:g}",
            f"{level(arm['pauses during prefill'], 99) / level(arm['pauses during prefill'], 50):.2f}",
            ", ".join(f"{count} × {kind}" for kind, count in arm["failed"].items()) or "none",
        ]
        for name, arm in arms.items()
    ]
    header = ["prefill", "texts a second within the bounds", "p99 ÷ p50 of pauses during prefill", "failures"]
    return [*shown, ("Goodput beside long prompts", header, goodput)]


def notes(results: dict[str, Any]) -> list[str]:
    """Notes below the tables."""
    rates = results["rates"]
    setting = f"{results['cpu']}, {results['date']}. Client and server share the cores. Each measurement "
    setting += (
        f"{results['seconds']:g} s, with arrivals at fixed times; latencies count from when each is due."
    )
    small = f"Small requests: 8 tokens of prompt and one of text, {rates['small']:g} a second. Hard input: "
    small += f"{HARD_SCHEMAS} schemas, all refused, and {LONG_TEXTS} texts of a million characters to "
    small += "tokenize, in flight all the time."
    texts = f"Texts: {SHORT_PROMPT} tokens of prompt and {SHORT_TEXT} of streamed text, {rates['short']:g} a "
    texts += (
        f"second, beside {rates['long']:g} prompts of {LONG_PROMPT} tokens a second. A pause is the time "
    )
    texts += (
        "between two pieces of a text, which may be several tokens. It counts as one during prefill if a "
    )
    texts += "long prompt was in work at any time of it."
    bounds = f"Bounds: first token within {FIRST_TOKEN:g} ms, 99 % of a text's pauses within {PAUSE:g} ms."
    held = verdicts(results) if "beside" in results["arms"].get(CHUNKED, {}) else []
    ends = [f"{'Held' if kept else 'MISSED'}: {text} ({figures})." for text, kept, figures in held]
    return [setting, small, texts, bounds, *ends]


def stamps(results: dict[str, Any]) -> str:
    """Date and commit of the run."""
    return stamp([results], MEASURED_CODE)
