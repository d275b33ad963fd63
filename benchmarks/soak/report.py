"""Tables of the soak test: what had to hold, and the requests by kind."""

import statistics
from collections import Counter
from typing import Any

from ..harness.provenance import stamp
from ..harness.tables import Table

MEASURED_CODE = ("serving", "entropic_jax", "models")
GROWTH = 0.05  # of memory, allowed


def memory_growth(memory: list[tuple[int, float]], count: int) -> float:
    """Growth of the median memory from the second fifth of the requests to the last tenth."""
    early = [size for n, size in memory if 0.2 * count <= n <= 0.4 * count]
    late = [size for n, size in memory if n > 0.9 * count]
    return statistics.median(late) / statistics.median(early) - 1 if early and late else float("nan")


def verdicts(results: dict[str, Any]) -> list[tuple[str, bool, str]]:
    """Each requirement, whether it held, and the figures."""
    run, after, restart = results["run"], results["run"]["after"], results["crash"]
    free = after["pages_free"] + after.get("prefix_pages", 0)
    total, timed_out = sum(run["sent"].values()), sum(run["timed_out"].values())
    seconds = run["seconds"]
    return [
        (
            "no wrong answer, no lost request",
            not run["failures"],
            f"{len(run['failures'])} of {total}; {timed_out} timed out",
        ),
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


def tables(results: dict[str, Any]) -> list[Table]:
    """The verdicts and the kinds as tables."""
    verdict_rows = [
        [requirement, "yes" if right else "NO", figures] for requirement, right, figures in verdicts(results)
    ]
    wrong = Counter(name for name, _ in results["run"]["failures"])
    timed_out = results["run"]["timed_out"]
    kinds = [
        [k, str(n), str(timed_out.get(k, 0)), str(wrong[k])]
        for k, n in sorted(results["run"]["sent"].items())
    ]
    return [
        ("Soak", ["requirement", "held", "figures"], verdict_rows),
        ("Requests of the soak", ["kind", "sent", "timed out", "failed"], kinds),
    ]


def notes(results: dict[str, Any]) -> list[str]:
    """The machine, and how the server was started."""
    return [f"{results['cpu']}, {results['date']}. Server: `{results['server']}`."]


def stamps(results: dict[str, Any]) -> str:
    """Date and commit, the same for all tables."""
    return stamp([results], MEASURED_CODE)
