"""What docs/stability.md says of the closed loop in generation, beside the raw measurements."""

import json
import re

import pytest

from benchmarks.harness.paths import ROOT
from benchmarks.publish.sections import REPORTS
from benchmarks.stability import report

RESULTS = json.loads(REPORTS["stability"][1][0].read_text("utf-8"))
PAGE = " ".join((ROOT / "docs" / "stability.md").read_text("utf-8").split())
CORRECTED = ("integral", "normalised", "exact")


def gap(law: str, field: str):
    return report.gap_of(RESULTS, law, field)


def test_the_printed_law_does_not_return():
    held = gap("H*: paper", "tempered_entropy")
    assert held.hysteresis.high < -3 and held.control.high < -2 and abs(held.noise.mean) < 0.2
    shown = rf"{-held.hysteresis.mean:.1f} nats lower .* {-held.control.mean:.1f} nats lower in a second"
    assert re.search(shown, PAGE)


def test_the_text_remembers_and_the_held_entropy_does_not():
    beliefs = [gap(f"H*: {law}", "entropy") for law in CORRECTED]
    assert all(belief.hysteresis.low > 0 > belief.noise.low for belief in beliefs)
    assert all(belief.noise.high > 0 and abs(belief.noise.mean) < 0.02 for belief in beliefs)
    for differences in ([b.hysteresis.mean for b in beliefs], [b.direction.mean for b in beliefs]):
        assert f"{min(differences):.2f} to {max(differences):.2f} nats" in PAGE
    assert beliefs[0].direction.low < 0 < min(b.direction.low for b in beliefs[1:])
    held = [gap(f"H*: {law}", "tempered_entropy").hysteresis.mean for law in CORRECTED]
    assert f"between {min(held):+.2f} and {max(held):+.2f} nats".replace("-", "−") in PAGE
    cooler = [-gap(f"H*: {law}", "temperature").hysteresis.mean for law in CORRECTED]
    assert f"by {min(cooler):.2f} to {max(cooler):.2f}" in PAGE


@pytest.mark.parametrize("name", ["ε_max: pruning", "ε_max: pruning, dead band 0.1"])
@pytest.mark.parametrize("field", ["dropped_mass_limit", "kept_fraction"])
def test_no_gap_of_pruning_is_seen(name, field):
    estimates = gap(name, field)
    assert estimates.hysteresis.low < 0 < estimates.hysteresis.high
    assert estimates.direction.low < 0 < estimates.direction.high


def test_contraction_along_text_depends_on_the_rate():
    lines = {row[0]: row for row in report.contraction(RESULTS)[2]}
    expanding = {law: float(row[2]) for law, row in lines.items()}
    assert expanding["integral, η 0.02"] == expanding["exact"] == 0
    assert expanding["paper, η 0.02"] > 50
    assert f"{expanding['integral, η 0.5']:.0f} % do" in PAGE
    distance = RESULTS["contraction"]["integral, η 0.5"]["distance"]
    assert sum(x > 1 for x in distance) > 1, "two runs part"
