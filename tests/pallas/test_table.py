"""The table of docs/kernels.md matches the stored results and has a row for every case."""

import json

import pytest

from benchmarks.harness.provenance import OLDER

from . import table


def stored():
    if not table.RESULTS.exists():
        pytest.skip("the table was not made: python -m tests.pallas.table")
    return json.loads(table.RESULTS.read_text("utf-8"))


def test_the_document_says_what_was_found():
    document = table.DOCUMENT.read_text("utf-8").replace(f" {OLDER}", "")
    assert table.table(stored(), table.on_hardware()).replace(f" {OLDER}", "") in document


def test_every_case_was_tried():
    expected = {(operation, case, column) for operation, case, column, _ in table.trials()}
    results = {
        (operation, case, column)
        for operation, cases in stored()["operations"].items()
        for case, cells in cases.items()
        for column in cells
    }
    assert results == expected


def test_what_became_of_a_trial():
    def declines():
        raise NotImplementedError("not today")

    def fails():
        raise ValueError("no\nmore")

    def exceeds():
        raise AssertionError("too much\nmore")

    verdicts = [table.attempt(x) for x in (lambda: None, declines, fails, exceeds)]
    assert verdicts == ["yes", "declines: not today", "fails: ValueError: no", "fails: too much"]
    verdict_of = dict(zip(("v4", "v5e", "sm_90a"), verdicts, strict=False))
    operations = {"sum": {"small": verdict_of, "other": {}}}
    run = {"date": "2026-01-02", "commit": "0123abc"}
    text = table.table({"run": run, "operations": operations}, {("sum", "other"): "yes: a chip"})
    assert "*Measured 2026-01-02, at commit `0123abc`" in text
    assert "| sum | small | – | yes | [1] | – | – | – | – | fails [2] | no |" in text
    assert "| sum | other | – | – | – | – | – | – | – | – | yes: a chip |" in text
    assert "- [1] declines: not today\n- [2] fails: ValueError: no\n" in text


def test_what_ran_on_hardware(tmp_path):
    cases = [
        {"operation": "decode", "case": "a", "verdict": "yes"},
        {"operation": "decode", "case": "b", "verdict": "fails: 3 times what is accepted"},
    ]
    stored = {"device": "a chip", "cases": cases}
    (tmp_path / "kernels-a-chip.json").write_text(json.dumps(stored))
    (tmp_path / "kernels-proof.json").write_text("{}")
    assert table.on_hardware(tmp_path) == {("decode", "a"): "yes: a chip"}
