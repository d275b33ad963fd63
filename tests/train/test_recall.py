"""Recall windows contain the stated facts, distances and answers."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from entropic_jax.models.train import recall, scoring, tasks


@pytest.fixture(scope="module")
def filler(texts: list[str], tokenizer: Tokenizer) -> recall.Filler:
    return recall.Filler(texts, tokenizer)


def test_filler_counts_the_tokens_of_its_lines(filler: recall.Filler, texts: list[str]):
    assert "".join(filler.lines) == "".join(texts)
    assert filler.total[-1] == sum(map(filler.count, texts))
    rng = np.random.default_rng(0)
    for tokens in (0, 50, 900):
        lines = filler.stretch(rng, tokens)
        assert tokens - 60 <= filler.count("".join(lines)) <= tokens + 3


def test_too_little_filler_is_an_error(filler: recall.Filler):
    with pytest.raises(ValueError, match="tokens of filler"):
        filler.stretch(np.random.default_rng(0), 10**6)


@pytest.mark.parametrize("distance", [128, 2048, 8000])
def test_questions_stand_at_their_distance(distance: int, filler: recall.Filler):
    tokenizer = filler.tokenizer
    for number in range(5):
        tokens, answers = recall.make_window(np.random.default_rng(number), distance, filler)
        assert len(tokens) - 1 <= scoring.LENGTHS[-1]
        assert tokens[0] == 0
        assert set(answers) == set(tasks.KINDS)
        # The small vocabulary of the test makes facts long: near the end of the context they do not fit.
        assert answers["needle"].distance == pytest.approx(distance, abs=120 if distance < 8000 else 700)
        for kind, answer in answers.items():
            text = tokenizer.decode(list(tokens[answer.positions]))
            above = tokenizer.decode(list(tokens[: answer.positions[0] - answer.distance]))
            if kind == "variable":  # the statement ends with names; the value stands before them
                assert f"= {text.rsplit(' == ')[-1]}" in above
            else:
                assert text.strip() in above


def test_interval_is_wilsons():
    low, high = recall.interval(38, 40)
    assert (round(low, 4), round(high, 4)) == (0.8350, 0.9862)
    assert recall.interval(0, 10)[0] == 0.0
    assert recall.interval(10, 10)[1] == pytest.approx(1.0)


class Oracle:
    """Scores windows as a model that knows every answer up to a distance, and nothing else."""

    def __init__(self, known: int):
        self.known = known

    def __call__(self, windows, advance):
        advance(len(windows), len(windows))
        return [
            scoring.Scores(np.zeros(len(w) - 1), np.full(len(w) - 1, len(w) <= self.known)) for w in windows
        ]


def test_measure_counts_right_answers_of_each_cell(filler: recall.Filler):
    report = recall.measure_recall(Oracle(2000), filler, cases=2, seed=0, advance=lambda done, total: None)
    assert set(report) == set(tasks.KINDS)
    for rows in report.values():
        assert [row["distance"] for row in rows] == list(recall.DISTANCES)
        assert [row["right"] for row in rows] == [2 if d <= 1024 else 0 for d in recall.DISTANCES]
