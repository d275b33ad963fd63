"""Rules of page selection are varied one at a time, and every rule that can be chosen has an arm."""

import dataclasses
from typing import get_args

from benchmarks.ablation import page_rules, study_tables
from entropic_jax.attention.page_selection import Information, Selection
from entropic_jax.methods.presets import FINE_PAGES


def differing(policy: Selection) -> set[str]:
    """The settings in which a page policy differs from the shipped one; rules count as part of the size."""
    names = {f.name for f in dataclasses.fields(policy)}
    changed = {name for name in names if getattr(policy, name) != getattr(FINE_PAGES, name)}
    return changed - {"rules"} if "page_size" in changed else changed


def test_an_arm_differs_in_one_thing():
    arms = page_rules.arms()
    assert arms.pop(page_rules.SHIPPED) == FINE_PAGES
    changed = {name: differing(policy) for name, policy in arms.items()}
    assert all(len(names) == 1 for names in changed.values()), changed
    assert set().union(*changed.values()) == {"information", "first_layer_scale", "page_size"}


def test_every_weight_of_pages_has_an_arm():
    assert {policy.information for policy in page_rules.arms().values()} == {*get_args(Information)}


def test_larger_pages_keep_the_same_least_positions():
    for policy in (page_rules.wider(32), page_rules.wider(64)):
        for name in ("sink_pages", "recent_pages", "min_pages"):
            least, shipped = (getattr(x.rules, name) * x.page_size for x in (policy, FINE_PAGES))
            assert shipped <= least < shipped + policy.page_size


def test_the_table_compares_with_dense_attention():
    rows = [
        {
            "arm": name,
            "limit": limit,
            "seed": seed,
            "kept": 0.2,
            "bytes_read": 30e6,
            "bits_per_byte": bits,
            "right": right,
            "questions": 16,
        }
        for seed in (0, 1)
        for name, limit, bits, right in (("dense", 0.0, 1.0, 1.0), ("as shipped", 0.02, 1.01, 0.75))
    ]
    _, head, lines = study_tables.page_rules(rows)
    assert all(len(line) == len(head) for line in lines)
    assert [(line[1], line[-1]) for line in lines] == [("dense", "32 of 32"), ("as shipped", "24 of 32")]
    assert lines[1][5].startswith("+1.00")
