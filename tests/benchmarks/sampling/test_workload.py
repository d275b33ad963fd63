"""Tasks of the sampling benchmark: correct answers pass, wrong ones fail, and generated code is contained."""

import json
import math

import numpy as np
import pytest

from benchmarks.sampling import interpreter, workload
from entropic_jax.models.train import tasks


@pytest.mark.parametrize("kind", workload.KINDS)
def test_right_answers_pass_and_others_do_not(kind):
    tasks = workload.generated(kind, 12, 3, "import json\n")
    again = workload.generated(kind, 12, 3, "import json\n")
    assert [t.prompt for t in tasks] == [t.prompt for t in again]
    assert len({t.prompt for t in tasks}) == 12
    for task in tasks:
        for wrong in ("", " 5 + None", "\n", "x" * 50, " __import__('os')", "((((", '"'):
            assert not task.check(wrong), wrong
        assert task.check(answer(kind, task.prompt) + "\nand more")


def answer(kind: str, prompt: str) -> str:
    """The correct answer, read from the prompt."""
    question = prompt.split("\n")[-1]
    if kind in ("key_value", "needle"):
        line = next(
            x
            for x in prompt.split("\n")[:-1]
            if x.startswith(question.replace("assert ", "").replace("==", "=").rstrip('"'))
        )
        return line[len(question.replace("assert ", "").replace("==", "=")) :]
    if kind == "variable":
        values = dict(line.split(" = ") for line in prompt.split("\n") if " = " in line)
        trace = [values[question.split()[1]]]
        while not trace[-1].startswith('"'):
            trace.append(values[trace[-1]])
        return " " + " == ".join(trace)
    if kind == "definition":
        head = prompt[prompt.rindex("def ") :]
        body = prompt[prompt.index(head) + len(head) :]
        return "\n".join(body.split("\n")[:2]).replace(", ", ",  ")  # laid out otherwise
    if kind == "assignment":
        return " " + str(interpreter.run(prompt.rpartition("\n")[0])[question.split()[1]]) + ', "a message"'
    return " " + str(interpreter.run(prompt.rpartition("\n")[0])["TABLE"][question.split('"')[1]])


def test_kinds_are_those_the_model_was_trained_on_and_programs():
    assert set(tasks.KINDS) < set(workload.KINDS)
    with pytest.raises(ValueError, match=r"kind must be one of key_value, needle.*; got 'riddle'"):
        workload.generated("riddle", 1, 0, "")


def lines(path, *records):
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return path


def test_gsm8k(tmp_path):
    file = lines(
        tmp_path / "g.jsonl",
        {"question": "Ann has 3 bags of 4 pears. How many?", "answer": "3 * 4 = <<3*4=12>>12\n#### 12"},
        {"question": "A car costs a lot?", "answer": "so much\n#### 1,250"},
    )
    first, second = workload.gsm8k(file)
    assert first.prompt == "Question: Ann has 3 bags of 4 pears. How many?\nAnswer:"
    assert (
        first.check(" 3 times 4 is 12.")
        and first.check(" 5\n#### 12\nQuestion: 7?")
        and not first.check(" 13")
    )
    assert second.check(" $1250.00") and not second.check("none") and not second.check(" 250")


def test_humaneval(tmp_path):
    prompt = 'def below(items: list, t: int) -> bool:\n    """All of them?\n    >>> below([1], 2)\n    """\n'
    prompt = "from typing import List\n\n\n" + prompt
    asserts = "    assert candidate([1, 2], 3)\n    assert not candidate([4], 3)\n"
    test = f"\nMETADATA = {{}}\n\n\ndef check(candidate):\n{asserts}"
    record = {"task_id": "T/0", "prompt": prompt, "entry_point": "below", "test": test}
    (task,) = workload.humaneval(lines(tmp_path / "h.jsonl", record))
    assert task.prompt == prompt
    assert task.check(
        "    for x in items:\n        if x >= t:\n            return False\n    return True\n\n\nprint(1)\n"
    )
    assert task.check("    return all(x < t for x in items)\n")
    for wrong in (
        "    return True\n",
        "    import os\n",
        "    while True:\n        pass\n",
        "   return (",
        "",
    ):
        assert not task.check(wrong)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1: not readable JSON"),
        ('{"question": "?"}', 'line 1: answer must be a string; got {"question": "\\?"}'),
        ("[1]", "line 1: question must be a string; got"),
        ('{"question": "?", "answer": "12"}', "record 1: answer has no number after ####"),
    ],
)
def test_files_of_another_form(tmp_path, text, said):
    (tmp_path / "f").write_text(text)
    with pytest.raises(ValueError, match=said):
        workload.gsm8k(tmp_path / "f")


PROGRAM = """
def f(n, base=2):
    if n <= 0:
        return [base]
    found = f(n - 1)
    found.append(found[-1] * base)
    return found

total = 0
for i, x in enumerate(f(4)):
    if i == 1:
        continue
    total += x
words = sorted({w.upper() for w in "b a c a".split()}, key=lambda w: -ord(w))
table = {k: len(k) for k in ["aa", "b"] if k != "b"}
a, (b, c) = 1, (2, 3)
while c < 40:
    c *= 2
    if c > 20:
        break
else:
    c = -1
chain = 1 < b <= 2 != 3 and not (a is None) or 7
part = "hello"[1:-1:2] if total else None
"""


def test_the_interpreter_agrees_with_python_on_what_it_knows():
    names: dict = {}
    exec(PROGRAM, names)  # our own text
    interpreted = interpreter.run(PROGRAM)
    for name in ("total", "words", "table", "a", "b", "c", "chain", "part"):
        assert interpreted[name] == names[name], name
    for text in ("2 ** 10 - 7 // 2 % 3", "sum([x * x for x in range(9)]) / 3", "[*map]", "max('ab', 'c')"):
        try:
            want = eval(text)
        except TypeError:
            continue
        assert interpreter.evaluate(text) == want
    assert math.isclose(interpreter.evaluate("-1.5 + abs(-3)"), 1.5)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "().__class__",
        "open('f')",
        "'a'.format_map",
        "(lambda: 0).__globals__",
        "'{0.__class__}'.format(1)",
        "9 ** 9 ** 9",
        "'a' * 10 ** 9",
        "[0] * 10 ** 9",
        "[x for x in range(10 ** 9)]",
        "list(range(10 ** 9))",
        "sum(range(10 ** 9))",
        "f'{1}'",
        "1 << 10 ** 9",
    ],
)
def test_what_reaches_out_or_runs_away_is_refused(text):
    with pytest.raises((interpreter.Unknown, NameError)):
        interpreter.evaluate(text)


def test_random_bytes_never_raise_out_of_a_check():
    rng = np.random.default_rng(0)
    tasks = [workload.generated(kind, 1, 0, "")[0] for kind in workload.KINDS]
    for _ in range(300):
        text = "".join(chr(c) for c in rng.integers(0, 128, 20))
        assert not any(task.check(text) for task in tasks)
