"""Guards are varied one at a time, on the same pages; what was withdrawn says so."""

import dataclasses

import pytest

from benchmarks.ablation import guards, report, study_tables
from benchmarks.publish.sections import ABLATION
from entropic_jax.methods.presets import FINE_PAGES, Gains, pruning_law


def differing(arm: guards.Arm, base: guards.Arm) -> set[str]:
    """The names of the settings in which two arms differ."""
    laws = {
        f.name for f in dataclasses.fields(arm.law) if getattr(arm.law, f.name) != getattr(base.law, f.name)
    }
    rules = {
        name
        for name in arm.pages.rules._fields
        if getattr(arm.pages.rules, name) != getattr(base.pages.rules, name)
    }
    others = dataclasses.replace(arm.pages, rules=base.pages.rules) != base.pages
    return (
        laws
        | rules
        | ({"pages"} if others else set())
        | ({"T_cal"} if arm.belief_temperature != base.belief_temperature else set())
    )


def test_every_arm_differs_from_the_first_in_one_guard():
    arms = guards.arms(pruning_law(Gains()), 1.1, 2.0)
    changed = {name: differing(arm, arms[guards.BASE]) for name, arm in arms.items()}
    assert changed.pop(guards.BASE) == set() and arms[guards.BASE].pages == FINE_PAGES
    assert changed.pop("no guard of ε") == {"patience", "rate", "smoothing"}
    assert all(len(names) == 1 for names in changed.values()), changed
    assert {name for names in changed.values() for name in names} == {
        *("entropy_floor", "entropy_error", "T_cal", "patience", "rate", "smoothing"),
        *("recent_pages", "sink_pages", "min_pages"),
    }


def test_the_table_compares_arms_in_the_same_condition():
    rows = [
        {"arm": arm, "scale": scale, "bias": 0.0, "limit": 0.3, "seed": seed, "dense": 1.0, "kept": 0.5}
        | {"bits_per_byte": bits + 0.1 * (scale == 2), "unsteady": 0.0}
        for scale in (1, 2)
        for seed in (0, 1)
        for arm, bits in ((guards.BASE, 1.02), ("rate 1", 1.03))
    ]
    _, head, lines = study_tables.guards(rows)
    assert [line[1] for line in lines] == [guards.BASE, "rate 1"] and all(
        len(line) == len(head) for line in lines
    )
    assert lines[0][4] == "" and lines[1][4].startswith("+0.9")


def test_a_withdrawn_table_says_so():
    stamps = report.stamps(report.load(ABLATION))
    for title, reason in report.WITHDRAWN.items():
        assert stamps[title].endswith(f"Withdrawn: {reason}")


@pytest.mark.parametrize("name", report.WITHDRAWN)
def test_what_is_withdrawn_exists(name):
    assert name in {title for title, _, _ in report.tables(report.load(ABLATION))}
