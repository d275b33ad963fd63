"""The ablation benchmark runs end to end, resumes after an interruption, and fills every table."""

import json

import pytest
from rich.console import Console

from benchmarks.ablation import __main__ as command
from benchmarks.ablation import plot, report, summary_tables
from benchmarks.ablation.measure import STUDIES
from benchmarks.harness import paths
from benchmarks.harness.publishing import publish


@pytest.fixture
def run(tmp_path, shallow, monkeypatch):
    """A quick run with further options, and the entries of its file."""
    file = tmp_path / "found.jsonl"

    def benchmark(*arguments: str) -> list[dict]:
        command_line = ["ablation", "--quick", "--model", str(shallow), "--output", str(file), *arguments]
        monkeypatch.setattr("sys.argv", command_line)
        command.main()
        return [json.loads(line) for line in file.read_text().splitlines()]

    return benchmark


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_what_is_measured_is_not_measured_again(run):
    first = run("--studies", "speed")
    assert [entry.get("study") for entry in first] == [None, "speed"]
    assert run("--studies", "speed") == first


@pytest.mark.exhaustive
@pytest.mark.standard_promotion
def test_a_quick_run_fills_every_table(run, tmp_path, monkeypatch, capsys):
    file = tmp_path / "found.jsonl"
    first = run("--studies", "speed")
    uninterrupted = run()
    assert uninterrupted[:2] == first and {e["study"] for e in uninterrupted[1:]} == set(STUDIES)
    assert run() == uninterrupted  # everything is there: nothing is measured again

    results = report.load(file)
    titles = [title for title, _, lines in report.tables(results) if lines]
    assert len(titles) == len(STUDIES) + 3  # the targets, the paper's table, super-additivity
    for title, head, lines in report.tables(results):
        assert all(len(line) == len(head) for line in lines), title
    text = capsys.readouterr().out
    assert "Targets of `full-lossy`" in text and "Recall" in text

    pytest.importorskip("matplotlib")
    monkeypatch.setattr(paths, "PAGES", tmp_path)
    publish("ablation", report, results, True, Console(quiet=True))
    plot.draw(results, tmp_path / plot.FILE)
    page = (tmp_path / "ablation.md").read_text()
    assert "<!-- ablation: written by benchmarks.ablation -->" in page
    assert page.count("*Measured ") == len(titles)
    assert (tmp_path / "selectors.svg").read_text().startswith("<?xml")


def test_targets_are_compared_with_measurements():
    speed = [
        {"preset": name, "context": 7976, "turn": t, "milliseconds": ms}
        for t in range(3)
        for name, ms in (("off", 2.0), ("full-lossy", 1.1))
    ]
    quality = [
        {"preset": name, "context": 8184, "seed": 0, "bits_per_byte": b}
        for name, b in (("off", 1.0), ("meso-lossy", 1.02))
    ]
    informed = [
        {"preset": name, "context": 8184, "efficiency": e}
        for name, e in (("off", 10.0), ("meso-lossy", 16.0))
    ]
    _, _, lines = summary_tables.targets({"speed": speed, "quality": quality, "information": informed})
    assert [(line[1], line[2], line[3]) for line in lines] == [
        ("≤ 0.6", "0.55", "yes"),
        ("≥ 1.7", "1.82", "yes"),
        ("≤ 1", "2.00", "no"),
        ("≥ 1.7", "1.60", "no"),
    ]
