"""Tasks with checkable answers, generated or read from files, for `benchmarks.sampling`.

The text of a model is never executed: an answer is compared, or evaluated by `interpreter`.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from entropic_jax.models.train import tasks

from . import interpreter

LONG_ANSWER, SHORT_ANSWER = 32, 16  # tokens
FACTS = 6  # in the text above a question
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Task(NamedTuple):
    """A prompt, and a check of its continuation."""

    kind: str
    prompt: str
    check: Callable[[str], bool]
    tokens: int = SHORT_ANSWER


def holds(check: Callable[[], Any]) -> bool:
    """Whether a check passes; any error in the text of the model is a failure."""
    try:
        return bool(check())
    except (interpreter.Unknown, ArithmeticError, AssertionError, AttributeError, LookupError):
        return False
    except (MemoryError, NameError, RecursionError, SyntaxError, TypeError, ValueError):
        return False


def recall(rng: np.random.Generator, kind: str, filler: str) -> Task:
    """A fact among others and some source, and its question; the answer must be exact.

    The prompt ends where a word of the tokenizer does: a space or a bracket belongs to the word after it.
    """
    facts = [tasks.KINDS[kind](rng) for _ in range(FACTS)]
    question_fact = facts[int(rng.integers(FACTS))]
    question = question_fact.question.rstrip(" (")
    expected = question_fact.question[len(question) :] + question_fact.answer.rstrip("\n")
    text = "".join(fact.statement for fact in facts) + filler + question
    if kind != "definition":
        tokens = LONG_ANSWER if kind == "variable" else SHORT_ANSWER
        return Task(kind, text, lambda completion: completion.startswith(expected), tokens)
    head = question[question.rindex("def ") :]
    tree = lambda body: ast.dump(ast.parse(head + body))
    lines = expected.count("\n") + 1

    def same(completion: str) -> bool:  # the same function, however it is laid out
        return tree("\n".join(completion.split("\n")[:lines])) == tree(expected)

    return Task(kind, text, lambda completion: holds(lambda: same(completion)), LONG_ANSWER)


def asserted(completion: str, names: dict[str, Any]) -> Any:
    """The value on the right of an `assert … ==` that a completion continues; a message may follow."""
    statement = ast.parse("assert _ ==" + completion.split("\n")[0]).body[0]
    if not isinstance(statement, ast.Assert) or not isinstance(statement.test, ast.Compare):
        raise ValueError("the completion does not end an assertion")
    if not all(isinstance(operator, ast.Eq) for operator in statement.test.ops):
        raise ValueError("the completion compares by another operator than ==")
    return interpreter.evaluate(ast.unparse(statement.test.comparators[-1]), names)


def assignment(rng: np.random.Generator) -> Task:
    """The value of a name after a few assignments; any expression with that value is right."""
    names = [str(n) for n in rng.choice(tasks.WORDS, 4, replace=False)]
    values = rng.choice(np.arange(10, 1000), 2, replace=False)
    lines = [
        f"{names[0]} = {values[0]}",
        f"{names[1]} = {values[1]}",
        f"{names[2]} = {names[int(rng.integers(2))]}",
    ]
    lines.append(f"{names[3]} = {names[2]}")
    text = "\n".join(lines) + "\n"
    # As text, the name itself would be right.
    free = {k: v for k, v in interpreter.run(text).items() if k not in names[2:]}
    name, expected = names[3], interpreter.run(text)[names[3]]
    return Task(
        "assignment",
        f"{text}assert {name} ==",
        lambda completion: holds(lambda: asserted(completion, free) == expected),
    )


def lookup(rng: np.random.Generator) -> Task:
    """A value in a dict above."""
    keys = [str(k) for k in rng.choice(tasks.WORDS, 5, replace=False)]
    table = {key: int(rng.integers(10, 1000)) for key in keys}
    body = "".join(f'    "{k}": {v},\n' for k, v in table.items())
    key = keys[int(rng.integers(5))]
    text = f'TABLE = {{\n{body}}}\n\nassert TABLE["{key}"] =='
    return Task("lookup", text, lambda completion: holds(lambda: asserted(completion, {}) == table[key]))


GENERATORS: dict[str, Callable[[np.random.Generator], Task]] = {
    "assignment": assignment,
    "lookup": lookup,
}
KINDS = (*tasks.KINDS, *GENERATORS)


def generated(kind: str, count: int, seed: int, filler: str) -> list[Task]:
    """Tasks of one of `KINDS`, the same for the same seed; `filler` is source to stand above questions."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")
    rng = np.random.default_rng((seed, KINDS.index(kind)))
    if kind in GENERATORS:
        return [GENERATORS[kind](rng) for _ in range(count)]
    return [recall(rng, kind, filler) for _ in range(count)]


def records(path: Path, fields: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, each with these text fields. ValueError says which line has not."""
    for number, line in enumerate(path.read_text("utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not readable JSON: {error}") from None
        missing = [f for f in fields if not isinstance(record, dict) or not isinstance(record.get(f), str)]
        if missing:
            value = json.dumps(record)[:60]
            raise ValueError(f"{path}, line {number}: {missing[0]} must be a string; got {value}")
        yield record


def number(text: str) -> float | None:
    """The answer a solution ends in: the number after ####, else the last one; None without any."""
    numbers = NUMBER.findall(text.rpartition("####")[2])
    return float(numbers[-1].replace(",", "")) if numbers else None


def gsm8k(path: Path) -> list[Task]:
    """A file in the format of GSM8K (Cobbe et al. 2021): `question`, and `answer` ending in #### number."""
    tasks_read: list[Task] = []
    for line, record in enumerate(records(path, ("question", "answer")), 1):
        expected = number(record["answer"])
        if expected is None or "####" not in record["answer"]:
            raise ValueError(f"{path}, record {line}: answer has no number after ####")

        def right(completion: str, expected: float = expected) -> bool:
            return number(completion.split("\nQuestion:")[0]) == expected

        tasks_read.append(Task("gsm8k", f"Question: {record['question']}\nAnswer:", right, 256))
    return tasks_read


def humaneval(path: Path) -> list[Task]:
    """A file in the format of HumanEval (Chen et al. 2021): `prompt`, `entry_point`, `test` with check().

    The first function of the completion is walked, not executed: what needs more of the language than
    `interpreter` has counts as wrong, so that the share of solved tasks is a lower bound.
    """
    tasks_read: list[Task] = []
    for record in records(path, ("task_id", "prompt", "entry_point", "test")):

        def right(completion: str, record: dict[str, Any] = record) -> bool:
            body = re.split(r"\n(?=[^\s#)\]}])", completion)[0]
            run = f"\ncheck({record['entry_point']})\n"
            interpreter.run("\n".join((record["prompt"] + body, record["test"], run)))
            return True

        check = lambda completion, f=right: holds(lambda: f(completion))
        tasks_read.append(Task("humaneval", record["prompt"], check, 256))
    return tasks_read
