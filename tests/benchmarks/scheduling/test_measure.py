"""The scheduling benchmark: controls differ in what they see; stored results support what the page says."""

import json

import numpy as np
import pytest

from benchmarks.harness.paths import RESULTS
from benchmarks.scheduling import measure, report
from benchmarks.scheduling.workload import LAWS, LIGHT, draw_requests, stated_limits


def test_a_quick_run_has_every_policy_on_the_same_requests():
    condition = next(measure.conditions(True))
    rows = measure.measure(condition, 0, 12)
    assert [r["policy"] for r in rows] == list(condition.policies)
    assert min(rows, key=lambda r: r["mean"])["mean"] > 0
    tables = report.tables({"rows": rows + measure.measure(condition, 1, 12)})
    assert all(len(line) == len(head) for _, head, lines in tables for line in lines)


@pytest.mark.parametrize("law", LAWS)
def test_limits_are_never_below_the_length(law):
    requests = draw_requests(law, 50, 8, 1.1, 0)
    for kind in ("constant", "loose", "exact"):
        limits = stated_limits(requests.length, kind, np.random.default_rng(0))
        assert (limits >= requests.length).all()
    assert (np.diff(requests.arrival) >= 0).all() and (requests.entropy >= 0).all()


def test_every_conclusion_has_its_control_and_the_guard_holds():
    rows = json.loads((RESULTS / "scheduling-simulation.json").read_text())["rows"]
    mean = {}
    for row in rows:
        key = (row["law"], row["limits"], row["telling"] > 0, row["preemptive"], row["policy"])
        mean.setdefault(key, []).append(row["mean"])
    for (law, limits, tells, preemptive, policy), values in mean.items():
        base = mean[law, limits, tells, preemptive, "fcfs"]
        ratio = float(np.exp(np.mean(np.log(values) - np.log(base))))
        if policy.startswith(("predicted", "learned")) and law in LIGHT:
            assert ratio <= 1.05, (law, limits, policy)
        if policy == "entropic":
            assert (law, limits, tells, preemptive, "entropic, shuffled") in mean
            if not tells and law in LIGHT:
                assert ratio > 1.2
