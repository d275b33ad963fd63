"""Tables of the benchmark of temperature laws."""

from typing import Any

import numpy as np

from entropic_jax.analysis.statistics import Estimate, estimate
from entropic_jax.models.train.recall import interval

from ...harness.provenance import stamp
from ...harness.tables import Table
from ..report import per_cent
from .measure import LAW, REFERENCES

MEASURED_CODE = ("entropic_jax/control", "entropic_jax/sampling", "models")


def answers(results: dict[str, Any]) -> Table:
    """The temperature law beside plain sampling, min-p and its controls, on the same tasks."""
    samplers = results["samplers"]
    solved = {name: np.array(outcome["solved"], float) for name, outcome in samplers.items()}
    best = max(REFERENCES, key=lambda name: solved[name].mean())
    lines = []
    for name, outcome in samplers.items():
        against = [estimate((100 * (solved[name] - solved[base])).tolist()) for base in (best, LAW)]
        cells = ["" if base == name else signed(e) for e, base in zip(against, (best, LAW), strict=True)]
        lines.append(
            [
                name,
                per_cent(list(solved[name])),
                *cells,
                f"{outcome['temperature']:.3f}",
                f"{outcome['entropy']:.3f}",
            ]
        )
    head = ["sampler", "pass@1, % (95 %)", f"− {best}, points", f"− {LAW}, points", "mean T", "mean H_T"]
    return "Temperature laws and controls, the same tasks", head, lines


def signed(e: Estimate) -> str:
    """A difference with the ends of its interval."""
    return f"{e.mean:+.1f} ({e.low:+.1f} … {e.high:+.1f})".replace("-", "−")


def free_texts(results: dict[str, Any]) -> Table:
    """Free texts of the samplers of `answers`."""
    lines = []
    for name, text in results["texts"].items():
        distinct = estimate(text["distinct_4"])
        low, high = interval(sum(text["loops"]), len(text["loops"]))
        lines.append(
            [
                name,
                f"{distinct.mean:.3f} ({distinct.low:.3f} … {distinct.high:.3f})",
                f"{100 * np.mean(text['loops']):.0f} ({100 * low:.0f} … {100 * high:.0f})",
                f"{text['divergence']:.3f}",
                f"{text['temperature']:.3f}",
                f"{text['entropy']:.3f}",
            ]
        )
    head = [
        "sampler",
        "distinct-4 (95 %)",
        "loops, % (95 %)",
        "bigram divergence, nats",
        "mean T",
        "mean H_T",
    ]
    return "Temperature laws and controls, free text", head, lines


def tables(results: dict[str, Any]) -> list[Table]:
    """The tables."""
    return [answers(results), free_texts(results)]


def notes(results: dict[str, Any]) -> list[str]:
    """The meaning of the figures, in words."""
    texts = len(results["texts"][LAW]["loops"])
    return [
        f"{len(results['kinds'])} tasks and {texts} texts, the same for all: differences are paired.",
        "Relative: `benchmarks/sampling/temperature/relative.py`, a law that the package does not have.",
        "Shuffled: each row has the temperature and limit that were decided for another row of the batch.",
        "Constant: the mean temperature and the mean limit of the law.",
        "Bigram divergence: Jensen–Shannon, nats, from held-out text of the same length.",
    ]


def stamps(results: dict[str, Any]) -> str:
    """Date and commit, the same for all tables."""
    return stamp([results], MEASURED_CODE)
