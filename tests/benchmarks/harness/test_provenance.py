"""Stamps: date and commit of a run, and whether the code has changed since."""

import subprocess

import pytest

from benchmarks.harness import provenance
from benchmarks.harness.provenance import OLDER, current_commit, file_slug, stamp

MEASURED = ("benchmarks/harness/paths.py",)


@pytest.fixture
def unchanged(monkeypatch):
    monkeypatch.setattr(provenance, "changed_since", lambda commit, paths: False)
    monkeypatch.setattr(provenance, "is_unknown", lambda commit: False)


def test_a_stamp_has_date_and_commit(unchanged):
    exact = stamp([{"date": "2026-01-01", "commit": "0123abc"}], MEASURED)
    assert exact == "Measured 2026-01-01, at commit `0123abc`."
    recorded = [{"date": "2026-01-02", "recorded_in": x} for x in ("4567def", "89abcde", "4567def")]
    both = stamp(recorded, MEASURED)
    assert both == "Measured 2026-01-02, recorded in commits `4567def` and `89abcde`."


def test_an_unknown_or_changed_commit_is_said_to_be_older(monkeypatch, unchanged):
    assert stamp([{"date": "2026-01-01"}], MEASURED) == (
        f"Measured 2026-01-01, recorded before commits were noted. {OLDER}"
    )
    modified = stamp([{"date": "2026-01-01", "commit": "0123abc with uncommitted changes"}], MEASURED)
    assert modified == f"Measured 2026-01-01, at commit `0123abc` with uncommitted changes. {OLDER}"
    monkeypatch.setattr(provenance, "changed_since", lambda commit, paths: True)
    assert stamp([{"date": "2026-01-01", "commit": "0123abc"}], MEASURED).endswith(OLDER)


def test_a_commit_that_the_history_lacks_is_said_to_be_older(monkeypatch, unchanged):
    assert not stamp([{"date": "2026-01-01", "commit": "0123abc"}], MEASURED).endswith(OLDER)
    monkeypatch.setattr(provenance, "is_unknown", lambda commit: True)
    line = stamp([{"date": "2026-01-01", "commit": "0123abc"}], MEASURED)
    assert line.endswith(OLDER) and "`0123abc` (not in this history)" in line
    monkeypatch.undo()
    assert not provenance.is_unknown("HEAD")


def test_comments_and_docstrings_are_no_code(monkeypatch, tmp_path):
    shown = 'def f(x):\n    """Doubles x."""\n    return 2 * x  # twice\n'
    (tmp_path / "f.py").write_text("def f(x):\n    return (\n        2 * x\n    )\n")
    (tmp_path / "g.py").write_text("def f(x):\n    return 3 * x\n")
    (tmp_path / "f.json").write_text("{}")

    def git(*arguments):
        paths = "\n".join(arguments[arguments.index("--") + 1 :]) if "--" in arguments else shown
        return subprocess.CompletedProcess(arguments, 0, paths, "")

    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(provenance, "_git", git)
    provenance._code_differs.cache_clear()
    assert provenance.changed_since("0123abc", ["f.py"]) is False
    for path in ("g.py", "f.json", "absent.py"):
        assert provenance.changed_since("0123abc", ["f.py", path]) is True
    provenance._code_differs.cache_clear()


def test_a_commit_that_is_not_there_is_no_answer():
    assert provenance.changed_since("0" * 40, MEASURED) is None
    commit = current_commit()
    assert commit is None or len(commit.partition(" ")[0]) >= 7


def test_names_of_files():
    assert file_slug("Intel(R) Xeon(R) Processor") == "intel-xeon-processor"
