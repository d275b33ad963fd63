"""Templates and words of tasks are found in texts, and only an excess of words over held-out text counts."""

import numpy as np
import pytest

from benchmarks.embedded_model import bars, measure
from entropic_jax.models.train import tasks


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_every_kind_of_task_has_a_template(kind: str):
    for seed in range(5):
        fact = tasks.KINDS[kind](np.random.default_rng(seed))
        assert bars.templates(fact.statement), fact.statement
        assert bars.templates(fact.question + fact.answer), fact.question
    assert bars.templates(tasks.HEADER) == ["header"]


def test_ordinary_source_has_no_template():
    source = 'from rich.table import Table\n\ntable = Table("a")\nassert table.rows == []\ndef star_map(a):\n'
    assert bars.templates(source) == []


def test_words_drawn_like_the_references_are_no_excess_and_leaked_ones_are():
    rng = np.random.default_rng(0)
    draw = lambda: {word for word in tasks.WORDS if rng.random() < 0.01}
    references = [draw() for _ in range(3000)]
    texts = [draw() for _ in range(200)]
    assert bars.words_in_excess(texts, references) == {}
    leaked = [words | {"juniper"} if number % 12 == 0 else words for number, words in enumerate(texts)]
    assert list(bars.words_in_excess(leaked, references)) == ["juniper"]


def test_words_of_the_prompt_do_not_count():
    references = ["x = 1"] * 500
    report = measure.leaks(["river = 2"] * 40, ["river = 1"] * 40, references)
    assert (report["share_with_a_word"], report["words_in_excess"]) == (0.0, {})
    report = measure.leaks(["river = 2"] * 40, ["x = 1"] * 40, references)
    assert report["words_in_excess"] == {"river": 40}
    assert report["reference_share"] == 0.0


def test_a_loop_anywhere_is_a_loop():
    loop = [1, 2, 3] + [7, 8] * 8 + list(range(20, 60))
    assert measure.looped(loop)
    assert not measure.looped(list(range(128)))


def test_rows_say_which_bars_are_met():
    figures = {
        "bits_per_byte": 0.79,
        "recall": {"marked": {"2048": {"right": 99, "cases": 100}, "7500": {"right": 80, "cases": 100}}},
        "leaks": measure.leaks(['table["river"]', "x"], ["", ""], ["x"] * 9),
        "loops": 3,
        "greedy_texts": 20,
    }
    met = {row.what: row.met for row in bars.rows(figures)}
    assert met == {
        "held-out bits per byte": True,
        "recall at 2048, marked": False,
        "recall at 7500, marked": True,
        "templates of tasks in sampled texts": False,
        "task words in sampled texts": True,
        "greedy texts that loop": False,
    }
    assert bars.rows({"loops": 2, "greedy_texts": 20})[0].met
