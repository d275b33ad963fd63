"""Generated long documents contain what the questions ask for, at the stated positions."""

import re

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks.long_context.workload import TASKS, make_case
from entropic_jax.models.train.recall import Filler
from entropic_jax.serving.options.model import EMBEDDED


@pytest.fixture(scope="module")
def filler() -> Filler:
    text = "".join(f"def function_{i}(x):\n    return x + {i}\n\n\n" for i in range(2000))
    return Filler([text], Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")))


@pytest.mark.parametrize("name", list(TASKS))
def test_a_task_states_what_it_asks_for(name):
    for seed in range(5):
        task = TASKS[name](np.random.default_rng(seed))
        said = "".join(task.statements)
        words = re.findall(r"\w+", task.answer)
        assert words and all(word in said for word in words)
        assert task.answer.endswith("\n")


def test_counted_words_are_the_most_frequent_ones():
    for name, number in (("common words", 3), ("frequent words", 1)):
        for seed in range(5):
            task = TASKS[name](np.random.default_rng(seed))
            words = [line.split('"')[1] for line in task.statements]
            counts = sorted(((words.count(w), w) for w in set(words)), reverse=True)
            answer = task.answer.strip().rstrip("]").replace('"', "").split(", ")
            assert {w for _, w in counts[:number]} == set(answer)
            assert counts[number - 1][0] > counts[number][0]


@pytest.mark.parametrize("first", ["needle", "multi-hop"])
@pytest.mark.parametrize("length", [2000, 4000])
def test_a_case_is_a_document_and_its_questions(filler, first, length):
    case = make_case(np.random.default_rng(length), length, filler, first)
    decode = lambda ids: filler.tokenizer.decode(list(ids), skip_special_tokens=False)
    assert length - 200 < len(case.prompt) + len(case.tail) <= length
    again = make_case(np.random.default_rng(length), length, filler, first)
    assert (again.prompt, again.tail) == (case.prompt, case.tail)
    assert set(case.answers) == set(TASKS) and case.answers[first][0] == 0
    # The answers of one-line tasks stand in the document; all stand in the tail, one after another.
    for name, places in case.answers.items():
        assert (np.diff(places) == 1).all()
        answer = decode(np.array(case.tail)[places]).strip().rstrip("]")
        if name in ("needle", "multi-key", "key-value"):
            assert answer.strip('".') in decode(case.prompt)
    other = make_case(np.random.default_rng(length + 1), length, filler, first)
    assert other.prompt != case.prompt
