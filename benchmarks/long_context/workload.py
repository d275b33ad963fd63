"""Generated tasks in the style of RULER (Hsieh et al. 2024, arXiv 2404.06654), in the model's language.

A document is held-out source code with statements of every task scattered through it; the questions come at
its end, one task after another. What a question should be answered with stands in the document alone.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from entropic_jax.models.train import tasks
from entropic_jax.models.train.data import encode_task
from entropic_jax.models.train.recall import Filler
from entropic_jax.models.train.tasks import Piece

DISTRACTOR_EVERY = 256  # tokens
SPARE = 48  # tokens: pieces encoded together may come to a few more than apart


class Task(NamedTuple):
    """Statements to scatter, in their order, and what is asked about them at the end."""

    statements: list[str]
    question: str
    answer: str


class Case(NamedTuple):
    """A prompt that ends where the first answer begins, and the text after it with the answers marked."""

    prompt: list[int]
    tail: list[int]
    answers: dict[str, np.ndarray]  # by task, indices into the tail
    first: str  # the task whose question the prompt ends with


def of_fact(make: Callable[[np.random.Generator], tasks.Fact]) -> Callable[[np.random.Generator], Task]:
    """A task of one fact, stated in one place."""

    def task(rng: np.random.Generator) -> Task:
        fact = make(rng)
        return Task([fact.statement], fact.question, fact.answer)

    return task


def multi_key(rng: np.random.Generator) -> Task:
    """One of eight needles whose keys share their first word."""
    first = rng.choice(tasks.WORDS)
    seconds = rng.choice([w for w in tasks.WORDS if w != first], 8, replace=False)
    numbers = rng.integers(100, 1000, 8)
    heads = [f"# The secret number of the {first} {second} is " for second in seconds]
    index = int(rng.integers(8))
    statements = [f"{head}{number}.\n" for head, number in zip(heads, numbers, strict=True)]
    return Task(statements, heads[index], f"{numbers[index]}.\n")


def multi_hop(rng: np.random.Generator) -> Task:
    """A value that is passed on through four names, each line in a place of its own."""
    names = ["_".join(rng.choice(tasks.WORDS, 2)) for _ in range(4)]
    value = rng.choice(tasks.WORDS)
    lines = [f'{names[0]} = "{value}"\n'] + [f"{b} = {a}\n" for a, b in itertools.pairwise(names)]
    trace = " == ".join([*names[-2::-1], f'"{value}"\n'])
    return Task(lines, f"assert {names[-1]} == ", trace)


def common_words(rng: np.random.Generator) -> Task:
    """A task of thirteen words of which three occur ten times; the others occur once."""
    return _counted(rng, [10, 10, 10] + [1] * 10, "most_common")


def frequent_words(rng: np.random.Generator) -> Task:
    """The most frequent of words whose frequencies fall by a power law."""
    return _counted(rng, [int(24 / (i + 1) ** 1.5) or 1 for i in range(10)], "most_frequent", 1)


def _counted(rng: np.random.Generator, counts: list[int], name: str, most_frequent: int = 3) -> Task:
    words = rng.choice(tasks.WORDS, len(counts), replace=False)
    drawn = rng.permutation(np.repeat(words, counts))
    key = "_".join(rng.choice(tasks.WORDS, 2))
    lines = [f'{key}.append("{word}")\n' for word in drawn]
    answer = ", ".join(f'"{word}"' for word in words[:most_frequent])
    return Task(lines, f"assert {name}({key}) == [", f"{answer}]\n")


TASKS: dict[str, Callable[[np.random.Generator], Task]] = {
    "needle": of_fact(tasks.needle),
    "multi-key": multi_key,
    "key-value": of_fact(tasks.key_value),
    "variable": of_fact(tasks.variable),
    "multi-hop": multi_hop,
    "common words": common_words,
    "frequent words": frequent_words,
}


def make_case(rng: np.random.Generator, length: int, filler: Filler, first: str) -> Case:
    """A case whose prompt and tail together have `length` tokens, with the question of task `first` first."""
    task_of = {name: make(rng) for name, make in TASKS.items()}
    order = [first, *(str(name) for name in rng.permutation([n for n in TASKS if n != first]))]
    question_of = {name: task_of[name].question for name in order}
    distractors = [tasks.KINDS[k](rng) for k in rng.choice(list(tasks.KINDS), length // DISTRACTOR_EVERY)]
    distractors = [
        distractor for distractor in distractors if distractor.question not in question_of.values()
    ]
    questions = [(task_of[n].question, task_of[n].answer, filler.short_line(rng)) for n in order]
    used = sum(filler.count(text) for question_texts in questions for text in question_texts)
    used += sum(filler.count(s) for task in task_of.values() for s in task.statements)
    used += sum(filler.count(distractor.statement) for distractor in distractors)
    lines = filler.stretch(rng, length - used - SPARE)
    events = [(rng.uniform(0, 0.97), distractor.statement) for distractor in distractors]
    for task in task_of.values():
        places = np.sort(rng.uniform(0, 0.95, len(task.statements)))
        events += list(zip(places.tolist(), task.statements, strict=True))
    events.sort(key=lambda event: event[0])
    document: list[str] = []
    line = 0
    for place, text in events:
        next_line = int(place * len(lines))
        document += [*lines[line:next_line], text]
        line = next_line
    document += lines[line:]
    texts = ["".join(document), *(text for question_texts in questions for text in question_texts)]
    tokens, piece = encode_task(filler.tokenizer, [Piece(text, number) for number, text in enumerate(texts)])
    piece = piece.astype(int)
    start = int(np.flatnonzero(piece == 2)[0])
    answers = {n: np.flatnonzero(piece == 2 + 3 * i) - start for i, n in enumerate(order)}
    return Case(tokens[:start].tolist(), tokens[start:].tolist(), answers, first)
