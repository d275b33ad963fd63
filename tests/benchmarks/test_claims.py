"""Sentences of README and of the summary of results beside the raw measurements that they report."""

import json
import re

import pytest

from benchmarks.harness.paths import PAGES, RESULTS, ROOT

README, SUMMARY = ROOT / "README.md", PAGES / "index.md"


def sentences(page, *words: str) -> list[str]:
    """The list items and paragraphs of a page that have all of these words, each on one line."""
    parts = re.split(r"\n(?=- |\n)", page.read_text("utf-8"))
    joined = (" ".join(part.split()) for part in parts)
    return [part for part in joined if all(word in part for word in words)]


def solved(sampler: str) -> float:
    """Tasks that a sampler solved, per cent."""
    rows = json.loads((RESULTS / "sampling-amd-epyc.json").read_text("utf-8"))["tasks"]
    outcomes = [outcome for row in rows if row["sampler"] == sampler for outcome in row["solved"]]
    return round(100 * sum(outcomes) / len(outcomes), 1)


@pytest.mark.parametrize("page", [README, SUMMARY], ids=lambda page: page.name)
def test_tasks_solved_are_those_measured_and_stand_beside_plain_sampling(page):
    (text,) = sentences(page, "`micro` solve")
    figures = [float(x) for x in re.findall(r"(\d+\.\d) (?=%|against)", text)]
    for sampler in ("micro", "T 1", "min-p 0.1"):
        assert solved(sampler) in figures, sampler
    assert "intervals overlap" in text


@pytest.mark.parametrize("page", [README, SUMMARY], ids=lambda page: page.name)
def test_a_speed_of_random_weights_is_no_speed_of_the_model_whose_answers_are_counted(page):
    for text in sentences(page, "EntropyInfer"):
        if re.search(r"times (faster|as fast)|×", text):
            assert "random weights" in text and "different models" in text
    assert sentences(page, "compress", "67 to 0 %"), "questions asked after compression"
