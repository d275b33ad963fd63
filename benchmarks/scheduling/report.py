"""Tables of the scheduling simulation."""

from typing import Any

from entropic_jax.analysis.statistics import compared, mean, split

from ..harness.provenance import stamp
from ..harness.tables import Table

MEASURED_CODE = (
    "entropic_jax/control/scheduling.py",
    "entropic_jax/control/entropy_drop.py",
    "entropic_jax/control/length_prediction.py",
    "entropic_jax/analysis/queueing.py",
)
Rows = list[dict[str, Any]]
TITLES = {  # limits, telling, preemptive
    ("constant", False, True): "All requests state the same max_tokens; entropy says nothing of the length",
    ("loose", False, True): "max_tokens within a factor of the length; entropy says nothing of the length",
    ("constant", True, True): "The same max_tokens; the mean entropy rises with the logarithm of the length",
    ("loose", False, False): "Admission alone, max_tokens within a factor of the length",
    ("constant", False, False): "Admission alone, all requests state the same max_tokens",
    ("exact", False, False): "Admission alone, max_tokens is the length: the server's benchmark",
}


NOTES = (
    (
        "A simulation: one token of each served request per step, steps of one length, preemption and "
        "prompts free. It compares orders, not servers."
    ),
    (
        "Azure's traces: lengths drawn with the published statistics, those of the conversations scaled to a "
        "mean of 50 tokens; arrivals as a Poisson process. Prompt and answer are drawn independently, so the "
        "prompt says nothing of the answer."
    ),
    (
        "Shuffled: the policy sees the entropies of another request. Other calibration: fitted to lognormal "
        "lengths, whatever the workload."
    ),
    (
        "Learned: the policy `predicted` of the serving engine, a model of the latest 128 requests; see "
        "`entropic_jax.analysis.queueing.Learned`."
    ),
    "Predicted: highest Gittins index first, by `entropic_jax.control.length_prediction`, with its guard.",
)


def tables(results: dict[str, Any]) -> list[Table]:
    """A table for each kind of workload."""
    result_tables = []
    for (limits, telling, preemptive), group in split(
        [{**r, "tells": r["telling"] > 0} for r in results["rows"]], "limits", "tells", "preemptive"
    ):
        result_tables.append((TITLES[limits, telling, preemptive], *_grid(group)))
    return result_tables


def _grid(rows: Rows) -> tuple[list[str], list[list[str]]]:
    lines = []
    for (law,), group in split(rows, "law"):
        base = [r for r in group if r["policy"] == "fcfs"]
        for (policy,), selected in split(group, "policy"):
            change = compared(selected, base, "mean", "seed")
            ratio = lambda percent: 1 + percent / 100
            lines.append(
                [
                    law,
                    policy,
                    "1"
                    if policy == "fcfs"
                    else f"{ratio(change.mean):.2f} ({ratio(change.low):.2f} … {ratio(change.high):.2f})",
                    f"{mean(selected, 'p95') / mean(base, 'p95'):.2f}",
                    f"{mean(selected, 'longest_wait'):.0f}",
                ]
            )
    return ["lengths", "policy", "mean latency ÷ fcfs (95 %)", "p95 ÷ fcfs", "longest wait, steps"], lines


def notes(results: dict[str, Any]) -> list[str]:
    """The meaning of the figures, in words."""
    size = f"{results['count']} requests, {results['places']} places, load {results['load']:g}"
    return [f"{size}, {results['seeds']} seeds; the policies of a seed have the same requests.", *NOTES]


def stamps(results: dict[str, Any]) -> str:
    """Date and commit."""
    return stamp([results], MEASURED_CODE)
